"""Attention of prompts over the paged cache in our own C++ (prompt.cpp), in bfloat16 on Intel's AMX.

A token's result depends neither on what is computed beside it nor on how its prompt was cut.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tpllama.kernels.fused import INTEGERS, Spans, flattened
from tpllama.kernels.tiles import with_tiles


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled function, or why there is none."""
    compiled = with_tiles("prompt.cpp")
    if isinstance(compiled, str):
        return compiled
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
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

    def __init__(self, prompts: Sequence[tuple[int, int, Spans]], scale: float) -> None:
        self._scale = scale
        rows = array(INTEGERS, [row for row, _, _ in prompts])
        tokens = array(INTEGERS, [count for _, count, _ in prompts])
        self._held = rows, tokens, *flattened(spans for *_, spans in prompts)
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
