"""What a model is told about tools, and what its text must be where it has to call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpllama.config import UserError
from tpllama.engine.tokenizer import Message, Tokenizer
from tpllama.server.errors import ApiError
from tpllama.server.fields import with_little_space

# Llama 3.1's own, which its template names instead of describing them.
BUILT_IN = ("brave_search", "wolfram_alpha", "photogen", "code_interpreter")
PLACEHOLDER = "{{function_definitions}}"

_FORMS = {
    "json": '{"name": "...", "parameters": {"...": ...}}',
    "function_tag": '<function=name>{"...": ...}</function>',
    "python_list": '[name(parameter="..."), ...]',
}


@dataclass(frozen=True)
class Tool:
    """A function that may be called. `parameters`: the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    is_strict: bool = False


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether one is called: none, auto, required, or the name of one.

    form: how the model is told to write calls, where its template doesn't tell it. is_replaced: the first system
    message says all about tools, with the definitions in the place of PLACEHOLDER.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    most_calls: int | None = None
    form: str | None = None
    is_replaced: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tools that a text may call."""
        return tuple(tool.name for tool in self.tools) if self.choice != "none" else ()

    @property
    def must_call(self) -> bool:
        return self.choice not in ("none", "auto")

    @property
    def is_strict(self) -> bool:
        """Whether a call must follow its tool's schema though the model need not call one."""
        return self.choice == "auto" and any(tool.is_strict for tool in self.tools)


def encode_with_tools(
    tokenizer: Tokenizer, messages: list[Message], use: ToolUse, continue_final_message: bool = False
) -> list[int]:
    """The prompt's tokens: tools go to the template where it knows them, else into the system message."""
    try:
        told, variables = _for_template(tokenizer.chat_template, messages, use)
        variables["continue_final_message"] = continue_final_message
        return tokenizer.encode_chat(told, **variables)
    except RecursionError:
        raise ApiError(400, "found tools or calls nested too deep, expected less, flatten them") from None
    except UserError:
        # Llama 3.1's template refuses messages with more calls than one.
        if (apart := _one_call_each(told)) == told:
            raise
        return tokenizer.encode_chat(apart, **variables)


def _one_call_each(messages: list[Message]) -> list[Message]:
    """The conversation with a message for each call, and behind it what the call brought."""
    apart: list[Message] = []
    results = [message for message in messages if message["role"] == "tool"]
    moved: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            apart += [message] if not any(message is each for each in moved) else []
            continue
        for at, call in enumerate(calls):
            brought = [each for each in results if each.get("tool_call_id") == call["id"]]
            apart += [message | {"tool_calls": [call]} | ({"content": ""} if at else {}), *brought]
            moved += brought
    return apart


def _for_template(template: str, messages: list[Message], use: ToolUse) -> tuple[list[Message], dict[str, Any]]:
    if not re.search(r"\btool_calls\b", template):
        messages = [_with_calls_as_text(message) for message in messages]
    if not use.names:
        return messages, {}
    if use.form in (None, "json") and not use.is_replaced and re.search(r"\btools\b", template):
        return messages, _template_tools(use, template)
    return _told(messages, use), {}


def _template_tools(use: ToolUse, template: str) -> dict[str, Any]:
    is_built_in = [tool.name in BUILT_IN and "builtin_tools" in template for tool in use.tools]
    described = [_definition(tool) for tool, known in zip(use.tools, is_built_in, strict=True) if not known]
    named = [tool.name for tool, known in zip(use.tools, is_built_in, strict=True) if known]
    return {"tools": described or None} | ({"builtin_tools": named} if named else {})


def _definition(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _told(messages: list[Message], use: ToolUse) -> list[Message]:
    """The conversation with a system message that says what can be called, and how."""
    definitions = "\n".join(json.dumps(_definition(tool)["function"], ensure_ascii=False) for tool in use.tools)
    first, rest = (messages[0], messages[1:]) if messages and messages[0]["role"] == "system" else (None, messages)
    if use.is_replaced:
        if first is None or PLACEHOLDER not in first["content"]:
            raise ApiError(
                400,
                f"found no {PLACEHOLDER} in a system message that replaces the default, expected the place for the "
                "tools there, add it or append the message instead",
                param="tool_config",
            )
        return [first | {"content": first["content"].replace(PLACEHOLDER, definitions)}, *rest]
    words = (
        "You can call functions. Call one only where it helps; then answer with nothing but the call, written as\n"
        f"{_FORMS[use.form or 'json']}\n"
        f"The functions, as JSON:\n{definitions}"
    )
    told = words if first is None else f"{first['content']}\n\n{words}"
    return [{"role": "system", "content": told}, *rest]


def _with_calls_as_text(message: Message) -> Message:
    """An assistant's calls as the text that made them, for templates that know no calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        json.dumps({"name": call["function"]["name"], "parameters": call["function"]["arguments"]}, ensure_ascii=False)
        for call in calls
    ]
    texts = [message["content"], "; ".join(written)]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": "\n".join(text for text in texts if text)}


def tool_constraint(use: ToolUse, answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a text must follow where its calls must follow a schema; None where they need not.

    answer: what a text that is no call must follow. Calls are then written in Llama 3's JSON form, whatever the model
    prefers.
    """
    if use.must_call:
        called = [tool for tool in use.tools if use.choice in ("required", tool.name)]
        return {"grammar": _grammar(called, [])}
    if not use.names or not (use.is_strict or answer):
        return None
    if not answer:
        # Nothing that a reader takes for the start of a call.
        return {"grammar": _grammar(use.tools, [r"answer: /[ \n\r\t]*([^{\[ \n\r\t](.|\n)*)?/"])}
    if "json_schema" not in answer:
        raise ApiError(
            400, "found tools and a text that follows a grammar, expected one of them, drop the other", param="tools"
        )
    calls = [f"call_{at}: %json {_json(_call_schema(tool))}" for at, tool in enumerate(use.tools)]
    names = " | ".join([f"call_{at}" for at in range(len(calls))])
    lines = [f"start: {names} | answer", *calls, f"answer: %json {_json(answer['json_schema'])}"]
    return {"grammar": "\n".join(lines) + "\n"}


def _grammar(tools: Sequence[Tool], answer: list[str]) -> str:
    """Of one call of one of the tools, in llguidance's Lark dialect; or of what `answer` says."""
    calls = [f"call_{at}" for at in range(len(tools))]
    lines = [f"start: {' | '.join([*calls, *(['answer'] if answer else [])])}"]
    for at, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "parameters": ')
        lines += [f'call_{at}: {head} arguments_{at} "}}"', f"arguments_{at}: %json {_json(_closed(tool.parameters))}"]
    return "\n".join([*lines, *answer]) + "\n"


def _call_schema(tool: Tool) -> dict[str, Any]:
    """Of a whole call. Beside another schema it must be one too: of texts that begin alike, one lexeme wins."""
    parameters = _closed(tool.parameters)
    schema = {"type": "object", "properties": {"name": {"const": tool.name}, "parameters": parameters}}
    # Where references look for them.
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    schema = with_little_space(schema)
    return schema | {"required": ["name", "parameters"], "additionalProperties": False} | shared


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, with none but the properties that are named where the schema leaves that open."""
    is_plain = not {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & parameters.keys()
    closed = {"type": "object"} | ({"additionalProperties": False} if is_plain else {}) | dict(parameters)
    return with_little_space(closed)


def _json(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ApiError(400, "found a JSON schema that is none, expected a JSON object, change it") from None
