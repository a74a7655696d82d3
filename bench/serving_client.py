"""The client side of bench/serving.py: requests sent when they are due, and when each event of their answers came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

_MOST_MESSAGE_CHARACTERS = 300


@dataclass
class Answer:
    """What came of one request. Times are in seconds since the load began."""

    arrival: float  # when it was due, whatever the server did
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of each event that brought some of the text
    finished: float = 0.0  # the event with the finish reason
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None  # its kind
    message: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def e2el(self) -> float:
        return self.ended - self.arrival

    @property
    def send_delay(self) -> float:
        return self.sent - self.arrival

    @property
    def tpot(self) -> float | None:
        """None for a single token, which none follows."""
        following = self.completion_tokens - 1
        return (self.finished - self.token_times[0]) / following if following > 0 else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


class Client:
    """Sends bodies to one route of a server."""

    def __init__(self, http: httpx.AsyncClient, route: str, timeout_s: float) -> None:
        self.most_in_flight = 0
        self._http = http
        self._route = route
        self._timeout_s = timeout_s
        self._in_flight = 0

    async def load(self, bodies: Sequence[bytes], arrivals: Sequence[float], most: int | None) -> list[Answer]:
        """Sends each body when it is due, or, where `most` are under way then, in order as they end."""
        places = asyncio.Semaphore(most) if most else nullcontext()
        answers = [Answer(arrival) for arrival in arrivals]
        began = time.perf_counter()

        async def one(answer: Answer, body: bytes) -> None:
            async with places:
                await self._ask(answer, body, began)

        async with asyncio.TaskGroup() as tasks:
            for answer, body in zip(answers, bodies, strict=True):
                wait = began + answer.arrival - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(one(answer, body))
        return answers

    async def _ask(self, answer: Answer, body: bytes, began: float) -> None:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        answer.sent = time.perf_counter() - began
        try:
            async with asyncio.timeout(self._timeout_s), self._http.stream("POST", self._route, content=body) as reply:
                if reply.status_code == 200:
                    await _read(reply, answer, began)
                else:
                    answer.error = f"HTTP {reply.status_code}"
                    answer.message = message_of(await reply.aread())
        except TimeoutError:
            answer.error, answer.message = "timeout", f"no whole answer within {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            answer.error, answer.message = type(error).__name__, str(error)
        finally:
            self._in_flight -= 1
            answer.ended = time.perf_counter() - began


async def _read(reply: httpx.Response, answer: Answer, began: float) -> None:
    async for at, data in _events(reply):
        if data == b"[DONE]":
            continue
        try:
            _take(json.loads(data), answer, at - began)
        except (ValueError, LookupError, TypeError, AttributeError):
            answer.error, answer.message = "not OpenAI's", data[:_MOST_MESSAGE_CHARACTERS].decode("ascii", "replace")
        if answer.error:
            return
    if not answer.finished:
        answer.error, answer.message = "cut short", "the stream ended without a finish reason"
    elif not answer.completion_tokens:
        answer.error, answer.message = "no usage", "the stream did not count its tokens (stream_options.include_usage)"


def _take(event: dict[str, Any], answer: Answer, at: float) -> None:
    """Puts what an event says into the answer."""
    if error := event.get("error"):
        kind = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
        answer.error, answer.message = f"in the stream: {kind or 'error'}", message_of(json.dumps(event).encode())
        return
    for choice in event.get("choices") or ():
        if _brings_text(choice) or (choice.get("finish_reason") and not answer.token_times):
            answer.token_times.append(at)
        if choice.get("finish_reason"):
            answer.finished = at
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def _events(reply: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """The data of server-sent events, with when they came. Lines end at LF alone: JSON may hold other separators."""
    rest = b""
    async for received in reply.aiter_bytes():
        at = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def _brings_text(choice: dict[str, Any]) -> bool:
    """Whether there is some of the answer in it: a chat's first event may name the role alone."""
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text") or choice.get("token_ids") or any(delta.get(name) for name in names))


def message_of(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        text = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:_MOST_MESSAGE_CHARACTERS]


def arrivals(count: int, rate: float, burstiness: float, seed: str) -> list[float]:
    """When requests are due, the first at 0: gaps of mean 1 / rate, gamma-distributed; Poisson at burstiness 1."""
    draw, due = random.Random(seed), [0.0]
    for _ in range(count - 1):
        due.append(due[-1] + draw.gammavariate(burstiness, 1 / burstiness) / rate)
    return due
