"""Loading a model on all ranks, or on none: those that this process starts itself, or torchrun's."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tpllama.config import UserError
from tpllama.engine.llm import LLM
from tpllama.prepare import Preparation
from tpllama.server.memory import give_back_memory

if TYPE_CHECKING:
    from tpllama.parallel.launch import Death
    from tpllama.parallel.orders import Orders

# For the other ranks' word on why they broke off, and for their answer where they have shown to be there.
_REASON_WITHIN_S = 2.0
_ANSWER_WITHIN_S = 60.0
_ENDING = (signal.SIGTERM, signal.SIGINT)


class RanksGone(RuntimeError):
    """A rank does not answer any more: only torchrun, which starts all of them again, can help."""


class ModelRanks(Protocol):
    """Where models are loaded."""

    def load(self, options: Mapping[str, Any], on_death: Callable[[Death], None]) -> LLM:
        """The model, on all ranks. Raises UserError or RuntimeError where any of them can't, and then none has it.

        on_death: called from a thread for a rank that this process started and that ended.
        """

    def end(self) -> None:
        """Lets the other ranks end. Nothing may be loaded then."""


class OwnRanks:
    """This process, and followers that each LLM starts anew."""

    def __init__(self, debug: bool = False) -> None:
        self._debug = debug

    def load(self, options: Mapping[str, Any], on_death: Callable[[Death], None]) -> LLM:
        return LLM(debug=self._debug, on_rank_death=on_death, **options)

    def end(self) -> None:
        pass


class TorchrunRanks:
    """Torchrun's ranks, of which the first has the others do what it does.

    First each finds and checks the files; only where all could does any of them begin to load.
    """

    def __init__(self, orders: Orders, size: int) -> None:
        self._orders = orders
        self._size = size
        self._have_answered = False

    def load(self, options: Mapping[str, Any], on_death: Callable[[Death], None]) -> LLM:
        self._orders.give({"prepare": dict(options)})
        own: Exception | None = None
        preparation: Preparation | None = None
        try:
            preparation = Preparation(**options)
        except Exception as error:  # noqa: BLE001 - the others have to be told first
            own = error
        others = self._orders.reports(_ANSWER_WITHIN_S if self._have_answered else None)
        if len(others) < self._size - 1:
            raise RanksGone(f"found {len(others)} of {self._size - 1} other ranks answering, expected all")
        self._have_answered = True
        failures = [f"rank {rank} failed: {error}" for rank, error in sorted(others.items()) if error]
        can_load = own is None and not failures
        self._orders.give({"load": can_load})
        if preparation is None or failures:
            if preparation is not None:
                preparation.close()
            raise own or RuntimeError(failures[0])
        try:
            return LLM.prepared(preparation)
        except Exception as error:
            raise self.explained(error) from error

    def explained(self, error: Exception) -> Exception:
        """What went wrong, by the rank that knows."""
        if isinstance(error, UserError):
            return error
        reports = self._orders.reports(_REASON_WITHIN_S)
        reasons = [f"rank {rank} failed: {reason}" for rank, reason in sorted(reports.items()) if reason]
        return RuntimeError(reasons[0]) if reasons else error

    def end(self) -> None:
        self._orders.give({"end": True})


def follow_orders(orders: Orders, complain: Callable[[str], None]) -> None:
    """The part of torchrun's other ranks: loads what the first one loads, until it says that all is over."""
    while "end" not in (order := orders.take()):
        preparation: Preparation | None = None
        error = None
        try:
            preparation = Preparation(**order["prepare"])
        except Exception as failure:  # noqa: BLE001 - the leader decides what to make of it
            error = str(failure)
        orders.report(error)
        can_load = orders.take()["load"]
        if preparation is None:
            continue
        if not can_load:
            preparation.close()
            continue
        asked_to_end = _follow(preparation, orders, complain)
        preparation = None
        give_back_memory()
        if asked_to_end:
            return


def _follow(preparation: Preparation, orders: Orders, complain: Callable[[str], None]) -> bool:
    """Runs what the leader runs, until it has closed the model. Whether nobody is left to say what comes next."""
    from tpllama.parallel.collectives import RankLost

    # The leader ends this rank's part, after the requests that are running: a signal alone doesn't.
    signals: list[int] = []
    before = {number: signal.signal(number, lambda *got: signals.append(got[0])) for number in _ENDING}
    try:
        with contextlib.suppress(SystemExit):  # its part is over
            preparation.load()
        orders.report(None)
    except Exception as failure:  # noqa: BLE001 - the leader decides, and may load anew
        is_loss = isinstance(failure, RankLost)
        if not is_loss:
            complain(f"{type(failure).__name__}: {failure}")
        orders.report(None if is_loss else str(failure))
        preparation.close()
        return bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return False
