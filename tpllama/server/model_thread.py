"""The one thread that computes: it loads models, runs the engine's steps and hands what they bring to the event loop.

One thread for all of it: threads of OpenMP belong to the one that started them, and nobody waits for a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.text import Piece, Text

T = TypeVar("T")


class Inbox:
    """What the engine has brought for one request, as the event loop sees it: pieces, or an error in their place."""

    def __init__(self) -> None:
        self._items: list[Piece | Exception] = []
        self._has_new = asyncio.Event()
        self._error: Exception | None = None

    def put(self, items: Sequence[Piece | Exception]) -> None:
        self._items += items
        self._has_new.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, whatever else it was to get."""
        self._error = self._error or error
        self._has_new.set()

    def check(self) -> None:
        """Raises the error that the request was ended with, if it was."""
        if self._error is not None:
            raise self._error

    async def take(self) -> list[Piece]:
        """The pieces that came since, waiting for one at least. Raises the error that came in their place."""
        await self._has_new.wait()
        self._has_new.clear()
        self.check()
        items, self._items = self._items, []
        for item in items:
            if isinstance(item, Exception):
                raise item
        return [item for item in items if not isinstance(item, Exception)]


class _Outbox:
    """Pieces of one request on the computing thread, until the step is over."""

    def __init__(self, inbox: Inbox, full: list[_Outbox]) -> None:
        self.inbox = inbox
        self.items: list[Piece | Exception] = []
        self._full = full

    def append(self, item: Piece | Exception, /) -> None:
        if not self.items:
            self._full.append(self)
        self.items.append(item)


class ModelThread:
    """Started when made. `on_failure` is called on the loop when a step failed, or the thread itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._llm: LLM | None = None
        self._full: list[_Outbox] = []
        self._thread = threading.Thread(target=self._run, name="tpllama model", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns, done between two steps. It is done even where the caller gives up."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(call: Callable[..., None], value: object) -> None:
            if not future.done():
                call(value)

        def job() -> None:
            try:
                result = work()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the caller's
                own = error if isinstance(error, Exception) else RuntimeError(f"ended with {error}")
                self._tell(settle, future.set_exception, own)
            else:
                self._tell(settle, future.set_result, result)

        self._jobs.put(job)
        return await future

    def use(self, llm: LLM | None) -> None:
        """Which model's steps are run from now on. Called on the thread itself."""
        self._llm = llm

    def begin(self, llm: LLM, texts: Sequence[Text], inbox: Inbox) -> None:
        """Has texts run; what comes of them arrives in `inbox`."""

        def job() -> None:
            if self._llm is llm:  # else it has failed, and all who wait for it are told
                llm.engine.begin(texts, _Outbox(inbox, self._full))

        self._jobs.put(job)

    def drop(self, llm: LLM, texts: Sequence[Text]) -> None:
        """Ends those of the texts that are not finished."""

        def job() -> None:
            if self._llm is llm:
                llm.engine.drop(texts)

        self._jobs.put(job)

    def end(self) -> None:
        """Has the thread end after what it was given before."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: who waits for it has to know
            self._tell(self._on_failure, RuntimeError(f"the model's thread ended: {type(error).__name__}: {error}"))

    def _next(self) -> Callable[[], None] | None:
        """What to do next: what was asked for, else a step, else wait."""
        has_work = self._llm is not None and self._llm.engine.has_work
        try:
            return self._jobs.get(block=not has_work)
        except queue.Empty:
            return self._step

    def _step(self) -> None:
        llm = self._llm
        assert llm is not None
        failure: Exception | None = None
        try:
            llm.advance()
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests end and the model is loaded anew
            failure = error
            self._llm = None
        full = [(box.inbox, box.items) for box in self._full]
        for box in self._full:
            box.items = []
        self._full.clear()
        self._tell(self._deliver, full, failure)

    def _deliver(self, full: list[tuple[Inbox, list[Piece | Exception]]], failure: Exception | None) -> None:
        if failure is not None:
            self._on_failure(failure)  # whoever waits for a piece is told by it
            return
        for inbox, items in full:
            inbox.put(items)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, *arguments)
