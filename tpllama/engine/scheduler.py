"""Which tokens the next step computes. Plain Python, no torch.

A fixed group of sequences starts together, each with a cache row of its own: prompts first, in chunks, then
one token of each per step until all are finished.
"""

from __future__ import annotations

from tpllama.engine.batch import Batch, Chunk, Draw
from tpllama.engine.request import Sequence

# Prompt tokens per step: bounds the memory of activations and attention masks.
PREFILL_TOKENS = 512


class Scheduler:
    """Batches for a group of sequences. `alone`: one sequence per batch, so that none depends on its company."""

    def __init__(self, sequences: list[Sequence], alone: bool) -> None:
        for row, sequence in enumerate(sequences):
            sequence.row = row
        self.running = list(sequences)
        self.alone = alone

    def schedule(self) -> Batch:
        """The next batch; empty when all sequences are finished."""
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        waiting = [sequence for sequence in self.running if not sequence.is_prefilled]
        if waiting:
            return self._prefill(waiting[:1] if self.alone else waiting)
        if self.alone and self.running:
            # The one that is furthest behind, so that all advance in turn.
            return (_chunk(min(self.running, key=lambda sequence: len(sequence.new_ids)), 1),)
        return tuple(_chunk(sequence, 1) for sequence in self.running)

    def _prefill(self, waiting: list[Sequence]) -> Batch:
        budget, chunks = PREFILL_TOKENS, []
        for sequence in waiting:
            count = min(budget, len(sequence.prompt_ids) - sequence.computed)
            chunks.append(_chunk(sequence, count))
            budget -= count
            if budget == 0:
                break
        return tuple(chunks)


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start, stop = sequence.computed, sequence.computed + count
    draw = _draw(sequence) if stop == sequence.length else None
    return Chunk(sequence.row, start, tuple(sequence.tokens(start, stop)), sequence.length, draw)


def _draw(sequence: Sequence) -> Draw:
    params = sequence.params
    assert params.seed is not None
    seen = {*sequence.prompt_ids, *sequence.new_ids} if params.repetition_penalty != 1 else ()
    return Draw(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        key=(params.seed, sequence.sample, len(sequence.new_ids)),
        seen=tuple(sorted(seen)),
        logprobs=params.logprobs,
    )
