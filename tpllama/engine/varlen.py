"""Attention through block tables: torch's kernel for sequences of any lengths on CUDA, and the same in few operations.

Not run on a GPU yet: tests/engine/test_varlen.py is marked for one.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tpllama.engine.batch import Chunk

if TYPE_CHECKING:
    from tpllama.engine.cache import Store

# FlashAttention 2, behind torch's kernel, reads pages of multiples of this.
_PAGE_TOKENS = 256
# Where the keys of a text are split over several sums, the kernel leaves all texts but the first unwritten
# (pytorch/pytorch#194167, open in 2.13).
_NUM_SPLITS = 1


@functools.cache
def _takes_tables() -> bool:
    """Whether torch's kernel has block tables: 2.13's has them, its first versions have not."""
    from torch.nn.attention.varlen import varlen_attn

    return {"seqused_k", "block_table", "num_splits"} <= set(inspect.signature(varlen_attn).parameters)


class VarlenAttention:
    """A `StepAttention` of one call for the whole step.

    All int32: starts [sequences + 1] of each one's tokens, how many keys they look at [sequences], in blocks tables
    [sequences, blocks]. sizes: tokens, the most of them of one sequence, the most keys. Sums have one order, whatever
    the company.
    """

    def __init__(
        self, starts: Tensor, lengths: Tensor, tables: Tensor, sizes: tuple[int, int, int], block_size: int,
        scale: float,
    ) -> None:  # fmt: skip
        self._starts, self._lengths, self._tables = starts, lengths, tables
        self._tokens, self._most_tokens, self._longest = sizes
        self._block_size = block_size
        self._scale = scale

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], block_size: int, scale: float, device: torch.device) -> VarlenAttention:
        """That of a step of these chunks."""
        counts = [len(chunk.tokens) for chunk in chunks]
        lengths = [chunk.stop for chunk in chunks]
        tables = [[block for first, count in chunk.runs for block in range(first, first + count)] for chunk in chunks]
        widest = max(map(len, tables), default=0)
        padded = [table + [0] * (widest - len(table)) for table in tables]
        sizes = sum(counts), max(counts, default=0), max(lengths, default=0)
        starts = list(itertools.accumulate(counts, initial=0))
        of_starts, of_lengths, of_tables = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, lengths, padded)
        )
        return cls(of_starts, of_lengths, of_tables, sizes, block_size, scale)

    @staticmethod
    def fits(block_size: int, stored: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel can read such a cache."""
        is_half = stored in (torch.bfloat16, torch.float16)
        return device.type == "cuda" and is_half and block_size % _PAGE_TOKENS == 0 and _takes_tables()

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self._tokens == 0:
            return torch.zeros_like(q)
        is_full = self._tokens == len(q)
        k, v = (store.parts()[0].unflatten(0, (-1, self._block_size)) for store in (keys, values))
        own = q if is_full else q[: self._tokens]
        attended = varlen_attn(
            own, k, v, self._starts, None, self._most_tokens, self._longest, window_size=(-1, 0), scale=self._scale,
            enable_gqa=True, seqused_k=self._lengths, block_table=self._tables, num_splits=_NUM_SPLITS,
        )  # fmt: skip
        assert isinstance(attended, Tensor)  # as no sums are asked for
        if is_full:
            return attended
        out = torch.zeros_like(q)
        out[: self._tokens] = attended
        return out


class GatheredAttention:
    """A `StepAttention` of one token of each text, on copies of all that its block table names.

    For caches that torch's kernel doesn't read, where the step is recorded and may not depend on lengths.
    """

    def __init__(self, lengths: Tensor, tables: Tensor, block_size: int, scale: float) -> None:
        within = torch.arange(block_size, device=tables.device)
        slots = tables.long().unsqueeze(-1) * block_size + within
        self._slots = slots.flatten()
        places = torch.arange(slots[0].numel(), device=tables.device)
        self._seen = (places < lengths[:, None])[:, None, None]  # [texts, 1, 1, slots]
        self._scale = scale

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        # [texts, kv_heads, slots, head_dim]
        k, v = (store.take(self._slots)[0].unflatten(1, (len(q), -1)).transpose(0, 1) for store in (keys, values))
        grouped = q.unflatten(1, (k.shape[1], -1))  # the query heads of a KV head as its queries
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=self._seen, scale=self._scale).flatten(1, 2)
