"""Conversations as llama-stack 0.2's clients write them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tpllama.engine.tokenizer import Message
from tpllama.server.errors import ApiError
from tpllama.server.fields import Form


class TextItem(Form):
    """A piece of text. There are no images."""

    type: Literal["text"]
    text: str


Content = str | TextItem | Annotated[list[TextItem], Field(min_length=1)]


class UserMessage(Form):
    """What the user says, and what was found to go with it."""

    role: Literal["user"]
    content: Content
    context: Content | None = None


class SystemMessage(Form):
    """What the assistant is told to be."""

    role: Literal["system"]
    content: Content


class ToolCall(Form):
    """A call that the assistant made. `arguments_json` says the same as `arguments`, which count."""

    call_id: str
    tool_name: str
    arguments: str | dict[str, Any]
    arguments_json: str | None = None


class CompletionMessage(Form):
    """What the assistant said."""

    role: Literal["assistant"]
    content: Content
    stop_reason: Literal["end_of_turn", "end_of_message", "out_of_tokens"] | None = None
    tool_calls: list[ToolCall] | None = None


class ToolResponseMessage(Form):
    """What a call brought."""

    role: Literal["tool"]
    call_id: str
    content: Content


StackMessage = Annotated[
    UserMessage | SystemMessage | CompletionMessage | ToolResponseMessage, Field(discriminator="role")
]
Conversation = Annotated[list[StackMessage], Field(min_length=1, max_length=10_000)]


def text_of(content: Content | None) -> str:
    """The text; items are lines of it."""
    items = content if isinstance(content, list) else [content] if content is not None else []
    return "\n".join(item if isinstance(item, str) else item.text for item in items)


def template_messages(conversation: Sequence[StackMessage]) -> list[Message]:
    """The conversation as templates read it, with all system messages in one before it."""
    told = "\n".join(text_of(each.content) for each in conversation if isinstance(each, SystemMessage))
    system: list[Message] = [{"role": "system", "content": told}] if told else []
    return system + [_template_message(each) for each in conversation if not isinstance(each, SystemMessage)]


def _template_message(message: UserMessage | CompletionMessage | ToolResponseMessage) -> Message:
    written: Message = {"role": message.role, "content": text_of(message.content)}
    if isinstance(message, UserMessage) and message.context is not None:
        written["content"] += f"\n{text_of(message.context)}"
    if isinstance(message, ToolResponseMessage):
        written["tool_call_id"] = message.call_id
    if isinstance(message, CompletionMessage) and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.tool_name, "arguments": _arguments(call)},
            }
            for call in message.tool_calls
        ]
    return written


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}") if isinstance(call.arguments, str) else call.arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "found arguments of a tool call that are no JSON object, expected one", param="messages")
    return arguments
