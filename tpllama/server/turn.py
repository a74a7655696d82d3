"""A turn at the model: what waits in line for one, and the model that is loaded with the requests that have theirs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tpllama.config import UserError
from tpllama.server.errors import ApiError
from tpllama.server.model_thread import Inbox
from tpllama.server.registry import Entry

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM

Kind = Literal["use", "load", "unload", "recover"]


@dataclass(eq=False)
class Loaded:
    """A model that is loaded, and the requests that use it. `failure`: why it can't be used any more."""

    entry: Entry
    llm: LLM
    uses: set[Turn] = field(default_factory=set)
    failure: str | None = None
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, error: ApiError) -> None:
        """Ends all requests."""
        for use in self.uses:
            use.inbox.fail(error)

    def release(self, turn: Turn) -> None:
        """Takes note of a request that is done."""
        self.uses.discard(turn)
        if not self.uses:
            self._is_idle.set()

    async def drained(self) -> None:
        """Waits until no request uses the model."""
        while self.uses:
            self._is_idle.clear()
            await self._is_idle.wait()


@dataclass(eq=False)
class Turn:
    """What waits in line: a request for a model, an order to load or unload one, or to load again one that failed."""

    kind: Kind
    model_id: str
    granted: asyncio.Future[Loaded | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    inbox: Inbox = field(default_factory=Inbox)

    def grant(self, loaded: Loaded | None) -> None:
        """Ends the wait: with the model, where it was for one."""
        if self.granted.done():  # who waited has given up
            return
        if loaded is not None:
            loaded.uses.add(self)
        self.granted.set_result(loaded)

    def refuse(self, error: Exception) -> None:
        """Ends the wait with an error."""
        if not self.granted.done():
            self.granted.set_exception(self._told(error))
            self.granted.exception()  # asked for here: who waits may give up

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        reason = f"model {self.model_id} could not be loaded: {' '.join(str(error).split()) or type(error).__name__}"
        # To who orders it, what was given can't work; to who asks a model something, the server isn't able to.
        is_own = self.kind == "load" and isinstance(error, UserError)
        return ApiError(400 if is_own else 503, reason, code="model_not_loaded")

    def release(self) -> None:
        """Gives the turn back, whether it was had or not."""
        if not self.granted.done():
            self.granted.cancel()
        elif not self.granted.cancelled() and self.granted.exception() is None:
            loaded = self.granted.result()
            if loaded is not None:
                loaded.release(self)
