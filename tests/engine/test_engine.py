"""The engine's ways of ending, on a mock model: done, dropped, broken off at any point; alone and among threads."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from tpllama.config import UserError
from tpllama.engine.batch import Batch, Draw, Result, Sampled
from tpllama.engine.engine import Engine, Limits
from tpllama.engine.grammar import Grammars
from tpllama.engine.policy import Policy
from tpllama.engine.request import NO_NUMBERS, Request, SamplingParams, bit_mask
from tpllama.engine.text import Piece, Prompt, Text
from tpllama.engine.tokenizer import Tokenizer

from .mock_model import VOCAB, MockExecutor, next_token, shape


def make_engine(policy: Policy | None = None, executor: MockExecutor | None = None) -> Engine:
    executor = executor or MockExecutor(shape(200, 4), None)
    tokenizer = Tokenizer(None)
    grammars = Grammars(tokenizer, VOCAB, ())
    return Engine(executor, tokenizer, grammars, (), Limits(300, VOCAB), policy or Policy(), seed=0)


def check_empty(engine: Engine) -> None:
    engine.scheduler.check()
    assert not engine.scheduler.waiting + engine.scheduler.running
    assert not engine._texts
    assert engine.pool.num_available == engine.pool.size


def tokens(pieces: Iterator[Piece]) -> list[int]:
    return [piece.token for piece in pieces]


def ask(engine: Engine, place: int, count: int = 5, priority: int = 0, **params: Any) -> Iterator[Piece]:
    return engine.generate([Prompt([place, 1, 2])], [SamplingParams(max_new_tokens=count, **params)], priority)


def test_tokens_are_those_of_the_definition() -> None:
    """Not of another run: of the whole sequence, drawn with what is known of it."""
    context = [7, 1, 2]
    for step in range(8):
        new = context[3:]
        draw = Draw(
            temperature=0.5, key=(3, 0, step), repetition_penalty=1.5, frequency_penalty=0.5,
            seen=bytes(bit_mask(context)), counts=tuple(sorted((token, new.count(token)) for token in set(new))),
            banned=(9,) if step < 4 else (), bias=((4, 1.0),),
        )  # fmt: skip
        context.append(next_token([(token, 0) for token in context], draw))
    params = {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 4}
    found = tokens(ask(make_engine(), 7, 8, **params, stop_token_ids=(9,), logit_bias={4: 1.0}))
    expected = context[3:]
    assert found == (expected[: expected.index(9) + 1] if 9 in expected else expected)


POINTS = [(MockExecutor, "run"), (Text, "take_newest"), (Text, "_output"), (Request, "append"), (Request, "digests_of")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_step_that_breaks_off_anywhere_leaves_nothing_behind(
    owner: type, name: str, call: int, error: type[BaseException]
) -> None:
    engine = make_engine()
    calls = itertools.count()
    original = getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*arguments, **options)

    params = [SamplingParams(max_new_tokens=count, n=2) for count in (1, 6)]
    with patch.object(owner, name, failing), pytest.raises(error):
        list(engine.generate([Prompt([1] * 9), Prompt([2] * 9)], params))
    check_empty(engine)
    assert tokens(ask(engine, 3)) == tokens(ask(make_engine(), 3))


def test_every_reader_hears_of_a_failure() -> None:
    engine = make_engine()
    other = ask(engine, 1)
    next(other)
    with patch.object(MockExecutor, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        list(ask(engine, 2))
    with pytest.raises(RuntimeError, match="broken off"):
        list(other)
    check_empty(engine)


class Broken(MockExecutor):
    """Has no numbers for prompts that begin with 13."""

    def run(self, batch: Batch) -> list[Result]:
        results = super().run(batch)
        return [
            Result((Sampled(NO_NUMBERS),)) if chunk.draws and self.cache[4 * chunk.runs[0][0]] == (13, 0) else result
            for chunk, result in zip(batch.chunks, results, strict=True)
        ]


def test_logits_that_are_no_numbers_end_their_own_text_alone() -> None:
    engine = make_engine(executor=Broken(shape(200, 4), None))
    good = ask(engine, 1)
    first = next(good).token
    with pytest.raises(RuntimeError, match="logits are no numbers"):
        list(ask(engine, 13))
    assert [first, *tokens(good)] == tokens(ask(make_engine(), 1))
    check_empty(engine)


def test_iterators_that_nobody_keeps_are_ended() -> None:
    engine = make_engine()
    for closes in (True, False):
        iterator = ask(engine, 1)
        next(iterator)
        if closes:
            iterator.close()  # type: ignore[attr-defined]
        del iterator
        gc.collect()
        check_empty(engine)
    never_started = ask(engine, 1)
    del never_started
    check_empty(engine)


def test_an_iterator_may_end_while_another_has_its_turn() -> None:
    """Be it in the same thread: a collector runs anywhere."""
    engine = make_engine()
    dropped = ask(engine, 1, 50)
    next(dropped)
    run = MockExecutor.run

    def collecting(executor: MockExecutor, batch: Batch) -> list[Result]:
        dropped.close()  # type: ignore[attr-defined]
        return run(executor, batch)

    with patch.object(MockExecutor, "run", collecting):
        found = tokens(ask(engine, 2))
    assert found == tokens(ask(make_engine(), 2))
    check_empty(engine)


def test_threads_that_come_and_go_leave_nothing_behind() -> None:
    engine = make_engine(Policy(max_batch_size=5), MockExecutor(shape(12, 4), None))
    expected = [tokens(ask(make_engine(), place, 20)) for place in range(16)]

    def use(place: int) -> bool:
        iterator = ask(engine, place, 20)
        if place % 3 == 0:
            next(iterator)
            iterator.close()  # type: ignore[attr-defined]
            return True
        return tokens(iterator) == expected[place]

    for _ in range(5):
        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(use, range(16)))
        check_empty(engine)


class Slow(MockExecutor):
    def run(self, batch: Batch) -> list[Result]:
        time.sleep(0.01)
        return super().run(batch)


def test_nobody_waits_for_anothers_text() -> None:
    """A text that runs gets its tokens as they come, while another waits for its place behind it."""
    executor = Slow(shape(200, 4), None)
    engine = make_engine(Policy(max_batch_size=1), executor)
    behind = threading.Thread(target=lambda: list(ask(engine, 2)))
    steps = []
    for _ in ask(engine, 1, 30):
        steps.append(executor.steps)
        if len(steps) == 1:
            behind.start()
    behind.join()
    # Each token is read within the steps after its own, not when the other's turn is over.
    assert max(step - place for place, step in enumerate(steps, 1)) <= 3


@pytest.mark.parametrize("host_blocks", [0, 50])
def test_an_urgent_request_gets_room_where_the_cache_is_full(host_blocks: int) -> None:
    executor = MockExecutor(shape(12, 4, host_blocks), None)
    engine = make_engine(Policy(prefix_caching=False, host_blocks=host_blocks), executor)
    slow = [ask(engine, place, 20, priority=5) for place in range(2)]
    first = [next(each).token for each in slow]
    before = executor.steps
    assert len(list(engine.generate([Prompt([9] * 30)], [SamplingParams(max_new_tokens=1)], priority=0))) == 1
    assert executor.steps <= before + 2
    for place, (token, rest) in enumerate(zip(first, slow, strict=True)):
        assert [token, *tokens(rest)] == tokens(ask(make_engine(), place, 20))
    check_empty(engine)


def test_a_prompt_that_may_not_be_cut_neither_waits_for_ever_nor_blocks_others() -> None:
    executor = MockExecutor(shape(200, 4), None)
    engine = make_engine(Policy(chunked_prefill=False, max_batch_tokens=40), executor)
    text = ask(engine, 1, 200, priority=5)
    next(text)
    before = executor.steps
    long = engine.generate([Prompt([3] * 40)], [SamplingParams(max_new_tokens=2)], priority=5)
    next(long)
    assert executor.steps <= before + 3
    assert len(list(ask(engine, 4, 2))) == 2
    assert executor.steps <= before + 6


@pytest.mark.parametrize("params", [{"logit_bias": {5: 10**400}}, {"presence_penalty": 10**400}, {"regex": 5}])
def test_parameters_that_are_no_such_numbers_or_texts_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        SamplingParams(**params)


def test_a_closed_engine_ends_its_readers() -> None:
    engine = make_engine()
    reader, late = ask(engine, 1, 100), ask(engine, 2)
    next(reader)
    engine.close()
    for each in (reader, late):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            list(each)
    check_empty(engine)
