"""Models without weights: a real engine over an executor that computes nothing, and ranks that load such."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.mock_model import VOCAB, MockExecutor, shape

from tpllama.engine.engine import Engine, Limits
from tpllama.engine.grammar import Grammars
from tpllama.engine.policy import Policy
from tpllama.engine.tokenizer import Tokenizer

CONTEXT = 200


class SlowExecutor(MockExecutor):
    """Takes its time for a step, and fails when told to."""

    step_s = 0.001

    def __init__(self) -> None:
        super().__init__(shape(num_blocks=400, block_size=4), None)
        self.failure: Exception | None = None

    def run(self, batch: Any) -> Any:
        time.sleep(self.step_s)
        if self.failure is not None:
            raise self.failure
        return super().run(batch)


class FakeLLM:
    """What the server uses of an LLM."""

    load_seconds = 0.25

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.tokenizer = Tokenizer(None)
        self.executor = SlowExecutor()
        grammars = Grammars(self.tokenizer, VOCAB, ())
        limits, policy = Limits(CONTEXT, VOCAB), Policy(max_batch_size=8)
        self.engine = Engine(self.executor, self.tokenizer, grammars, (), limits, policy, 0)
        self.threads: set[int] = set()
        self.is_closed = False

    def advance(self) -> None:
        self.threads.add(threading.get_ident())
        self.engine.advance()

    def peak_memory_bytes(self) -> list[int]:
        return [0]

    def close(self) -> None:
        self.engine.close()
        self.is_closed = True


class FakeRanks:
    """Loads models at once. `failing`: errors by the model's path; `loads`: the paths, in order."""

    def __init__(self) -> None:
        self.failing: dict[str, Exception] = {}
        self.loads: list[str] = []
        self.llms: list[FakeLLM] = []
        self.on_death: Callable[[Any], None] | None = None
        self.has_ended = False

    def load(self, options: Mapping[str, Any], on_death: Callable[[Any], None]) -> Any:
        assert all(llm.is_closed for llm in self.llms), "two models at once"
        self.loads.append(options["model"])
        if options["model"] in self.failing:
            raise self.failing[options["model"]]
        self.llms.append(FakeLLM(options))
        self.on_death = on_death
        return self.llms[-1]

    def end(self) -> None:
        self.has_ended = True
