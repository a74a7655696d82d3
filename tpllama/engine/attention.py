"""Attention of a step's tokens over the paged cache, without bringing it together where that can be avoided.

A sequence mostly lies in one or two runs of neighbouring blocks, so its keys and values are views of the cache. Over
each run there is one softmax, and those of several are joined by their logarithms of sums (Milakov and Gimelshein
2018, arXiv 1805.02867). A run that several sequences begin with is read once for all of them. The query heads
of a KV head become rows of one query matrix: keys and values are never repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tpllama.engine.batch import Chunk

if TYPE_CHECKING:
    from tpllama.engine.cache import Store

# A sequence in more runs than this is brought together first: each run costs a call.
_MOST_RUNS = 8

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class StepAttention(Protocol):
    """The attention of one step, the same in each layer."""

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        """Attention of q [tokens, heads, head_dim] over what the step's sequences have in these stores."""


class Part(NamedTuple):
    """Tokens `rows` (places in the step) over `size` slots from `start` on, or over `slots` that lie apart.

    mask: [tokens * queries_per_kv, size], -inf where a token may not look, else 0; None where it may everywhere.
    is_only: nothing else is to be joined for these tokens.
    """

    rows: slice | Tensor
    start: int
    size: int
    slots: Tensor | None
    mask: Tensor | None
    is_only: bool


class PartsAttention:
    """Part by part: see the module."""

    def __init__(self, parts: list[Part], queries_per_kv: int) -> None:
        self._parts = parts
        self._queries_per_kv = queries_per_kv
        self._is_decode = all(part.is_only and part.mask is None and _is_one(part.rows) for part in parts)

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        tokens, heads, head_dim = q.shape
        kv_heads = heads // self._queries_per_kv
        grouped = q.view(tokens, kv_heads, self._queries_per_kv, head_dim)
        if self._is_decode and tokens == len(self._parts):
            return self._decode(grouped, keys, values).view_as(q)
        out = torch.zeros_like(grouped)
        joined = _Joined(grouped) if not all(part.is_only for part in self._parts) else None
        for part in self._parts:
            queries = grouped[part.rows].transpose(0, 1)  # [kv_heads, n, queries_per_kv, head_dim]
            rows = queries.reshape(1, kv_heads, -1, head_dim)
            attended, log_sum = _attend(rows, *_stored(part, keys, values), part.mask)
            attended = attended.view(queries.shape).transpose(0, 1)
            if part.is_only:
                out[part.rows] = attended
            elif joined is not None:
                joined.add(part.rows, attended, log_sum.view(queries.shape[:-1]).transpose(0, 1))
        if joined is not None:
            joined.write(out, [part.rows for part in self._parts if not part.is_only])
        return out.view_as(q)

    def _decode(self, grouped: Tensor, keys: Store, values: Store) -> Tensor:
        """The same in fewer steps, where each part is one token's and all there is for it."""
        attended = [
            _attend(rows, *_stored(part, keys, values), None)[0]
            for rows, part in zip(grouped.split(1), self._parts, strict=True)
        ]
        return torch.cat(attended)


def _is_one(rows: slice | Tensor) -> bool:
    return isinstance(rows, slice) and rows.stop - rows.start == 1


def _stored(part: Part, keys: Store, values: Store) -> tuple[Tensor, Tensor]:
    """Keys and values of a part, each [1, kv_heads, size, head_dim]."""
    if part.slots is None:
        return keys.span(part.start, part.size), values.span(part.start, part.size)
    return keys.take(part.slots), values.take(part.slots)


class _Joined:
    """Softmax-weighted sums over several parts, in float32, and the logarithms of their weights' sums."""

    def __init__(self, like: Tensor) -> None:
        self.sums = torch.zeros(like.shape, device=like.device)
        self.logs = torch.full(like.shape[:-1], -torch.inf, device=like.device)

    def add(self, rows: slice | Tensor, attended: Tensor, logs: Tensor) -> None:
        before = self.logs[rows]
        total = torch.logaddexp(before, logs)
        old, new = ((x - total).exp().unsqueeze(-1) for x in (before, logs))
        self.sums[rows] = self.sums[rows] * old + attended.float() * new
        self.logs[rows] = total

    def write(self, out: Tensor, rows: list[slice | Tensor]) -> None:
        for each in rows:
            out[each] = self.sums[each].to(out.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of its weights: q [1, kv_heads, n, head_dim], logs [1, kv_heads, n]."""
    if q.device.type == "cpu":
        attended, logs = _flash(q, k, v, attn_mask=mask)
        return attended, logs
    scores = (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


class Planner:
    """Makes out the parts of each step. always_copy: each sequence's keys and values are brought together."""

    def __init__(
        self, block_size: int, queries_per_kv: int, dtype: torch.dtype, device: torch.device, always_copy: bool
    ) -> None:
        self._block_size = block_size
        self._queries_per_kv = queries_per_kv
        self._dtype = dtype
        self._device = device
        self._always_copy = always_copy

    def plan(self, chunks: tuple[Chunk, ...]) -> StepAttention:
        """The attention of a step of these chunks."""
        rows = list(itertools.accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        parts, skipped = [], dict.fromkeys(rows, 0)
        for block, count, sharing in [] if self._always_copy else self._shared(chunks, rows):
            skipped |= dict.fromkeys(sharing, count)
            where = torch.tensor(sharing, device=self._device)
            size = self._block_size
            parts.append(Part(where, block * size, count * size, None, None, is_only=False))
        for chunk, row in zip(chunks, rows, strict=False):
            parts.extend(self._parts(chunk, row, skipped[row] * self._block_size))
        return PartsAttention(parts, self._queries_per_kv)

    def _shared(self, chunks: tuple[Chunk, ...], rows: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Runs that several texts begin with: first block, how many they share, and the texts' rows."""
        by_block: dict[int, list[tuple[int, int]]] = {}
        for chunk, row in zip(chunks, rows, strict=False):
            if len(chunk.tokens) == 1:
                first, count = chunk.runs[0]
                by_block.setdefault(first, []).append((row, min(count, chunk.start // self._block_size)))
        for first, sharing in by_block.items():
            count = min(count for _, count in sharing)
            if len(sharing) > 1 and count > 0:
                yield first, count, [row for row, _ in sharing]

    def _parts(self, chunk: Chunk, row: int, skipped: int) -> Iterator[Part]:
        """The parts of one chunk, but for its sequence's first `skipped` tokens."""
        spans = list(self._spans(chunk, skipped))
        if self._always_copy or len(spans) > _MOST_RUNS:
            slots = torch.cat([torch.arange(slot, slot + count, device=self._device) for _, slot, count in spans])
            mask = self._mask(chunk, chunk.start, skipped, len(slots))
            yield Part(slice(row, row + len(chunk.tokens)), 0, len(slots), slots, mask, is_only=not skipped)
            return
        for position, slot, count in spans:
            first = max(chunk.start, position)  # tokens before see nothing of this
            rows = slice(row + first - chunk.start, row + len(chunk.tokens))
            mask = self._mask(chunk, first, position, count)
            yield Part(rows, slot, count, None, mask, is_only=len(spans) == 1 and not skipped)

    def _spans(self, chunk: Chunk, skipped: int) -> Iterator[tuple[int, int, int]]:
        """Neighbouring slots up to the chunk's end: the first one's position in the sequence, its slot, how many.

        Cut where a chunk of several tokens begins: what is before needs no mask.
        """
        borders = (0, chunk.start, chunk.stop) if len(chunk.tokens) > 1 else (0, chunk.stop)
        first = 0
        for block, blocks in chunk.runs:
            size = blocks * self._block_size
            for low, high in itertools.pairwise(borders):
                start, stop = max(first, low, skipped), min(first + size, high)
                if start < stop:
                    yield start, block * self._block_size + start - first, stop - start
            first += size

    def _mask(self, chunk: Chunk, first: int, position: int, count: int) -> Tensor | None:
        """For a chunk's tokens from position `first` on, over `count` positions from `position` on."""
        if position + count <= first + 1:
            return None
        queries = torch.arange(first, chunk.stop, device=self._device)
        hidden = torch.arange(position, position + count, device=self._device) > queries[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self._queries_per_kv, 0)
