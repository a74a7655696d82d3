"""What each step of an engine took, and what it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpllama.engine.batch import Batch, Result
    from tpllama.engine.engine import Engine


@dataclass
class Step:
    """One step of the engine, in seconds; all but `gap` are parts of `whole`.

    gap: from the end of the step before. told: of `run`, pickling the batch and sending it to the other ranks.
    computed: prompts' tokens. new: texts that went on by one token, prompts' first tokens not counted.
    """

    gap: float
    whole: float = 0.0
    run: float = 0.0
    told: float = 0.0
    computed: int = 0
    new: int = 0

    @property
    def period(self) -> float:
        return self.gap + self.whole

    @property
    def python(self) -> float:
        return self.whole - self.run


class StepLog:
    """Times the steps of an engine by wrapping its methods, and those of its executor."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._ended = 0.0
        self._step, self._run = engine.step, engine.executor.run
        engine.step = self._timed_step  # type: ignore[method-assign]
        engine.executor.run = self._timed_run  # type: ignore[method-assign]
        self._runner_seconds = 0.0
        runner = getattr(engine.executor, "runner", None)  # a Leader's; with one rank the executor is the runner
        self._runner_run = runner.run if runner else None
        if runner:
            runner.run = self._timed_runner

    def clear(self) -> None:
        self.steps.clear()
        self._ended = time.perf_counter()

    def _timed_step(self) -> bool:
        started = time.perf_counter()
        self.steps.append(Step(gap=started - self._ended))
        has_run = self._step()
        self._ended = time.perf_counter()
        self.steps[-1].whole = self._ended - started
        return has_run

    def _timed_run(self, batch: Batch) -> list[Result]:
        step = self.steps[-1]
        started = time.perf_counter()
        results = self._run(batch)
        step.run = time.perf_counter() - started
        step.told = step.run - self._runner_seconds if self._runner_run else 0.0
        for chunk in batch.chunks:
            is_new = chunk.start >= chunk.prompt_length
            step.new += is_new
            step.computed += 0 if is_new else len(chunk.tokens)
        return results

    def _timed_runner(self, batch: Batch) -> list[Result]:
        assert self._runner_run is not None
        started = time.perf_counter()
        results = self._runner_run(batch)
        self._runner_seconds = time.perf_counter() - started
        return results
