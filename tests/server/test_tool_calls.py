"""Calls in a text: every form, however the text is cut, and nothing of a tag or a call as content."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpllama.server.tool_calls import CallArguments, CallStart, Content, Event, ToolCallReader

NAMES = ("get", "brave_search", "f.x", "getter")
Read = tuple[str, list[tuple[str, str]]]


def total(events: list[Event]) -> Read:
    """Content and calls; each begins before its arguments, and in order."""
    content, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def read(pieces: list[str], names: tuple[str, ...] = NAMES, **options: object) -> Read:
    reader = ToolCallReader(names, **options)  # type: ignore[arg-type]
    return total([event for piece in pieces for event in reader.push(piece)] + reader.finish())


X1 = ("get", '{"x": 1}')
TEXTS: list[tuple[str, Read]] = [
    # Llama 3's form.
    ('{"name": "get", "parameters": {"x": 1}}', ("", [X1])),
    ('\n {"type": "function", "name": "get", "parameters": {"x": 1}}\n', ("", [X1])),
    ('{"name": "get", "parameters": {"x": 1}}; {"name": "f.x", "parameters": {}}', ("", [X1, ("f.x", "{}")])),
    ('{"parameters": {"x": 1}, "name": "get"}', ("", [X1])),
    ('{"name": "get"}', ("", [("get", "{}")])),
    ('{"name": "get", "parameters": null}', ("", [("get", "{}")])),
    ('{"name": "get", "arguments": "{\\"x\\": 1}"}', ("", [X1])),
    ('{"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}', ("", [X1])),
    (
        '{"name": "get", "parameters": {"a": "}\\"]", "b": [{}, "{"]}}',
        ("", [("get", '{"a": "}\\"]", "b": [{}, "{"]}')]),
    ),
    ('[{"name": "get", "arguments": {"x": 1}}, {"name": "get", "arguments": {"x": 1}}]', ("", [X1, X1])),
    # An object without its last brace, as small models leave it, and one that is cut off.
    ('{"name": "get", "parameters": {"x": 1}', ("", [X1])),
    ('{"name": "get", "parameters": {"x": ', ("", [("get", '{"x": ')])),
    # Behind tags.
    ('<|python_tag|>{"name": "get", "parameters": {"x": 1}}', ("", [X1])),
    ('<|python_tag|>brave_search.call(query="a (b)")', ("", [("brave_search", '{"query": "a (b)"}')])),
    ("<|python_tag|>print(1)", ("print(1)", [])),
    ('<function=get>{"x": 1}</function>', ("", [X1])),
    ("<function=get></function>", ("", [("get", "{}")])),
    ('<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>', ("", [X1])),
    ('Sure.\n<tool_call>[{"name": "get", "arguments": {"x": 1}}]</tool_call> Done', ("Sure.\nDone", [X1])),
    ('[TOOL_CALLS] [{"name": "get", "arguments": {"x": 1}}]', ("", [X1])),
    # Llama 3.2's.
    ('[get(x=1), f.x(c=[1, "é"])]', ("", [X1, ("f.x", '{"c": [1, "é"]}')])),
    # None of them.
    ('{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', [])),
    ('{"name": "get", "size": 3}', ('{"name": "get", "size": 3}', [])),
    ('{"answer": {"name": "get"}}', ('{"answer": {"name": "get"}}', [])),
    ('{"name": "ge', ('{"name": "ge', [])),
    ('I call {"name": "get", "parameters": {}}', ('I call {"name": "get", "parameters": {}}', [])),
    ("<function=other>{}</function>", ("<function=other>{}</function>", [])),
    ("<tool_call>no", ("<tool_call>no", [])),
    ("a <tool_", ("a <tool_", [])),
    ("[get(1)]", ("[get(1)]", [])),
    ("[get(x=__import__('os'))]", ("[get(x=__import__('os'))]", [])),
    ("[1, 2]", ("[1, 2]", [])),
    ("[", ("[", [])),
    ("", ("", [])),
    ("  \n", ("  \n", [])),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_every_form_whole_and_in_pieces(text: str, expected: Read) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    for seed in range(20):
        choose, pieces, at = random.Random(seed), list[str](), 0
        while at < len(text):
            pieces.append(text[at : at + choose.randint(1, 6)])
            at += len(pieces[-1])
        assert read(pieces) == expected


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", "get>", "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]",
     "{", "}", '{"name": "get", ', '"parameters": {"x": 1}', '"arguments": "', '"', ",", ";", " ", "\n",
     "get(x=1)", "é", "<", '{"name": "get", "parameters": {"x": 1}}', "<tool", "\\"]
)  # fmt: skip


@given(st.lists(FRAGMENTS | st.text(max_size=3), max_size=12), st.data())
@settings(max_examples=500, deadline=None)
@example(["[TOOL_CALLS]", "["], None)
@example(["[", "get>", "<tool_call>"], None)
@example(["[", "get>", "<tool_call>", '{"name": "get", "parameters": {"x": 1}}'], None)
def test_however_a_text_is_cut_it_says_the_same(parts: list[str], data: st.DataObject | None) -> None:
    text = "".join(parts)
    whole = read([text])
    assert read(list(text)) == whole
    assert read(parts) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert all(name in NAMES for name, _ in whole[1])


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.push('{"name": "get", "parameters": ') == []
    assert reader.push('{"city": "Par') == [CallStart(0, "get"), CallArguments(0, '{"city": "Par')]
    assert reader.is_within_call
    assert reader.push("is") == [CallArguments(0, "is")]
    assert reader.push('"}}') == [CallArguments(0, '"}')]
    assert not reader.is_within_call
    assert reader.num_calls == 1


def test_content_is_held_back_no_longer_than_it_may_be_a_call() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.push("{") == []
    assert reader.push('"answer') == []  # a key is one at its end
    assert reader.push('": ') == [Content('{"answer": ')]
    assert reader.push("4") == [Content("4")]
    assert reader.push("2 <") == [Content("2 ")]
    assert reader.push("b") == [Content("<b")]


def test_calls_beyond_the_most_are_dropped() -> None:
    text = "; ".join(json.dumps({"name": "get", "parameters": {"x": x}}) for x in range(3))
    assert read([text], most_calls=1) == ("", [("get", '{"x": 0}')])
    assert read(list(text), most_calls=1) == ("", [("get", '{"x": 0}')])


def test_without_tags_only_the_beginning_can_be_a_call() -> None:
    text = 'x <tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert read(list(text), has_tags=False) == (text, [])
    assert read(['{"name": "get", "parameters": {}}'], has_tags=False) == ("", [("get", "{}")])


def test_code_is_a_call_where_a_tool_runs_it() -> None:
    names = ("code_interpreter",)
    assert read(["<|python_tag|>print(", "'é')"], names) == ("", [("code_interpreter", '{"code": "print(\'é\')"}')])
