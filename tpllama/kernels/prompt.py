"""Attention of prompts over the paged cache in our own C++ (prompt.cpp), in bfloat16 on Intel's AMX.

A token's result depends neither on what is computed beside it nor on how its prompt was cut.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from torch import Tensor

from tpllama.kernels.fused import INTEGERS, Spans, flattened
from tpllama.kernels.tiles import with_tiles
from tpllama.recording import call, fields


def _native() -> ctypes.CDLL | str:
    """The compiled function, or why there is none."""
    return with_tiles("prompt.cpp", "attend_prompts")


def is_available() -> bool:
    """Whether this machine could compile it, and has AMX."""
    return not isinstance(_native(), str)


def why_not() -> str | None:
    """Why this does not run, if so."""
    found = _native()
    return found if isinstance(found, str) else None


class _Prompts(ctypes.Structure):
    """`Prompts` of prompt.cpp."""

    _fields_ = fields("count", "rows tokens lengths ends runs")


class _Attend(ctypes.Structure):
    """`Attend` of prompt.cpp; its heads end with a float, and so with a gap."""

    _fields_ = (
        *fields("heads kv_heads dim q_stride", "q keys values out", "scale"),
        ("prompts", ctypes.c_void_p),
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
        addresses = (x.data_ptr() for x in (q, keys, values, out))
        heads = q.shape[1] // head_dim, kv_heads, head_dim, q.stride(0), *addresses, self._scale
        call(compiled.attend_prompts, _Attend(*heads, ctypes.addressof(self._prompts)))
