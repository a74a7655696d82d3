"""Linears of any number of bfloat16 tokens on Intel's AMX, of weights laid out for it when loaded (tiles.cpp)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tpllama.native import library
from tpllama.recording import call, callable_in, fields

Kind = Literal["plain_tiles", "int8_tiles"]
KINDS: dict[str, int] = {"plain_tiles": 0, "int8_tiles": 1}  # as tiles.cpp counts
# What weights are filled up to with zeros: a panel's outputs, and the bytes of each in a tile.
PANEL_OUTPUTS, ROW_BYTES = 32, 64


@functools.cache
def with_tiles(name: str, *functions: str) -> ctypes.CDLL | str:
    """A file of this folder, compiled, with functions for `call`, or why it can't run here.

    Asks the system for AMX, for the whole process.
    """
    compiled = library(Path(__file__).with_name(name))
    if isinstance(compiled, str):
        return compiled
    compiled.why_not.restype = ctypes.c_char_p
    if (reason := compiled.why_not()) is not None:
        return str(reason.decode())
    callable_in(compiled, *functions)
    return compiled


def _native() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    return with_tiles("tiles.cpp", "linear", "lay_out", "take_rows")


class _Linear(ctypes.Structure):
    """`Linear` of tiles.cpp."""

    _fields_ = fields("kind is_gated tokens columns outputs", "x weight scale extremes y", "least_scale")


class _LayOut(ctypes.Structure):
    """`LayOut` of tiles.cpp."""

    _fields_ = fields("rows row_bytes", "source to")


class _TakeRows(ctypes.Structure):
    """`TakeRows` of tiles.cpp."""

    _fields_ = fields("count steps", "numbers tiles to")


def _compiled() -> ctypes.CDLL:
    compiled = _native()
    assert isinstance(compiled, ctypes.CDLL)
    return compiled


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_there() -> bool:
    return not isinstance(_native(), str)


def why_not() -> str | None:
    """Why these kernels don't run, if so."""
    found = _native()
    return found if isinstance(found, str) else None


def fits(rows: Tensor) -> bool:
    """Whether `linear` takes these."""
    return rows.is_cpu and rows.dtype == torch.bfloat16


def lay_out(weight: Tensor) -> Tensor:
    """bfloat16 or int8 [outputs, columns] as it is multiplied: [outputs / 32, columns * bytes / 64, 2, 16, 64 / bytes].

    Two tiles of 16 outputs follow each other, each 16 rows of 4 bytes of every output; zeros beyond the last.
    """
    weight = weight.contiguous()
    outputs, columns = weight.shape
    each = ROW_BYTES // weight.element_size()
    tiles = weight.new_empty(-(-outputs // PANEL_OUTPUTS), -(-columns // each), 2, 16, each)
    call(_compiled().lay_out, _LayOut(outputs, columns * weight.element_size(), weight.data_ptr(), tiles.data_ptr()))
    return tiles


def take_rows(tiles: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a weight that is laid out and whole: numbers int64 [n], below its outputs; [n, columns]."""
    numbers = numbers.contiguous()
    _, steps, _, _, each = tiles.shape
    rows = tiles.new_empty(len(numbers), steps * each)
    asked = _TakeRows(len(numbers), steps, numbers.data_ptr(), tiles.data_ptr(), rows.data_ptr())
    call(_compiled().take_rows, asked)
    return rows


def linear(
    kind: Kind, rows: Tensor, tiles: Tensor, outputs: int, scale: Tensor | None = None, least_scale: float = 1.0,
    agreed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows [n, columns] times a weight that is laid out, bfloat16 [n, outputs].

    scale: of int8's outputs, float32 [outputs]; least_scale: the smallest of them. agreed: `small_m.extremes` of the
    tokens that ranks agreed on.
    """
    run = _operator if torch.compiler.is_compiling() else _linear
    return run(kind, rows, tiles, outputs, scale, least_scale, agreed)


def gated(
    kind: Kind, rows: Tensor, tiles: Tensor, outputs: int, scale: Tensor | None = None, least_scale: float = 1.0
) -> Tensor:
    """silu(gate) * up of a weight with the panels of gate and then those of up, `outputs` each, whole panels."""
    return _linear(kind, rows, tiles, outputs, scale, least_scale, None, is_gated=True)


def _linear(
    kind: str, rows: Tensor, tiles: Tensor, outputs: int, scale: Tensor | None, least_scale: float,
    agreed: Tensor | None, is_gated: bool = False,
) -> Tensor:  # fmt: skip
    rows = rows.contiguous()
    agreed = None if agreed is None else agreed.contiguous()
    y = rows.new_empty(rows.shape[0], outputs)
    addresses = (None if each is None else each.data_ptr() for each in (rows, tiles, scale, agreed, y))
    asked = _Linear(KINDS[kind], is_gated, *rows.shape, outputs, *addresses, least_scale)
    call(_compiled().linear, asked)
    return y


_operator = torch.library.custom_op("tpllama::laid_out", _linear, mutates_args=())


@_operator.register_fake
def _(kind: str, rows: Tensor, tiles: Tensor, outputs: int, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)
