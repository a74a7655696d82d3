"""What a client is told when a request can't be served: a status, a line, and which field it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tpllama.config import UserError

_MOST_VALUE_CHARACTERS = 60
# What pydantic's errors expect, for whoever writes JSON.
_SHAPES = {
    "dict_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "list_type": "an array",
    "string_type": "a text",
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error with its HTTP status. `type` follows from the status where none is given."""

    def __init__(
        self, status: int, message: str, type: str | None = None,  # noqa: A002 - OpenAI's name
        param: str | None = None, code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = _writable(message)
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = None if param is None else _writable(param)
        self.code = code


def _writable(text: str) -> str:
    """A text that has an encoding: what a client sent may have none."""
    return text.encode(errors="backslashreplace").decode()


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error as OpenAI's clients read it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def llama_stack_body(error: ApiError) -> dict[str, Any]:
    """The error as llama-stack's clients read it: `detail` in an answer, `message` inside a stream."""
    return {"error": {"detail": error.message, "message": error.message}}


def as_api_error(error: Exception) -> ApiError:
    """Any error as one for the client: what the user gave is a 400, anything unforeseen a 500 without its insides."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return validation_error(error.errors())
        case UserError():
            return ApiError(400, str(error))
        case _:
            return ApiError(500, "found an error inside the server, expected none, see its log", code="internal_error")


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """A 400 that names the field, from what pydantic found (`errors()`), in `body` where it is at hand.

    Of several errors, as each member of a union gives one, the innermost is told.
    """
    error = max(errors, key=lambda each: len(each["loc"]))
    where = [part for part in error["loc"] if part not in ("body", "query", "path")]
    path = _path(where, body, error["type"] == "missing")
    name = path or "body"
    if error["type"] == "extra_forbidden":
        message = f"found {name}, which is not supported, expected only fields that are, drop it"
    elif error["type"] == "missing":
        message = f"found no {name}, expected it in the request"
    elif error["type"] == "json_invalid":
        message = f"found a body that is no JSON ({_json_reason(error)}), expected a JSON object"
    elif error["type"] == "model_attributes_type" and not path:
        # FastAPI hands on the bytes of what isn't said to be JSON.
        is_other = isinstance(error.get("input"), bytes)
        found = "a body that is not of Content-Type application/json" if is_other else "a body that is no JSON object"
        message = f"found {found}, expected a JSON object"
    else:
        value = "" if isinstance(error.get("input"), dict | list) else f" {str(error.get('input'))!a}"
        if len(value) > _MOST_VALUE_CHARACTERS:
            value = f"{value[:_MOST_VALUE_CHARACTERS]}..."
        reason = error["msg"]
        expected = reason.removeprefix("Input should be ")
        expected = _SHAPES.get(error["type"], expected if expected != reason else f"another value: {reason}")
        message = f"found {name}{value}, expected {expected}"
    return ApiError(400, message, param=path or None)


def _json_reason(error: Mapping[str, Any]) -> str:
    """What Python's parser says, and at which character."""
    reason = error.get("ctx", {}).get("error", error["msg"])
    at = error["loc"][-1]
    return f"{reason}, at character {at}" if isinstance(at, int) else str(reason)


def _path(location: Iterable[Any], body: Any, is_missing: bool) -> str:
    """`messages[0].content`: keys and indices, without the names of union members among them.

    Those are told from keys by looking into the body.
    """
    names, value = "", body
    parts = list(location)
    for at, part in enumerate(parts):
        is_last = is_missing and at == len(parts) - 1
        if isinstance(value, list) and isinstance(part, int):
            names, value = f"{names}[{part}]", value[part] if part < len(value) else None
        elif isinstance(value, dict) and (part in value or is_last):
            names, value = f"{names}.{part}", value.get(part)
        elif body is None:
            names = f"{names}[{part}]" if isinstance(part, int) else f"{names}.{part}"
    return names.lstrip(".")
