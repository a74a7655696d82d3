"""The place of each row's largest number in our own C++ (likeliest.cpp): torch's takes ten times as long on a CPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from tpllama.native import library
from tpllama.recording import call, callable_in, fields


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled function, or why there is none."""
    compiled = library(Path(__file__).with_suffix(".cpp"))
    if not isinstance(compiled, str):
        callable_in(compiled, "likeliest")
    return compiled


class _Likeliest(ctypes.Structure):
    """`Likeliest` of likeliest.cpp."""

    _fields_ = fields("rows columns", "x value column")


def likeliest(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of x [n, columns]: the first of each row's largest, or NaN, float32 [n], and its column, int64 [n].

    None where there is no code for it: of anything but bfloat16 on a CPU.
    """
    compiled = _native()
    if isinstance(compiled, str) or not x.is_cpu or x.dtype != torch.bfloat16 or not x.shape[1]:
        return None
    x = x.contiguous()
    value, column = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
    call(compiled.likeliest, _Likeliest(*x.shape, x.data_ptr(), value.data_ptr(), column.data_ptr()))
    return value, column
