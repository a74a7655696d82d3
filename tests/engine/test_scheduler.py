"""What every schedule keeps to, whatever the prompts: run with tokens made up instead of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpllama.engine import scheduler as scheduler_module
from tpllama.engine.batch import Batch, Chunk
from tpllama.engine.request import SamplingParams, Sequence
from tpllama.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Work:
    """A group of sequences: a prompt's length and the number of new tokens of each, and how they are scheduled."""

    sizes: list[tuple[int, int]]
    budget: int
    alone: bool

    def sequences(self) -> list[Sequence]:
        params = [SamplingParams(seed=9, max_new_tokens=new) for _, new in self.sizes]
        return [
            Sequence(row, 0, [100 * row + place for place in range(prompt)], params[row], prompt + new)
            for row, (prompt, new) in enumerate(self.sizes)
        ]

    def run(self, sequences: list[Sequence]) -> Iterator[Batch]:
        """Every batch until all are finished. A sequence's new tokens are -1, -2, ..."""
        with patch.object(scheduler_module, "PREFILL_TOKENS", self.budget):
            scheduler = Scheduler(sequences, self.alone)
            steps = 0
            while batch := scheduler.schedule():
                steps += 1
                assert steps <= sum(prompt + new for prompt, new in self.sizes), "the schedule never ends"
                yield batch
                for chunk in batch:
                    commit(sequences[chunk.row], chunk)


def commit(sequence: Sequence, chunk: Chunk) -> None:
    sequence.computed = chunk.stop
    if chunk.draw:
        sequence.new_ids.append(-1 - len(sequence.new_ids))
        if sequence.length >= sequence.max_length:
            sequence.finish_reason = "length"


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=6)
WORK = st.builds(Work, sizes=SIZES, budget=st.integers(1, 64), alone=st.booleans())


@given(WORK)
@settings(max_examples=200, deadline=None)
@example(Work([(40, 2), (1, 1), (7, 3)], 16, False))
def test_every_token_is_computed_once_in_order(work: Work) -> None:
    sequences = work.sequences()
    computed: list[list[int]] = [[] for _ in sequences]
    for batch in work.run(sequences):
        for chunk in batch:
            assert chunk.start == len(computed[chunk.row])
            computed[chunk.row] += chunk.tokens
    for tokens, sequence, (_, new) in zip(computed, sequences, work.sizes, strict=True):
        assert len(sequence.new_ids) == new
        assert tokens == sequence.prompt_ids + sequence.new_ids[:-1]  # nothing follows the last: it is not computed


@given(WORK)
@settings(max_examples=200, deadline=None)
def test_a_prompts_last_chunk_draws_and_so_does_every_new_token(work: Work) -> None:
    sequences = work.sequences()
    for batch in work.run(sequences):
        for chunk in batch:
            sequence = sequences[chunk.row]
            assert (chunk.draw is not None) == (chunk.stop == sequence.length)
            assert chunk.length == sequence.length
            if chunk.draw:
                assert chunk.draw.key == (9, sequence.sample, len(sequence.new_ids))


@given(WORK)
@settings(max_examples=200, deadline=None)
def test_budgets_are_kept_and_used_up(work: Work) -> None:
    sequences = work.sequences()
    for batch in work.run(sequences):
        waiting = sum(len(each.prompt_ids) - each.computed for each in sequences if not each.is_prefilled)
        count = sum(len(chunk.tokens) for chunk in batch)
        if waiting == 0:
            assert all(len(chunk.tokens) == 1 for chunk in batch)
        elif not work.alone:
            assert count == min(work.budget, waiting)
        assert count <= max(work.budget, len(sequences))


@given(WORK)
@settings(max_examples=200, deadline=None)
def test_batches_have_each_sequence_once_and_none_that_is_finished(work: Work) -> None:
    sequences = work.sequences()
    for batch in work.run(sequences):
        rows = [chunk.row for chunk in batch]
        assert len(set(rows)) == len(rows)
        assert all(sequences[row].finish_reason is None for row in rows)
        assert all(chunk.tokens for chunk in batch)


@given(WORK)
@settings(max_examples=100, deadline=None)
def test_all_unfinished_sequences_decode_together_or_each_alone(work: Work) -> None:
    sequences = work.sequences()
    for batch in work.run(sequences):
        if work.alone:
            assert len(batch) == 1
        elif all(each.is_prefilled for each in sequences):
            assert [chunk.row for chunk in batch] == [each.row for each in sequences if each.finish_reason is None]


@given(sizes=SIZES, budget=st.integers(1, 64), row=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_alone_a_sequences_batches_do_not_depend_on_the_others(
    sizes: list[tuple[int, int]], budget: int, row: int
) -> None:
    row %= len(sizes)
    together, single = Work(sizes, budget, alone=True), Work(sizes[row : row + 1], budget, alone=True)
    own = [batch[0] for batch in together.run(together.sequences()) if batch[0].row == row]
    solo = [batch[0] for batch in single.run(single.sequences())]
    assert [(each.start, len(each.tokens)) for each in own] == [(each.start, len(each.tokens)) for each in solo]


def test_alone_sequences_advance_in_turn() -> None:
    work = Work([(3, 3), (3, 3)], 64, alone=True)
    assert [batch[0].row for batch in work.run(work.sequences())] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_a_repetition_penalty_sees_prompt_and_new_tokens(penalty: float) -> None:
    params = SamplingParams(seed=0, repetition_penalty=penalty)
    sequence = Sequence(0, 0, [5, 3, 5], params, 10, computed=3, new_ids=[8])
    (chunk,) = Scheduler([sequence], alone=False).schedule()
    assert chunk.draw is not None
    assert chunk.draw.seen == (() if penalty == 1 else (3, 5, 8))
