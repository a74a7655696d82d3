"""Whose turn it is: requests for the model that is loaded run, those for another wait in line until it is theirs.

One model is loaded at a time. All of this happens on the event loop; what computes is done by the model's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

from tpllama.server.errors import ApiError
from tpllama.server.model_thread import Inbox
from tpllama.server.registry import Entry, Registry
from tpllama.server.seat import Seat
from tpllama.server.turn import Loaded, Turn


class Switch:
    """The line before the seat.

    check: called in a thread before a model makes room for another; raises for one that can't be loaded.
    """

    def __init__(self, registry: Registry, seat: Seat, check: Callable[[Entry], None]) -> None:
        self.registry = registry
        self.seat = seat
        self._check = check
        self._line: deque[Turn] = deque()
        self._has_turns = asyncio.Event()
        self._worker = asyncio.create_task(self._work())
        seat.on_failure = self._recover

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return sum(turn.kind == "use" and not turn.granted.done() for turn in self._line)

    def is_expected(self, model_id: str) -> bool:
        """Whether a model is loaded, or will be without being asked for."""
        is_ordered = any(turn.model_id == model_id and turn.kind in ("load", "recover") for turn in self._line)
        return is_ordered or self.seat.has(model_id)

    @contextlib.asynccontextmanager
    async def using(self, model_id: str) -> AsyncIterator[tuple[Loaded, Inbox]]:
        """The model, loaded if need be and as long as the block lasts, and where its pieces arrive."""
        turn = Turn("use", model_id)
        loaded = self.seat.loaded
        if loaded is not None and loaded.failure is None and self.seat.has(model_id) and not self._line:
            turn.grant(loaded)
        else:
            self._queue(turn)
        try:
            granted = await turn.granted
            assert granted is not None
            yield granted, turn.inbox
        finally:
            turn.release()

    async def load(self, model_id: str) -> None:
        """Has a model loaded, after what is in line already. It is done even where the caller gives up."""
        turn = Turn("load", model_id)
        self._queue(turn)
        await turn.granted

    async def unload(self, model_id: str, force: bool = False) -> None:
        """Gives back a model's memory when its requests have finished; with `force` they are cancelled."""
        if not self.seat.has(model_id) and all(turn.model_id != model_id for turn in self._line):
            return
        if force and self.seat.loaded is not None and self.seat.has(model_id):
            self.seat.loaded.end(ApiError(503, f"model {model_id} was unloaded by force", code="model_unloaded"))
        turn = Turn("unload", model_id)
        self._queue(turn)
        await turn.granted

    async def close(self, within_s: float) -> None:
        """Lets requests finish, ends those that have not in time, and gives everything back."""
        seat = self.seat
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.num_waiting or (seat.loaded and seat.loaded.uses):
                    await asyncio.sleep(0.02)
        gone = ApiError(503, "the server is shutting down", code="shutting_down")
        for turn in self._line:
            turn.refuse(gone)
        self._line.clear()
        self._worker.cancel()
        await asyncio.wait([self._worker])
        if seat.loaded is not None:
            seat.loaded.end(gone)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await seat.loaded.drained()
            await seat.close()
        seat.end()

    def _queue(self, turn: Turn) -> None:
        self._line.append(turn)
        self._has_turns.set()

    def _recover(self, loaded: Loaded) -> None:
        """A model that failed is loaded anew before anything else happens."""
        self._line.appendleft(Turn("recover", loaded.entry.model_id))
        self._has_turns.set()

    async def _work(self) -> None:
        while True:
            await self._has_turns.wait()
            while self._line:
                await self._serve(self._line[0])
            self._has_turns.clear()

    async def _serve(self, head: Turn) -> None:
        """Does what the first in line waits for; requests for the same model have it with the first one."""
        if head.granted.cancelled() and head.kind == "use":
            self._line.remove(head)
            return
        error: Exception | None = None
        try:
            await self._do(head)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the line goes on
            error = failure
        is_told = head.kind != "unload" and (error is not None or self.seat.has(head.model_id))
        others = [turn for turn in self._line if is_told and (turn.kind, turn.model_id) == ("use", head.model_id)]
        for turn in dict.fromkeys([head, *others]):
            self._line.remove(turn)
            if error is not None:
                turn.refuse(error)
            else:
                turn.grant(self.seat.loaded if turn.kind == "use" else None)

    async def _do(self, head: Turn) -> None:
        loaded = self.seat.loaded
        match head.kind:
            case "unload":
                if self.seat.has(head.model_id):
                    await self.seat.unload()
                    self.registry.note_loaded(None)
            case "recover" if loaded is not None and loaded.failure is None:
                pass  # another model has taken its place
            case _:
                await self._switch_to(head.model_id)

    async def _switch_to(self, model_id: str) -> None:
        """Loads a model in place of the one that is loaded; that one is loaded again where it can't be done."""
        seat, before = self.seat, self.seat.loaded
        entry = self.registry.get(model_id)
        if before is not None and before.entry is entry and before.failure is None:
            return
        try:
            await asyncio.to_thread(self._check, entry)
        except Exception as error:
            entry.fail(error)
            raise
        await seat.unload()
        try:
            await seat.load(entry)
        except Exception:
            if before is not None and before.entry is not entry and before.entry in self.registry.entries():
                with contextlib.suppress(Exception):  # its entry says why; the first error is what was asked for
                    await seat.load(before.entry)
            raise
        self.registry.note_loaded(model_id)
