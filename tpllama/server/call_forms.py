"""The notations of one call: an object as it comes, where its arguments end, and calls as Python writes them."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from dataclasses import dataclass, field

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("parameters", "arguments")
_OTHER_KEYS = ("type", "id")
_MOST_PYTHON_CHARACTERS = 20_000
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Head:
    """What is called. `arguments` is None where they follow as an object at `end`; else the object ends there."""

    name: str
    arguments: str | None
    end: int


class Incomplete:
    """More text may make it a call."""


class NoCall:
    """Whatever follows, it is no call of a tool that was offered."""


class _TextEndsError(Exception):
    """The text ends where a value does not, or has none."""


@dataclass
class _Fields:
    """What is known of an object's fields."""

    name: str | None = None
    arguments: str | None = None
    others: set[str] = field(default_factory=set)


def read_head(text: str, names: Collection[str]) -> Head | Incomplete | NoCall:
    """What an object that begins with `text` calls, once its name and where its arguments are is known."""
    try:
        return _read_fields(text, names)
    except _TextEndsError:
        return Incomplete()


def _read_fields(text: str, names: Collection[str]) -> Head | NoCall:
    found, at = _Fields(), _skip(text, 1)
    while text[at] != "}":
        if text[at] != '"':
            return NoCall()
        key, at = _value(text, at)
        at = _skip(text, at)
        if key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS) or text[at] != ":":
            return NoCall()
        at = _skip(text, at + 1)
        if key in _ARGUMENT_KEYS and text[at] == "{" and found.name is not None:
            return Head(found.name, None, at)
        start = at
        if text[at] not in ('"{n' if key in (*_ARGUMENT_KEYS, "function") else '"'):
            return NoCall()
        value, at = _value(text, at)
        if not _take(found, str(key), value, text[start:at], names):
            return NoCall()
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != "}":
            return NoCall()
    return NoCall() if found.name is None else Head(found.name, found.arguments or "{}", at + 1)


def _take(found: _Fields, key: str, value: object, text: str, names: Collection[str]) -> bool:
    """Notes a field; False where none of a call looks so."""
    if key in _OTHER_KEYS:
        return isinstance(value, str)
    if key in _ARGUMENT_KEYS:
        found.arguments = _arguments(value, text)
        return found.arguments is not None
    if isinstance(value, dict):  # {"type": "function", "function": {"name": ..., "arguments": ...}}
        given = next((value[each] for each in _ARGUMENT_KEYS if each in value), None)
        found.arguments = _arguments(given, json.dumps(given, ensure_ascii=False))
        value = value.get("name")
    if not isinstance(value, str) or value not in names:
        return False
    found.name = value
    return True


def _arguments(value: object, text: str) -> str | None:
    """Arguments' JSON, as it was written; None for what are none."""
    if value is None:
        return "{}"
    if isinstance(value, str):  # JSON within JSON
        try:
            return value if isinstance(json.loads(value), dict) else None
        except (ValueError, RecursionError):
            return None
    return text if isinstance(value, dict) else None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    if at >= len(text):
        raise _TextEndsError
    return at


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        raise _TextEndsError from None


@dataclass
class ArgumentsEnd:
    """Where an object ends that comes in pieces."""

    depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False

    def find(self, text: str) -> int | None:
        """The place after the brace that ends the object; None where it goes on after `text`."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        return None


def python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Names and arguments' JSON of `f.call(a=1)`, `f(a=1)` or a list of those; code where a tool runs code."""
    written = text.strip()
    try:
        tree = ast.parse(written[:_MOST_PYTHON_CHARACTERS], mode="eval").body
        calls = [_python_call(each) for each in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        calls = []
    if calls and all(name in names for name, _ in calls):
        return calls
    return (
        [("code_interpreter", json.dumps({"code": written}, ensure_ascii=False))]
        if "code_interpreter" in names and written
        else []
    )


def _python_call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError for anything but a call with named literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by name")
    callee = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "call" else node.func
    arguments = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
    if None in arguments:
        raise ValueError("a mapping that is unpacked")
    return ast.unparse(callee), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
