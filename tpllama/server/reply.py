"""An exchange's answer over HTTP: one JSON body, or server-sent events; nothing runs on when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpllama.engine.request import Output
from tpllama.server.errors import ApiError, as_api_error
from tpllama.server.exchange import Exchange
from tpllama.server.service import Running, Service

_RETRY_AFTER_S = 1


class JsonResponse(Response):
    """JSON that any text fits in: a lone surrogate, which UTF-8 has no bytes for, is escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


def as_json(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: ApiError, body: dict[str, Any]) -> JsonResponse:
    """An error's answer in a client's form."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(body, status_code=error.status, headers=headers)


class Reply(Response):
    """Runs an exchange and sends what comes of it. `report` is told of errors that nobody foresaw."""

    def __init__(self, service: Service, exchange: Exchange, report: Callable[[Exception], None]) -> None:
        super().__init__()
        self._service = service
        self._exchange = exchange
        self._report = report
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait([work, gone])
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._service.running(self._exchange) as running:
                if self._exchange.is_stream:
                    await self._stream(running, send)
                else:
                    outputs = [piece.output async for pieces in running.pieces() for piece in pieces if piece.output]
                    body = self._exchange.answer(sorted(outputs, key=_place))
            if self._exchange.is_stream:
                await self._send_end(send)
            else:
                await JsonResponse(body)(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the request's boundary: the client is told in its form
            api_error = as_api_error(error)
            if api_error is not error and api_error.status >= 500:
                self._report(error)
            await self._send_error(api_error, scope, receive, send)

    async def _stream(self, running: Running, send: Send) -> None:
        async for pieces in running.pieces():
            await self._send_events([event for piece in pieces for event in self._exchange.on_piece(piece)], send)
        await self._send_events(self._exchange.on_end(), send)

    async def _send_events(self, events: list[dict[str, Any]], send: Send) -> None:
        """The first ones begin the answer: until then an error has a status of its own."""
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(b"data: " + as_json(event) + b"\n\n" for event in events)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_end(self, send: Send) -> None:
        last = b"data: [DONE]\n\n" if self._exchange.ends_with_done else b""
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._exchange.error(error)
        if not self._has_begun:
            await error_response(error, body)(scope, receive, send)
            return
        with contextlib.suppress(OSError):  # the client is gone
            await self._send_events([body], send)
            await self._send_end(send)


def _place(output: Output) -> tuple[int, int]:
    return output.index, output.sample


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
