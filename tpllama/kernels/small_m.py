"""Linears of few tokens in our own C++ (small_m.cpp), on the weights as the library's kernels have them.

Steps of decoding are bound by memory, so what counts is that weights stream in, and that little is done beside it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpllama.native import library
from tpllama.recording import call, callable_in, fields

Kind = Literal["plain", "int8", "float8", "int8_dynamic", "int4", "int4_dynamic"]

# Up to this many rows of activations they beat the library (bench/linears.py).
FEW_ROWS: dict[str, int] = {"plain": 32, "int8": 32, "float8": 32, "int8_dynamic": 64, "int4": 32, "int4_dynamic": 32}
_PANEL_BYTES = 1 << 20  # of a weight widened to bfloat16: what stays in a core's cache until it is multiplied
KINDS: dict[str, int] = {"plain": 0, "int8": 1, "float8": 2, "int8_dynamic": 3, "int4": 4, "int4_dynamic": 5}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LEVELS = ("plain loops", "AVX2", "AVX-512")
_AVX2, _AVX512 = 1, 2


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    compiled = library(Path(__file__).with_name("small_m.cpp"))
    if isinstance(compiled, str):
        return compiled
    callable_in(compiled, "linear", "extremes", "widen_rows")
    return compiled if compiled.level() >= _AVX2 else "this processor has no AVX2"


class _Linear(ctypes.Structure):
    """`Linear` of small_m.cpp."""

    _fields_ = fields("kind level type rows columns outputs group", "x weight scale zero range y")


class _Extremes(ctypes.Structure):
    """`Extremes` of small_m.cpp."""

    _fields_ = fields("level type rows columns", "x to")


class _Widen(ctypes.Structure):
    """`Widen` of small_m.cpp."""

    _fields_ = fields("kind first last columns group", "weight scale zero to")


def _compiled() -> ctypes.CDLL:
    compiled = _native()
    assert isinstance(compiled, ctypes.CDLL)
    return compiled


@functools.cache
def _level() -> int:
    return -1 if isinstance(_native(), str) else _compiled().level()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def level() -> int:
    """What the kernels are made for, as small_m.cpp counts; -1 where there are none."""
    return _level()


def kernel_name() -> str:
    """Whose kernels few tokens take, for people."""
    found = _native()
    return f"torch ({found})" if isinstance(found, str) else f"own, {_LEVELS[level()]}"


def why_not() -> str | None:
    """Why torch's kernels run instead of these, if so."""
    found = _native()
    return found if isinstance(found, str) else None


def has(kind: Kind) -> bool:
    """Whether there is a kernel for weights of a kind; for most of them only with AVX-512."""
    return level() >= (_AVX2 if kind in ("plain", "int8", "int8_dynamic") else _AVX512)


def fits(kind: Kind, rows: Tensor) -> bool:
    """Whether `linear` takes these: few rows, of a type that it reads."""
    is_few = 0 < rows.shape[0] <= FEW_ROWS[kind] and rows.is_cpu
    return is_few and (rows.dtype == torch.bfloat16 or (kind == "int8_dynamic" and rows.dtype in _TYPES)) and has(kind)


def linear(
    kind: Kind, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None = None, zero: Tensor | None = None,
    group_size: int = 0, agreed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows [n, columns] times a weight of so many outputs, in rows' dtype: [n, outputs].

    scale, zero: of rows, or of groups [outputs, groups]. agreed: `extremes` of dynamic kinds that ranks agreed on.
    """
    run = _operator if torch.compiler.is_compiling() else _linear
    return run(kind, rows, weight, outputs, scale, zero, group_size, agreed)


def extremes(rows: Tensor) -> Tensor:
    """Each row's maximum, and minus its minimum: [2, n]."""
    return _extremes_operator(rows) if torch.compiler.is_compiling() else _extremes(rows)


def many_rows(
    kind: Kind, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None = None, zero: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:  # fmt: skip
    """The same for many bfloat16 rows, by the library on some outputs at a time; scales of rows are not applied."""
    run = _widen_operator if torch.compiler.is_compiling() else _widen
    panel = max(16, _PANEL_BYTES // (2 * rows.shape[1]))
    y = rows.new_empty(rows.shape[0], outputs)
    for first in range(0, outputs, panel):
        last = min(first + panel, outputs)
        y[:, first:last] = F.linear(rows, run(kind, weight, first, last, rows.shape[1], scale, zero, group_size))
    return y


def _linear(
    kind: str, rows: Tensor, weight: Tensor, outputs: int, scale: Tensor | None, zero: Tensor | None, group_size: int,
    agreed: Tensor | None,
) -> Tensor:  # fmt: skip
    rows = rows.contiguous()
    agreed = None if agreed is None else agreed.contiguous()
    count, columns = rows.shape
    y = rows.new_empty(count, outputs)
    addresses = (None if each is None else each.data_ptr() for each in (rows, weight, scale, zero, agreed, y))
    asked = _Linear(KINDS[kind], _level(), _TYPES[rows.dtype], count, columns, outputs, group_size, *addresses)
    call(_compiled().linear, asked)
    return y


def _extremes(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    found = rows.new_empty(2, rows.shape[0])
    asked = _Extremes(_level(), _TYPES[rows.dtype], *rows.shape, rows.data_ptr(), found.data_ptr())
    call(_compiled().extremes, asked)
    return found


def _widen(
    kind: str, weight: Tensor, first: int, last: int, columns: int, scale: Tensor | None, zero: Tensor | None,
    group_size: int,
) -> Tensor:  # fmt: skip
    """Outputs first to last, bfloat16 [last - first, columns]."""
    wide = torch.empty(last - first, columns, dtype=torch.bfloat16)
    addresses = (None if each is None else each.data_ptr() for each in (weight, scale, zero, wide))
    call(_compiled().widen_rows, _Widen(KINDS[kind], first, last, columns, group_size, *addresses))
    return wide


# For compiled layers, which can't look into ctypes. Eager calls go without: an operator costs many times the call.
_operator = torch.library.custom_op("tpllama::few_rows", _linear, mutates_args=())
_extremes_operator = torch.library.custom_op("tpllama::extremes", _extremes, mutates_args=())
_widen_operator = torch.library.custom_op("tpllama::widen", _widen, mutates_args=())


@_operator.register_fake
def _(kind: str, rows: Tensor, weight: Tensor, outputs: int, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)


@_extremes_operator.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(2, rows.shape[0])


@_widen_operator.register_fake
def _(kind: str, weight: Tensor, first: int, last: int, columns: int, *_: object) -> Tensor:
    return weight.new_empty(last - first, columns, dtype=torch.bfloat16)
