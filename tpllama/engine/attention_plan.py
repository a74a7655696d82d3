"""What each step looks at, made out once for all layers: see `attention`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tpllama.engine.attention import Group, Place, Prompt, SequencesAttention, StepAttention, Text
from tpllama.engine.batch import Chunk, Run
from tpllama.engine.memory import CacheShape
from tpllama.engine.native import NativeAttention
from tpllama.engine.varlen import GatheredAttention, VarlenAttention
from tpllama.kernels import prompt

# Queries of a prompt in one call. Each call looks only at keys up to its last query's, so fewer save work.
_QUERIES = 64
# `texts` that begin with `shared` tokens read them together where shared * (texts - 1) is at least this times texts.
_SHARED_TOKENS = 250


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
            others = None
            if several or groups:
                others = SequencesAttention([], self._prompts(several), groups, self._queries_per_kv, self._scale)
            return NativeAttention(
                slots,
                [(row, self._spans(chunk)) for row, chunk in singles],
                [(row, len(chunk.tokens), self._spans(chunk)) for row, chunk in own],
                self._scale,
                others,
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
        if len(by_block) == len(singles):
            return [], singles
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
