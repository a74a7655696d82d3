"""Calls of tools in a model's text, read as it comes: content, and each call's name and arguments. No engine.

Forms that are known, of the tools that were offered and no others:
    {"name": "f", "parameters": {...}}; {...}            Llama 3's; `arguments` and lists of such objects too
    <|python_tag|>{"name": ...}                          the same behind Llama 3.1's tag
    <|python_tag|>brave_search.call(query="...")         its built-in tools'; code for `code_interpreter`
    [f(a=1), g(b="c")]                                   Llama 3.2's and 4's, at the start of a text
    <function=f>{...}</function>                         Llama 3.1's for custom tools
    <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Hermes', and what begins with [TOOL_CALLS]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tpllama.engine.tokenizer import overlap
from tpllama.server.call_forms import ArgumentsEnd, Head, Incomplete, NoCall, python_calls, read_head

PYTHON_TAG = "<|python_tag|>"
FUNCTION_TAG = "<function="
TAGS = (PYTHON_TAG, FUNCTION_TAG, "<tool_call>", "[TOOL_CALLS]")
_ENDS = ("</tool_call>", "</function>", ";", ",", "]")


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins: its place among the calls, and what is called."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are whole."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolCallReader:
    """Reads one text. However it is cut into pieces, its events add up to the same.

    Text that may be the start of a call is held back until it is clear. `names`: of the tools offered; `has_tags`:
    whether a call may begin after other text, behind a tag; `most_calls`: those beyond it are dropped.
    """

    def __init__(self, names: Collection[str], has_tags: bool = True, most_calls: int | None = None) -> None:
        self._names = names
        self._tags = TAGS if has_tags else ()
        self._most_calls = most_calls
        self._buffer = ""
        self._lead = ""  # what came before the buffer, and is content too if no call follows
        self._is_final = False
        self._events: list[Event] = []
        self._arguments = ArgumentsEnd()
        self._in_object = False  # whether the arguments are part of an object that has to end after them
        self._state: Callable[[], bool] = self._at_start
        self.num_calls = 0

    @property
    def is_within_call(self) -> bool:
        """Whether the text so far ends in the middle of a call."""
        return self._state == self._in_arguments

    def push(self, text: str) -> list[Event]:
        """Events that more of the text brings."""
        self._buffer += text
        self._events = []
        while self._buffer and self._state():
            pass
        return _merged(self._events)

    def finish(self) -> list[Event]:
        """Events of what was held back."""
        self._is_final = True
        events = self.push("")
        if self._lead and self._lead != PYTHON_TAG:  # a tag that nothing follows
            events.append(Content(self._lead))
            self._lead = ""
        return _merged(events)

    # Each state takes what it can from the buffer; True: there may be more to take.

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        if not text and not self._is_final:
            return False
        if any(tag.startswith(text[: len(tag)]) for tag in self._tags):  # [TOOL_CALLS] is no list
            is_whole = self._is_final or any(text.startswith(tag) for tag in self._tags)
            return is_whole and self._go(self._in_content)
        return self._expect_call(text) if text.startswith(("{", "[")) else self._go(self._in_content)

    def _expect_call(self, text: str) -> bool:
        """An object, a list of some, or calls as Python writes them follow: `text` is the buffer without spaces."""
        inner = text[1:].lstrip() if text.startswith("[") else text
        if text.startswith("[") and not inner and not self._is_final:
            return False
        if inner.startswith("{"):
            self._lead += self._buffer[: len(self._buffer) - len(inner)]
            self._buffer = inner
            return self._go(self._in_head)
        if text.startswith("[") and self._may_be_python(inner):
            return self._go(self._in_list)
        return self._no_call()

    def _in_list(self) -> bool:
        """Calls as Python writes them, between brackets: looked at anew as their first name grows."""
        inner = self._buffer.lstrip()[1:].lstrip()
        return self._in_python() if self._may_be_python(inner) else self._no_call()

    def _may_be_python(self, inner: str) -> bool:
        """Whether `inner` is, or may become, the call of a tool: a name and a bracket."""
        return any(inner.startswith(f"{name}(") or f"{name}(".startswith(inner) for name in self._names)

    def _no_call(self) -> bool:
        """What was held back is content: at least a character, so that what follows is looked at anew."""
        self._emit(Content(self._lead + self._buffer[:1]))
        self._lead, self._buffer = "", self._buffer[1:]
        return self._go(self._in_content)

    def _in_content(self) -> bool:
        found = [(at, tag) for tag in self._tags if (at := self._buffer.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._emit(Content(self._buffer[:at]))
            self._lead, self._buffer = tag, self._buffer[at + len(tag) :]
            after = {PYTHON_TAG: self._after_python_tag, FUNCTION_TAG: self._in_function}
            return self._go(after.get(tag, self._after_tag))
        held = 0 if self._is_final else max((overlap(self._buffer, tag) for tag in self._tags), default=0)
        self._emit(Content(self._buffer[: len(self._buffer) - held]))
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _after_tag(self) -> bool:
        text = self._buffer.lstrip()
        if not text and not self._is_final:
            return False
        return self._expect_call(text) if text.startswith(("{", "[")) else self._no_call()

    def _after_python_tag(self) -> bool:
        text = self._buffer.lstrip()
        self._lead = ""  # the tag itself is no text
        if not text and not self._is_final:
            return False
        return self._expect_call(text) if text.startswith("{") else self._go(self._in_python)

    def _in_python(self) -> bool:
        """Nothing is certain before the end."""
        if not self._is_final:
            return False
        calls = python_calls(self._buffer, self._names)
        if not calls:
            self._emit(Content(self._lead + self._buffer))
        for name, arguments in calls:
            self._emit_call(name, arguments)
        self._lead = self._buffer = ""
        return self._go(self._after_call)

    def _in_function(self) -> bool:
        name, closing, rest = self._buffer.partition(">")
        arguments = rest.lstrip()
        if name not in self._names and (closing or not any(each.startswith(name) for each in self._names)):
            return self._no_call()
        if closing and arguments.startswith(("{", "</function>")):
            self._buffer, self._lead = arguments, ""
            return self._start_arguments(name) if arguments.startswith("{") else self._without_arguments(name)
        if self._is_final or (arguments and not "</function>".startswith(arguments)):
            return self._no_call()
        return False

    def _in_head(self) -> bool:
        head = read_head(self._buffer, self._names)
        if isinstance(head, NoCall) or (isinstance(head, Incomplete) and self._is_final):
            return self._no_call()
        if not isinstance(head, Head):
            return False
        self._buffer, self._lead = self._buffer[head.end :], ""
        if head.arguments is None:
            return self._start_arguments(head.name, in_object=True)
        self._emit_call(head.name, head.arguments)
        return self._go(self._after_call)

    def _without_arguments(self, name: str) -> bool:
        self._emit_call(name, "{}")
        return self._go(self._after_call)

    def _start_arguments(self, name: str, in_object: bool = False) -> bool:
        self._emit(CallStart(self.num_calls, name))
        self._arguments, self._in_object = ArgumentsEnd(), in_object
        return self._go(self._in_arguments)

    def _in_arguments(self) -> bool:
        end = self._arguments.find(self._buffer)
        self._emit(CallArguments(self.num_calls, self._buffer[:end]))
        self._buffer = self._buffer[len(self._buffer) if end is None else end :]
        if end is None:
            return False
        self.num_calls += 1
        self._arguments = ArgumentsEnd(depth=1)
        return self._go(self._in_tail if self._in_object else self._after_call)

    def _in_tail(self) -> bool:
        """The rest of the object that the arguments were part of."""
        end = self._arguments.find(self._buffer)
        self._buffer = self._buffer[len(self._buffer) if end is None else end :]
        return end is not None and self._go(self._after_call)

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        for end in _ENDS:
            if self._buffer.startswith(end):
                self._buffer = self._buffer[len(end) :]
                return True
            if end.startswith(self._buffer):
                return False
        return self._go(self._in_head if self._buffer.startswith("{") else self._in_content)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _emit_call(self, name: str, arguments: str) -> None:
        self._emit(CallStart(self.num_calls, name))
        self._emit(CallArguments(self.num_calls, arguments))
        self.num_calls += 1

    def _emit(self, event: Event) -> None:
        if isinstance(event, Content) or self._most_calls is None or event.index < self._most_calls:
            self._events.append(event)


def _merged(events: list[Event]) -> list[Event]:
    """Without empty ones, and neighbours of a kind in one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if not isinstance(event, CallStart) and not event.text:
            continue
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
