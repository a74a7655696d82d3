"""Calls that must follow a schema: what the grammar lets through, and what a reader makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from exchanging import llama_like, model_of

from tpllama.engine.request import SamplingParams
from tpllama.server.errors import ApiError
from tpllama.server.tool_calls import Content, ToolCallReader
from tpllama.server.tools import Tool, ToolUse, tool_constraint

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ZONE = {"type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"],
        "$defs": {"zone": {"enum": ["CET", "UTC"]}}}  # fmt: skip
TOOLS = (Tool("city", "", CITY), Tool("zone", "", ZONE), Tool("now"))
STRICT = (Tool("city", "", CITY, is_strict=True),)


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(llama_like())


def fits(llama: Any, constraint: dict[str, Any], text: str) -> bool:
    """Whether a text, and its end behind it, is one that the constraint lets through."""
    follows = llama.engine.grammars.constraint(SamplingParams(**constraint))
    end = llama.tokenizer.special_tokens["<|im_end|>"]
    for token in [*llama.tokenizer.backend().encode(text, add_special_tokens=False), end]:
        if not follows.allowed()[token // 8] >> token % 8 & 1:
            return False
        follows.accept(token)
    return True


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


CASES = [
    ("required", TOOLS, {}, call("city", city="Rome"), True),
    ("required", TOOLS, {}, call("zone", zone="UTC"), True),
    ("required", TOOLS, {}, call("now"), True),
    ("required", TOOLS, {}, call("zone", zone="XYZ"), False),
    ("required", TOOLS, {}, call("city"), False),
    ("required", TOOLS, {}, call("city", city="Rome", more=1), False),
    ("required", TOOLS, {}, call("other"), False),
    ("required", TOOLS, {}, "Hello", False),
    ("zone", TOOLS, {}, call("zone", zone="UTC"), True),
    ("zone", TOOLS, {}, call("now"), False),
    ("auto", STRICT, {}, call("city", city="Rome"), True),
    ("auto", STRICT, {}, call("city", town="Rome"), False),
    ("auto", STRICT, {}, "Hello {", True),
    ("auto", STRICT, {}, " Hello", True),
    ("auto", STRICT, {}, "{}", False),
    ("auto", STRICT, {}, "\n[1]", False),
    ("auto", STRICT, {}, "", True),
    ("auto", TOOLS, {"json_schema": CITY}, call("now"), True),
    ("auto", TOOLS, {"json_schema": CITY}, '{"city": "Rome"}', True),
    ("auto", TOOLS, {"json_schema": CITY}, "Hello", False),
    ("required", TOOLS, {"regex": "a"}, call("now"), True),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "tools", "answer", "text", "expected"), CASES)
def test_what_may_be_said(
    llama: Any, choice: str, tools: tuple[Tool, ...], answer: dict[str, Any], text: str, expected: bool
) -> None:
    use = ToolUse(tools, choice)
    constraint = tool_constraint(use, answer)
    assert constraint is not None
    assert fits(llama, constraint, text) is expected
    if expected:
        reader = ToolCallReader(use.names, has_tags=False)
        events = reader.push(text) + reader.finish()
        is_call = '"parameters"' in text
        assert reader.num_calls == is_call
        assert is_call or "".join(event.text for event in events if isinstance(event, Content)) == text


def test_texts_are_free_where_nothing_is_asked() -> None:
    assert tool_constraint(ToolUse(TOOLS, "auto"), {}) is None
    assert tool_constraint(ToolUse(STRICT, "none"), {}) is None
    assert tool_constraint(ToolUse(), {"regex": "a"}) is None
    with pytest.raises(ApiError):
        tool_constraint(ToolUse(TOOLS, "auto"), {"regex": "a"})
