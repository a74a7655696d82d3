"""Requests onto the model: admitted or refused, prepared off the event loop, run, counted, and always let go of."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tpllama.server.errors import ApiError
from tpllama.server.exchange import Exchange
from tpllama.server.metrics import UNKNOWN_MODEL, Metrics, Outcome
from tpllama.server.switch import Switch
from tpllama.server.turn import Loaded

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import SamplingParams
    from tpllama.engine.text import Piece, Text
    from tpllama.server.model_thread import Inbox

T = TypeVar("T")
# Prompts are made to tokens by so many threads: one long one doesn't hold up the others.
_PREPARING_THREADS = 4
_MOST_SEED = 2**63


@dataclass(frozen=True)
class ServiceLimits:
    """max_requests: running and waiting ones together; max_texts: of one request, its prompts times its samples."""

    max_requests: int
    max_texts: int
    request_timeout_s: float
    on_demand: bool = True


class Running:
    """One request whose texts are being generated."""

    def __init__(self, loaded: Loaded, inbox: Inbox, texts: list[Text], arrived_s: float, metrics: Metrics) -> None:
        self._model = loaded.entry.model_id
        self._inbox = inbox
        self._texts = texts
        self._unfinished = len(texts)
        self._arrived_s = arrived_s
        self._metrics = metrics
        self._last_s: dict[tuple[int, int], float] = {}
        self.finish_reasons: set[str] = set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, all that there are at a time. Raises ApiError, or what went wrong with one text."""
        while self._unfinished:
            pieces = await self._inbox.take()
            now = time.perf_counter()
            for piece in pieces:
                self._note(piece, now)
            yield pieces

    def _note(self, piece: Piece, now: float) -> None:
        key = (piece.index, piece.sample)
        if not self._last_s:
            begun_s = min(text.request.begun_s or now for text in self._texts)
            self._metrics.note_first_token(self._model, now - self._arrived_s, begun_s - self._arrived_s)
        if key in self._last_s:
            self._metrics.note_token(self._model, now - self._last_s[key])
        self._last_s[key] = now
        if piece.output is not None:
            self._unfinished -= 1
            self.finish_reasons.add(piece.output.finish_reason)

    def count(self) -> None:
        """Counts the tokens that there were, however it ended."""
        prompts = {id(text.prompt): len(text.prompt.token_ids) for text in self._texts}
        new = sum(len(text.request.new_ids) for text in self._texts)
        self._metrics.count_tokens(self._model, sum(prompts.values()), new)


class Service:
    """Runs exchanges on whichever model they ask for."""

    def __init__(self, switch: Switch, metrics: Metrics, limits: ServiceLimits) -> None:
        self._switch = switch
        self._metrics = metrics
        self._limits = limits
        self.num_in_flight = 0
        self._threads = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="tpllama prepare")
        self.is_closing = False

    @contextlib.asynccontextmanager
    async def running(self, exchange: Exchange) -> AsyncIterator[Running]:
        """The exchange's request while the block lasts; whatever of it is not finished then is cancelled.

        Raises ApiError where it can't be run, and, in the block, when its time is over.
        """
        arrived_s = time.perf_counter()
        outcome: Outcome = "error"
        model = exchange.model_id if exchange.model_id in self._switch.registry else UNKNOWN_MODEL
        self._admit(exchange, model)
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                async with self._switch.using(exchange.model_id) as (loaded, inbox):
                    try:
                        texts = await self._in_thread(lambda: self._prepared(exchange, loaded.llm))
                    finally:
                        inbox.check()  # a model that failed meanwhile explains whatever else went wrong
                    running = Running(loaded, inbox, texts, arrived_s, self._metrics)
                    self._switch.seat.thread.begin(loaded.llm, texts, inbox)
                    try:
                        yield running
                    finally:
                        self._switch.seat.thread.drop(loaded.llm, texts)
                        running.count()
            outcome = "length" if "length" in running.finish_reasons else "stop"
        except TimeoutError:
            limit_s = self._limits.request_timeout_s
            raise ApiError(
                504, f"found no end of the request within {limit_s:g} s, expected one, ask for less", code="timeout"
            ) from None
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self.num_in_flight -= 1
            self._metrics.count_request(model, outcome, time.perf_counter() - arrived_s)

    async def check(self, exchange: Exchange) -> list[int]:
        """How many tokens each of the prompts has. Raises ApiError or UserError for what couldn't be run."""
        async with self._switch.using(exchange.model_id) as (loaded, _):
            texts = await self._in_thread(lambda: self._prepared(exchange, loaded.llm))
        return [len(text.prompt.token_ids) for text in texts if text.request.sample == 0]

    def _admit(self, exchange: Exchange, model: str) -> None:
        """Raises ApiError where the request can't be taken."""
        try:
            if self.is_closing:
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            self._switch.registry.get(exchange.model_id)
            if not self._limits.on_demand and not self._switch.is_expected(exchange.model_id):
                raise ApiError(
                    409,
                    f"found model {exchange.model_id} not loaded, expected it to be, for this server loads none on "
                    f"demand: load it by POST /v1/models/{exchange.model_id}/load",
                    param="model",
                    code="model_not_loaded",
                )
            if self.num_in_flight >= self._limits.max_requests:
                raise ApiError(
                    429,
                    f"found {self.num_in_flight} requests running and waiting, expected fewer than "
                    f"{self._limits.max_requests}, try again later",
                    code="queue_full",
                )
        except ApiError:
            self._metrics.count_request(model, "refused")
            raise

    def _prepared(self, exchange: Exchange, llm: LLM) -> list[Text]:
        """The request's texts. In a thread."""
        prompts, params = exchange.prepare(llm)
        count = sum(each.n for each in params)
        if count > self._limits.max_texts:
            raise ApiError(
                400, f"found a request for {count} texts, expected at most {self._limits.max_texts}, ask for fewer"
            )
        return llm.engine.texts(prompts, [_seeded(each) for each in params])

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _seeded(params: SamplingParams) -> SamplingParams:
    """Requests that don't say otherwise differ from one another."""
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(_MOST_SEED))
