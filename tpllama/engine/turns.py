"""One thread at a time, each soon: who may use the engine. Plain Python, no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Turns of threads at something that only one may use. `settle` is done after each, and when nobody has one."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._changed = threading.Condition()  # on a lock that its thread may take again
        self._holder: int | None = None

    @contextmanager
    def take(self, unless: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Waits for this thread's turn, which lasts as long as the block: True; or until there is no need: False.

        All that wait look again after each turn, so that none sleeps on what another's turn has brought it.
        """
        with self._changed:
            self._changed.wait_for(lambda: unless() or self._holder is None)
            is_mine = not unless()
            if is_mine:
                self._holder = threading.get_ident()
        try:
            yield is_mine
        finally:
            if is_mine:
                with self._changed:
                    self._settle()
                    self._holder = None
                    self._changed.notify_all()

    def settle(self) -> None:
        """Settles now, or at the end of the turn that somebody has.

        Never waits for a turn: an iterator that ends may be collected at any time, in the middle of this thread's own.
        """
        with self._changed:
            if self._holder is None:
                self._settle()
