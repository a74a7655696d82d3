"""Attention of a step's tokens over the paged cache.

In bfloat16 on the CPU our own C++ computes that of texts, of one token each, on keys and values where they lie, and
with AMX that of prompts (see `native`). Otherwise each sequence is one call of torch's, whose keys and values are read
in one pass to where the arithmetic finds them in the processor's cache (figures: bench/attention.py). Neighbouring
blocks are read as one piece. A long run of blocks that several texts begin with is read once for all of them: there are
two softmaxes then, joined by the logarithms of their sums (Milakov and Gimelshein 2018, arXiv 1805.02867). The query
heads of a KV head become rows of one query matrix, so that keys and values are never repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tpllama.engine.batch import Chunk, Run
from tpllama.engine.memory import CacheShape
from tpllama.engine.native import NativeAttention
from tpllama.engine.varlen import GatheredAttention, VarlenAttention
from tpllama.kernels import prompt

if TYPE_CHECKING:
    from tpllama.engine.cache import Store

# Queries of a prompt in one call. Each call looks only at keys up to its last query's, so fewer save work.
_QUERIES = 64
# `texts` that begin with `shared` tokens read them together where shared * (texts - 1) is at least this times texts.
_SHARED_TOKENS = 250

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class StepAttention(Protocol):
    """The attention of one step, the same in each layer."""

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        """Attention of q [tokens, heads, head_dim] over what the step's sequences have in these stores."""


class Place(NamedTuple):
    """Where consecutive tokens of a sequence lie: `size` slots from `start` on, or in `slots` where they lie apart."""

    start: int
    size: int
    slots: Tensor | None

    def read(self, store: Store) -> Tensor:
        """What a store has there, [1, kv_heads, size, head_dim]."""
        return store.read(self.start, self.size) if self.slots is None else store.take(self.slots)


class Text(NamedTuple):
    """One token of a text at place `row` of the step, which looks at everything that lies at `place`."""

    row: int
    place: Place


class Prompt(NamedTuple):
    """Several tokens of a prompt, from place `row` of the step on, over what lies at `place`.

    pieces: of so many tokens, which look at so many keys, under a mask [tokens * queries_per_kv, keys] of -inf and 0.
    """

    row: int
    place: Place
    pieces: list[tuple[int, int, Tensor]]


class Group(NamedTuple):
    """Texts that begin with what lies at `shared`, each of which goes on by itself."""

    shared: Place
    texts: list[Text]


class SequencesAttention:
    """Sequence by sequence, or group by group: see the module."""

    def __init__(
        self, texts: list[Text], prompts: list[Prompt], groups: list[Group], queries_per_kv: int, scale: float
    ) -> None:
        self._texts = texts
        self._prompts = prompts
        self._groups = groups
        self._queries_per_kv = queries_per_kv
        self._scale = scale

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        # [1, kv_heads, queries_per_kv, head_dim] each: a token's query heads as queries.
        rows = self._grouped(q).split(1) if self._texts else ()
        attended = [
            _attend(rows[row], place.read(keys), place.read(values), self._scale)[0] for row, place in self._texts
        ]
        if len(attended) == len(q):
            return torch.cat(attended).view_as(q)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for (row, _), text in zip(self._texts, attended, strict=True):
            self._grouped(out)[row] = text[0]
        self.attend_others(q, out, keys, values)
        return out

    def attend_others(self, q: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        """Prompts and groups, to their rows of `out`, which is of q's shape."""
        for each in self._prompts:
            self._prompt(each, self._grouped(q), self._grouped(out), keys, values)
        for group in self._groups:
            self._group(group, self._grouped(q), self._grouped(out), keys, values)

    def _grouped(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] as [tokens, kv_heads, queries_per_kv, head_dim]."""
        return x.unflatten(1, (-1, self._queries_per_kv))

    def _prompt(self, prompt: Prompt, grouped: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        k, v = prompt.place.read(keys), prompt.place.read(values)
        first = prompt.row
        for tokens, size, mask in prompt.pieces:
            queries = grouped[first : first + tokens].transpose(0, 1)  # [kv_heads, tokens, queries_per_kv, head_dim]
            attended, _ = _attend(queries.flatten(1, 2)[None], k[:, :, :size], v[:, :, :size], self._scale, mask)
            out[first : first + tokens] = attended.view(queries.shape).transpose(0, 1)
            first += tokens

    def _group(self, group: Group, grouped: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        rows = [text.row for text in group.texts]
        queries = grouped[rows].transpose(0, 1)  # [kv_heads, texts, queries_per_kv, head_dim]
        shared = _attend(queries.flatten(1, 2)[None], group.shared.read(keys), group.shared.read(values), self._scale)
        shared_values = shared[0].view(queries.shape).transpose(0, 1).float()
        shared_logs = shared[1].view(queries.shape[:-1]).transpose(0, 1)
        own = [
            _attend(grouped[row, None], place.read(keys), place.read(values), self._scale) for row, place in group.texts
        ]
        own_values, own_logs = (torch.cat(each) for each in zip(*own, strict=True))
        # A softmax over both parts gives each the weight that its sum has in the sum of both.
        weight = (own_logs - shared_logs).sigmoid().unsqueeze(-1)
        out[rows] = torch.lerp(shared_values, own_values.float(), weight).to(out.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of its weights: q [1, kv_heads, n, head_dim], logs [1, kv_heads, n]."""
    if q.device.type == "cpu":
        attended, logs = _flash(q, k, v, attn_mask=mask, scale=scale)
        return attended, logs
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


class Planner:
    """Makes out what each step looks at. dtype: of computation; scale: of the scores.

    is_alone: nothing is read together, so that no text depends on another.
    """

    def __init__(
        self, shape: CacheShape, queries_per_kv: int, scale: float, dtype: torch.dtype, device: torch.device,
        is_alone: bool,
    ) -> None:  # fmt: skip
        self._block_size = shape.block_size
        self._stored = getattr(torch, shape.dtype)
        self._queries_per_kv = queries_per_kv
        self._scale = scale
        self._dtype = dtype
        self._device = device
        self._is_alone = is_alone
        self._is_native = NativeAttention.fits(self._stored, dtype, device)
        self._is_native_for_prompts = self._is_native and prompt.is_available()

    def plan(self, chunks: tuple[Chunk, ...], slots: Tensor) -> StepAttention | NativeAttention:
        """The attention of a step of these chunks, whose keys and values go to `slots`."""
        if self.has_kernel:
            return VarlenAttention.of(chunks, self._block_size, self._scale, self._device)
        rows = itertools.accumulate((len(chunk.tokens) for chunk in chunks), initial=0)
        singles: list[tuple[int, Chunk]] = []
        several: list[tuple[int, Chunk]] = []
        for row, chunk in zip(rows, chunks, strict=False):
            if len(chunk.tokens) == 1:
                singles.append((row, chunk))
            else:
                several.append((row, chunk))
        groups, singles = ([], singles) if self._is_alone else self._groups(singles)
        if self._is_native:
            own, several = (several, []) if self._is_native_for_prompts else ([], several)
            others = SequencesAttention([], self._prompts(several), groups, self._queries_per_kv, self._scale)
            return NativeAttention(
                slots,
                [(row, self._spans(chunk)) for row, chunk in singles],
                [(row, len(chunk.tokens), self._spans(chunk)) for row, chunk in own],
                self._scale,
                others if several or groups else None,
            )
        texts = [Text(row, self._place(chunk.runs, 0, chunk.stop)) for row, chunk in singles]
        return SequencesAttention(texts, self._prompts(several), groups, self._queries_per_kv, self._scale)

    def _prompts(self, several: list[tuple[int, Chunk]]) -> list[Prompt]:
        return [
            Prompt(row, self._place(chunk.runs, 0, chunk.stop), list(self._pieces(chunk))) for row, chunk in several
        ]

    def _spans(self, chunk: Chunk) -> list[tuple[int, int]]:
        return list(spans_of(chunk.runs, 0, chunk.stop, self._block_size))

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel that takes block tables."""
        return VarlenAttention.fits(self._block_size, self._stored, self._device)

    def over_tables(self, keys: Tensor, tables: Tensor) -> StepAttention:
        """The attention of a step of one token of each text, which looks at keys [texts] in blocks tables [texts, n].

        What these say counts when it is computed, so that the step can be recorded and replayed.
        """
        if not self.has_kernel:
            return GatheredAttention(keys, tables, self._block_size, self._scale)
        starts = torch.arange(len(keys) + 1, dtype=torch.int32, device=keys.device)
        sizes = len(keys), 1, tables.shape[1] * self._block_size
        return VarlenAttention(starts, keys, tables, sizes, self._block_size, self._scale)

    def _groups(self, singles: list[tuple[int, Chunk]]) -> tuple[list[Group], list[tuple[int, Chunk]]]:
        """Texts that share enough of their beginnings, and those that don't, by row."""
        by_block: dict[int, list[tuple[int, Chunk]]] = {}
        for row, chunk in singles:
            by_block.setdefault(chunk.runs[0][0], []).append((row, chunk))
        groups, others = [], []
        for first, members in by_block.items():
            together, shared = self._most_in_common(members)
            others += [member for member in members if member not in together]
            texts = [Text(row, self._place(chunk.runs, shared, chunk.stop)) for row, chunk in together]
            if texts:
                groups.append(Group(Place(first * self._block_size, shared, None), texts))
        return groups, sorted(others)

    def _most_in_common(self, members: list[tuple[int, Chunk]]) -> tuple[list[tuple[int, Chunk]], int]:
        """Those of texts with one first block for whom reading together saves most, and the tokens they share."""
        counts = {}
        for row, chunk in members:
            # Whole blocks before the newest token, so that something is left for each.
            counts[row] = min(chunk.runs[0][1], chunk.start // self._block_size)
        falling = sorted(members, key=lambda member: -counts[member[0]])
        size = self._block_size
        saved = [counts[row] * size * place - _SHARED_TOKENS * (place + 1) for place, (row, _) in enumerate(falling)]
        best = max(range(len(saved)), key=saved.__getitem__)
        if saved[best] < 0:
            return [], 0
        return falling[: best + 1], counts[falling[best][0]] * size

    def _place(self, runs: tuple[Run, ...], start: int, stop: int) -> Place:
        """Where a sequence's positions start..stop lie."""
        spans = list(spans_of(runs, start, stop, self._block_size))
        if len(spans) == 1:
            return Place(*spans[0], None)
        slots = torch.cat([torch.arange(first, first + size) for first, size in spans])
        return Place(0, stop - start, slots.to(self._device))

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[int, int, Tensor]]:
        for first in range(chunk.start, chunk.stop, _QUERIES):
            stop = min(first + _QUERIES, chunk.stop)
            queries = torch.arange(first, stop, device=self._device)
            hidden = torch.arange(stop, device=self._device) > queries[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
            yield stop - first, stop, mask.repeat_interleave(self._queries_per_kv, 0)


def spans_of(runs: tuple[Run, ...], start: int, stop: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Neighbouring slots of a sequence's positions start..stop: the first one, and how many."""
    position = 0
    for block, blocks in runs:
        size = blocks * block_size
        low, high = max(position, start), min(position + size, stop)
        if low < high:
            yield block * block_size + low - position, high - low
        position += size
