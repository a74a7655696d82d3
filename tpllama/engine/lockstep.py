"""Keeping the ranks in step: the leader says what it runs next, the followers run the same.

The messages are pickled between the ranks of one run, which the same user started from the same program.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tpllama.engine.batch import Batch, Result
from tpllama.engine.memory import CacheShape
from tpllama.engine.runner import Runner
from tpllama.parallel.collectives import RankLost, Ranks

_STOP = "stop"


class Leader:
    """A ModelExecutor that has every rank do what it is asked."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self.runner = runner
        self._ranks = ranks
        self._is_broken = False

    @property
    def cache_shape(self) -> CacheShape:
        return self.runner.cache_shape

    def run(self, batch: Batch) -> list[Result]:
        with self._in_step("run", batch):
            return self.runner.run(batch)

    def logits(self, tokens: list[list[int]]) -> Tensor:
        with self._in_step("logits", tokens):
            return self.runner.logits(tokens)

    def peak_memory_bytes(self) -> list[int]:
        with self._in_step("peak_memory_bytes"):
            return self.runner.peak_memory_bytes()

    def stop(self) -> None:
        """Ends the followers' loops; those that are out of step, by an error. Some may be gone already."""
        with contextlib.suppress(RankLost), self._in_step(_STOP):
            pass
        if self._is_broken:
            self._ranks.break_off()

    @contextmanager
    def _in_step(self, operation: str, *arguments: object) -> Iterator[None]:
        """Has the followers do what the block does here. A block that breaks off leaves them in the middle of it."""
        if self._is_broken:
            raise RankLost("a step was broken off before its end, so the ranks are out of step: close this LLM")
        self._is_broken = True
        self._ranks.broadcast(pickle.dumps((operation, arguments), pickle.HIGHEST_PROTOCOL))
        yield
        self._is_broken = False


def follow(runner: Runner, ranks: Ranks) -> None:
    """A follower's loop: until told to stop, runs what the leader runs."""
    try:
        while True:
            operation, arguments = pickle.loads(ranks.broadcast(None))
            if operation == _STOP:
                return
            getattr(runner, operation)(*arguments)
    except BaseException:
        ranks.break_off()
        raise
