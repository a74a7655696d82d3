"""What is asked of every request before anybody looks at it: the API key, and a body of a size that arrives in time."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpllama.server.errors import ApiError, llama_stack_body, openai_body
from tpllama.server.reply import error_response

_OPEN_PATHS = ("/health",)
_LLAMA_STACK_PATHS = ("/v1/inference/", "/v1/openai/")
_BODY_WITHIN_S = 30.0


def error_body(path: str, error: ApiError) -> dict[str, object]:
    """An error in the form of the clients that call this path."""
    is_llama_stack = path.startswith(_LLAMA_STACK_PATHS)
    return llama_stack_body(error) if is_llama_stack else openai_body(error)


class Gate:
    """An ASGI application before another one."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_request_bytes: int) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            self._check_length(scope)
            body = await self._body(receive)
        except ApiError as error:
            await error_response(error, error_body(scope["path"], error))(scope, receive, send)
            return
        if body is None:  # the client is gone
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] in _OPEN_PATHS:
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        scheme, _, key = given.partition(b" ")
        if not hmac.compare_digest(scheme.title() + b" " + key.strip(), self._expected):
            raise ApiError(
                401, "found no valid API key, expected it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    def _check_length(self, scope: Scope) -> None:
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_request_bytes:
            raise self._too_large()

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None where its client went away before its end."""
        parts, size, is_whole = list[bytes](), 0, False
        try:
            async with asyncio.timeout(_BODY_WITHIN_S):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_request_bytes:
                        raise self._too_large()
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise ApiError(
                408, f"found no end of the request's body within {_BODY_WITHIN_S:g} s, expected it", code="timeout"
            ) from None
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"found a request of more than {self._max_request_bytes} bytes, expected fewer")
