"""Attention of prompts over the paged cache in our own C++ (prompt.cpp), in bfloat16 on Intel's AMX.

A token's result depends neither on what is computed beside it nor on how its prompt was cut.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tpllama.native import library

_INTEGERS = "q"  # int64, as `array` calls it
Spans = list[tuple[int, int]]


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled function, or why there is none."""
    compiled = library(Path(__file__).with_name("prompt.cpp"))
    if isinstance(compiled, str):
        return compiled
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    compiled.why_not.restype = ctypes.c_char_p
    reason = compiled.why_not()  # asks the system, for the whole process
    if reason is not None:
        return reason.decode()
    compiled.attend_prompts.argtypes = (
        pointer, *(size,) * 3, pointer, size, pointer, pointer, ctypes.c_float, pointer, ctypes.c_int,
    )  # fmt: skip
    compiled.attend_prompts.restype = None
    return compiled


def is_available() -> bool:
    """Whether this machine could compile it, and has AMX."""
    return not isinstance(_native(), str)


def why_not() -> str | None:
    """Why this does not run, if so."""
    found = _native()
    return found if isinstance(found, str) else None


class _Prompts(ctypes.Structure):
    """`Prompts` of prompt.cpp."""

    _fields_ = (
        ("count", ctypes.c_ssize_t),
        *((name, ctypes.c_void_p) for name in ("rows", "tokens", "lengths", "ends", "runs")),
    )


class Prompts:
    """A step's prompts, made once for all layers: the row of the first token, how many tokens, and (first slot, number
    of slots) of where the sequence lies up to the last of them. scale: of queries' products with keys.
    """

    def __init__(self, prompts: Iterable[tuple[int, int, Spans]], scale: float) -> None:
        self._scale = scale
        self._held = rows, tokens, lengths, ends, runs = tuple(array(_INTEGERS) for _ in range(5))
        for row, count, spans in prompts:
            rows.append(row)
            tokens.append(count)
            lengths.append(sum(size for _, size in spans))
            for span in spans:
                runs.extend(span)
            ends.append(len(runs) // 2)
        self._prompts = _Prompts(len(rows), *(each.buffer_info()[0] for each in self._held))

    def __len__(self) -> int:
        return self._prompts.count

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """To the prompts' rows of `out` [tokens, heads * head_dim], as which q is, whose rows may lie apart.

        keys, values: [slots, kv_heads, head_dim], those of the prompts' own tokens included.
        """
        compiled = _native()
        assert isinstance(compiled, ctypes.CDLL)
        _, kv_heads, head_dim = keys.shape
        compiled.attend_prompts(
            ctypes.addressof(self._prompts), q.shape[1] // head_dim, kv_heads, head_dim, q.data_ptr(), q.stride(0),
            keys.data_ptr(), values.data_ptr(), self._scale, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
