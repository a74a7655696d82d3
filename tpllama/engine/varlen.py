"""Attention over the paged cache on CUDA: torch's kernel for sequences of any lengths, which takes block tables.

Not run on a GPU yet: tests/engine/test_varlen.py is marked for one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpllama.engine.batch import Chunk

if TYPE_CHECKING:
    from tpllama.engine.cache import Store

# FlashAttention 2, behind torch's kernel, reads pages of multiples of this.
_PAGE_TOKENS = 256


class VarlenAttention:
    """A `StepAttention` of one call for the whole step. is_alone: one order of sums, whatever the company."""

    def __init__(
        self, chunks: tuple[Chunk, ...], block_size: int, scale: float, device: torch.device, is_alone: bool
    ) -> None:
        self._block_size = block_size
        self._scale = scale
        self._num_splits = 1 if is_alone else None
        counts = [len(chunk.tokens) for chunk in chunks]
        lengths = [chunk.stop for chunk in chunks]
        tables = [[block for first, count in chunk.runs for block in range(first, first + count)] for chunk in chunks]
        widest = max(map(len, tables), default=0)
        padded = [table + [0] * (widest - len(table)) for table in tables]
        self._tokens, self._most_tokens, self._longest = sum(counts), max(counts, default=0), max(lengths, default=0)
        starts = list(itertools.accumulate(counts, initial=0))
        self._starts, self._lengths, self._tables = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, lengths, padded)
        )

    @staticmethod
    def fits(block_size: int, stored: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel can read such a cache."""
        is_half = stored in (torch.bfloat16, torch.float16)
        return device.type == "cuda" and is_half and block_size % _PAGE_TOKENS == 0

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = torch.zeros_like(q)
        if self._tokens == 0:
            return out
        k, v = (store.parts()[0].unflatten(0, (-1, self._block_size)) for store in (keys, values))
        attended = varlen_attn(
            q[: self._tokens], k, v, self._starts, None, self._most_tokens, self._longest, window_size=(-1, 0),
            scale=self._scale, enable_gqa=True, seqused_k=self._lengths, block_table=self._tables,
            num_splits=self._num_splits,
        )  # fmt: skip
        assert isinstance(attended, Tensor)  # as no sums are asked for
        out[: self._tokens] = attended
        return out
