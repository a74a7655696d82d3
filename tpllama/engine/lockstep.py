"""Keeping the ranks in step: the leader says what it runs next, the followers run the same.

The messages are pickled between the ranks of one run, which the same user started from the same program.
"""

from __future__ import annotations

import pickle

from torch import Tensor

from tpllama.engine.batch import Batch, Sampled
from tpllama.engine.runner import Runner
from tpllama.parallel.collectives import Ranks

_STOP = "stop"


class Leader:
    """An Executor that has every rank do what it is asked."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def allocate(self, rows: int, slots: int) -> None:
        self._say("allocate", rows, slots)
        self._runner.allocate(rows, slots)

    def run(self, batch: Batch) -> list[Sampled]:
        self._say("run", batch)
        return self._runner.run(batch)

    def logits(self, tokens: list[list[int]]) -> Tensor:
        self._say("logits", tokens)
        return self._runner.logits(tokens)

    def peak_memory_bytes(self) -> list[int]:
        self._say("peak_memory_bytes")
        return self._runner.peak_memory_bytes()

    def stop(self) -> None:
        """Ends the followers' loops."""
        self._say(_STOP)

    def _say(self, operation: str, *arguments: object) -> None:
        self._ranks.broadcast(pickle.dumps((operation, arguments), pickle.HIGHEST_PROTOCOL))


def follow(runner: Runner, ranks: Ranks) -> None:
    """A follower's loop: until told to stop, runs what the leader runs."""
    while True:
        operation, arguments = pickle.loads(ranks.broadcast(None))
        if operation == _STOP:
            return
        getattr(runner, operation)(*arguments)
