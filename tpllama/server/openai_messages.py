"""Conversations as OpenAI's clients write them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tpllama.engine.tokenizer import Message
from tpllama.server.errors import ApiError
from tpllama.server.fields import Form

Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Form):
    """A part of a message. There are no images and no sound."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(Form):
    """What the assistant is told to be. `developer` is another name for it."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Form):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Form):
    """A function that the assistant called, with its arguments' JSON."""

    name: Name
    arguments: str


class MadeToolCall(Form):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Form):
    """What the assistant said, and what it called. Fields that its answers carry empty may come back so."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[MadeToolCall] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Form):
    """What a call brought."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: Name | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]  # fmt: skip


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The conversation as templates read it: texts, and calls with their arguments as objects."""
    return [_template_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _template_message(message: ChatMessage, place: str) -> Message:
    if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
        raise ApiError(
            400, f"found {place} with neither content nor tool_calls, expected one of them", param=f"{place}.content"
        )
    role = "system" if message.role == "developer" else message.role
    written: Message = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        written["name"] = message.name
    if isinstance(message, ToolMessage):
        written["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{place}.tool_calls[{at}].function.arguments"),
                },
            }
            for at, call in enumerate(message.tool_calls)
        ]
    return written


def text_of(content: Content | None) -> str:
    """A message's text; parts are lines of it."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"found {place} that are no JSON object, expected one, correct it", param=place)
    return arguments
