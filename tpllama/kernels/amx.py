"""Linears of many tokens in our own C++ (amx.cpp), on Intel's AMX and on weights as small_m.cpp has them.

A prompt, or a step of several texts, is bound by multiplication: its tokens share each reading of the weights.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tpllama.kernels import small_m
from tpllama.kernels.small_m import KINDS, Kind
from tpllama.kernels.tiles import with_tiles
from tpllama.recording import call, fields

# From this many rows of activations on they beat small_m.cpp. Of int8_dynamic, tiles.py has all.
MANY_ROWS: dict[str, int] = {"plain": 4, "int8": 7, "float8": 6, "int4": 6, "int4_dynamic": 8}


def _native() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    return with_tiles("amx.cpp", "linear")


class _Linear(ctypes.Structure):
    """`Linear` of amx.cpp."""

    _fields_ = fields("kind is_gated tokens columns outputs group", "x weight scale zero extremes y")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_there() -> bool:
    return not isinstance(_native(), str)


def why_not() -> str | None:
    """Why these kernels don't run, if so."""
    found = _native()
    return found if isinstance(found, str) else None


def kernel_name(kind: Kind, dtype: torch.dtype = torch.bfloat16) -> str:
    """Whose kernels a weight's linear takes, and from how many rows on, for people."""
    few, many = small_m.kernel_name() if small_m.has(kind) else "torch", MANY_ROWS.get(kind)
    if many is not None and is_there() and dtype == torch.bfloat16:
        return "own, AMX" if many == 1 else f"{few}; from {many} rows on own, AMX"
    return few if few.startswith("torch") else f"{few}; from {small_m.FEW_ROWS[kind] + 1} rows on torch"


def fits(kind: Kind, rows: Tensor) -> bool:
    """Whether `linear` takes these: many bfloat16 rows of a kind that it knows."""
    is_many = kind in MANY_ROWS and rows.shape[0] >= MANY_ROWS[kind]
    return is_many and rows.is_cpu and rows.dtype == torch.bfloat16 and is_there()


def linear(
    kind: Kind, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None = None, zero: Tensor | None = None,
    group_size: int = 0, agreed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As small_m's, in bfloat16."""
    run = _operator if torch.compiler.is_compiling() else _linear
    return run(kind, rows, weight, outputs, scale, zero, group_size, agreed)


def gated(
    kind: Kind, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None = None, zero: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:  # fmt: skip
    """silu(gate) * up of a weight with the rows of gate and then those of up, `outputs` each."""
    return _linear(kind, rows, weight, outputs, scale, zero, group_size, None, is_gated=True)


def _linear(
    kind: str, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None, zero: Tensor | None, group_size: int,
    agreed: Tensor | None, is_gated: bool = False,
) -> Tensor:  # fmt: skip
    compiled = _native()
    assert isinstance(compiled, ctypes.CDLL)
    rows = rows.contiguous()
    agreed = None if agreed is None else agreed.contiguous()
    y = rows.new_empty(rows.shape[0], outputs)
    addresses = (None if each is None else each.data_ptr() for each in (rows, weight, scale, zero, agreed, y))
    asked = _Linear(KINDS[kind], is_gated, *rows.shape, outputs, group_size, *addresses)
    call(compiled.linear, asked)
    return y


_operator = torch.library.custom_op("tpllama::many_rows", _linear, mutates_args=())


@_operator.register_fake
def _(kind: str, rows: Tensor, weight: Tensor, outputs: int, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)
