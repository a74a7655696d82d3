"""The one place for a loaded model: loading and closing it on the model's thread, and noticing that it failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tpllama.server.errors import ApiError
from tpllama.server.memory import give_back_memory
from tpllama.server.metrics import Metrics
from tpllama.server.model_thread import ModelThread
from tpllama.server.ranks import ModelRanks, RanksGone
from tpllama.server.registry import Entry
from tpllama.server.turn import Loaded

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.parallel.launch import Death

# A step that hangs on a dead rank: nothing but a new process helps then.
_STUCK_AFTER_S = 30.0
_ANSWER_WITHIN_S = 5.0


class Seat:
    """`loaded` is the model, `failure` why it is gone, until one is loaded again.

    say: is told what an operator wants to know. give_up: is told why only a new process can go on.
    """

    def __init__(
        self, ranks: ModelRanks, metrics: Metrics, say: Callable[[str], None], give_up: Callable[[str], None]
    ) -> None:
        self.loaded: Loaded | None = None
        self.failure: str | None = None
        self.on_failure: Callable[[Loaded], None] = lambda loaded: None
        self._ranks = ranks
        self._metrics = metrics
        self._say = say
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self.thread = ModelThread(self._loop, self._fail)

    def has(self, model_id: str) -> bool:
        """Whether a model sits here, be it one that failed."""
        return self.loaded is not None and self.loaded.entry.model_id == model_id

    async def load(self, entry: Entry) -> None:
        """Loads a model on all ranks; nothing may be loaded."""
        entry.state, entry.reason = "loading", None

        def note_death(death: Death) -> None:
            if self.loaded is not None and self.loaded.entry is entry:
                self._fail(RuntimeError(death.describe()))

        def on_death(death: Death) -> None:  # in a thread
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(note_death, death)

        def load() -> LLM:
            llm = self._ranks.load(entry.options, on_death)
            self.thread.use(llm)
            return llm

        try:
            llm = await self.thread.call(load)
        except Exception as error:
            entry.fail(error)
            self._say(f"could not load {entry.model_id}: {entry.reason}")
            self._metrics.count_load(entry.model_id, None)
            if isinstance(error, RanksGone):
                self._give_up(str(error))
            raise
        self.loaded, self.failure = Loaded(entry, llm), None
        entry.state = "loaded"
        self._metrics.count_load(entry.model_id, llm.load_seconds)
        self._say(f"loaded {entry.model_id} in {llm.load_seconds:.1f} s")

    async def unload(self) -> None:
        """Closes the model once its requests have finished, or at once where it failed."""
        loaded = self.loaded
        if loaded is not None and loaded.failure is None:
            loaded.entry.state = "draining"
            await loaded.drained()
        await self.close()

    async def close(self) -> None:
        """Closes the model, whoever uses it, and gives its memory back."""
        loaded = self.loaded
        if loaded is None:
            return
        if not self.thread.is_alive:
            self.thread = ModelThread(self._loop, self._fail)

        def close() -> None:
            self.thread.use(None)
            loaded.llm.close()
            give_back_memory()

        try:
            async with asyncio.timeout(_STUCK_AFTER_S):
                await self.thread.call(close)
        except TimeoutError:
            self._give_up(f"model {loaded.entry.model_id} hangs in a step: {loaded.failure}")
        except (RuntimeError, OSError) as error:
            self._say(f"closing {loaded.entry.model_id}: {error}")
        self.loaded = None
        if loaded.entry.state != "failed":
            loaded.entry.state = "registered"

    def _fail(self, error: Exception) -> None:
        """A step failed, or a rank ended, or the thread: ends the requests."""
        loaded = self.loaded
        if loaded is None or loaded.failure is not None:
            return
        reason = loaded.entry.fail(error)
        self.failure = loaded.failure = reason
        self._say(f"model {loaded.entry.model_id} failed: {reason}; loading it anew")
        loaded.end(ApiError(503, f"the model failed and is being loaded anew ({reason})", code="model_failed"))
        self.on_failure(loaded)

    def end(self) -> None:
        """Lets the other ranks end, and the thread. Nothing may be loaded."""
        self._ranks.end()
        self.thread.end()

    async def why_not_ready(self) -> str | None:
        """Why no request can run now; None where a model is loaded and all its ranks answer."""
        loaded = self.loaded
        if loaded is None or loaded.failure is not None or loaded.entry.state != "loaded":
            return self.failure or "no model is loaded"
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                await self.thread.call(loaded.llm.peak_memory_bytes)
        except TimeoutError:
            return f"the ranks did not answer within {_ANSWER_WITHIN_S:g} s"
        except RuntimeError as error:
            return str(error)
        return None
