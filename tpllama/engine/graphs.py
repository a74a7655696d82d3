"""Decode steps that are recorded once and replayed: forward, sums over ranks and the choice of the likeliest token.

A GPU computes a small model's step faster than Python can launch it. A recorded step has fixed shapes and addresses:
as many rows as `bucket` says, block tables of a bucket's width, and one tensor that says all that changes. Rows that
only fill up the step look at the spare block. Steps of other kinds run as ever.

Not run on a GPU yet: tests/engine/test_graphs.py replays on a CPU by computing again, tests/test_gpu.py replays graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpllama.engine.batch import Batch, Chunk
from tpllama.engine.cache import PagedCache, slots_of
from tpllama.engine.executor import CausalModel, bucket
from tpllama.engine.sampler import Sampler

# Tokens of all texts that are read at once where the kernel for block tables doesn't take the cache.
_MOST_GATHERED = 1 << 17
_FIELDS = 5  # token, position, length of its text for RoPE, slot, keys to look at; the table follows


class Outputs(NamedTuple):
    """Of each row of a step: logits [rows, own tokens], and what a plain greedy draw gives, int64 [rows]."""

    logits: Tensor
    likeliest: Tensor


class Capture(Protocol):
    """Records what a function computes."""

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """How to compute it again, of what its inputs hold then, and where the results will lie."""


class CudaCapture:
    """CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # compiles, sets up libraries and communicators: that can't be recorded
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL's watchdog asks for its events in another.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = compute()
        return graph.replay, outputs


class _Recorded(NamedTuple):
    inputs: Tensor  # int64 [_FIELDS + width of the table, rows]
    replay: Callable[[], None]
    outputs: Outputs


class DecodeGraphs:
    """Recorded steps by rows and width, each made when it is first needed. most_rows: of one step."""

    def __init__(
        self, model: CausalModel, sampler: Sampler, cache: PagedCache, capture: Capture, most_rows: int
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._cache = cache
        self._capture = capture
        self._most_rows = most_rows
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def takes(self, chunks: tuple[Chunk, ...]) -> bool:
        """Whether such a step can be recorded: one token of each text."""
        is_decode = all(len(chunk.tokens) == 1 and chunk.scored is None for chunk in chunks)
        if not (is_decode and 0 < len(chunks) <= self._most_rows):
            return False
        rows, width = self._size(chunks)
        return self._cache.reads_tables or rows * width * self._cache.shape.block_size <= _MOST_GATHERED

    def run(self, batch: Batch) -> Outputs:
        """The results of a batch that this takes, until the next one."""
        self._cache.move(batch)
        rows, width = self._size(batch.chunks)
        recorded = self.record(rows, width)
        columns = [self._column(chunk, width) for chunk in batch.chunks]
        columns += [self._filling(width)] * (rows - len(columns))
        said = torch.tensor(list(zip(*columns, strict=True)), pin_memory=recorded.inputs.is_cuda)
        recorded.inputs.copy_(said, non_blocking=True)
        recorded.replay()
        logits, likeliest = recorded.outputs
        return Outputs(logits[: len(batch.chunks)], likeliest[: len(batch.chunks)])

    def record_short(self) -> None:
        """Those of one block for each text, so that what can't be recorded shows before the first request."""
        rows = 0
        while rows < self._most_rows:
            rows = bucket(rows + 1)
            self.record(rows, 1)

    def record(self, rows: int, width: int) -> _Recorded:
        """The step of so many rows and blocks of each."""
        if (rows, width) not in self._recorded:
            inputs = torch.tensor([self._filling(width)] * rows, device=self._cache.device).t().contiguous()
            self._recorded[rows, width] = _Recorded(inputs, *self._capture(lambda: self._compute(inputs)))
        return self._recorded[rows, width]

    def _compute(self, inputs: Tensor) -> Outputs:
        fields, tables = inputs.split([_FIELDS, len(inputs) - _FIELDS])
        tokens, positions, lengths, slots, keys = fields.unbind()
        by_text = tables.t().clone(memory_format=torch.contiguous_format)
        self._cache.begin_over_tables(slots, keys.int(), by_text.int())
        logits = self._model(tokens, positions, lengths, self._cache.layers)
        return Outputs(logits, self._sampler.likeliest(logits))

    def _column(self, chunk: Chunk, width: int) -> list[int]:
        shape = self._cache.shape
        [slot] = slots_of(chunk.runs, chunk.start, chunk.stop, shape)
        blocks = (block for first, count in chunk.runs for block in range(first, first + count))
        table = list(itertools.islice(blocks, self._blocks(chunk)))
        table += [shape.num_blocks] * (width - len(table))
        return [chunk.tokens[0], chunk.start, max(chunk.prompt_length, chunk.stop), slot, chunk.stop, *table]

    def _filling(self, width: int) -> list[int]:
        spare = self._cache.shape.num_blocks
        return [0, 0, 1, spare * self._cache.shape.block_size, 1, *([spare] * width)]

    def _size(self, chunks: tuple[Chunk, ...]) -> tuple[int, int]:
        """Rows and width of the step that takes these."""
        return bucket(len(chunks)), bucket(max(map(self._blocks, chunks)))

    def _blocks(self, chunk: Chunk) -> int:
        return -(-chunk.stop // self._cache.shape.block_size)
