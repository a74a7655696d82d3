"""A model's answer as content and calls, from its tokens and text, piece by piece or whole."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpllama.engine.tokenizer import TextStream
from tpllama.server.tool_calls import TAGS, CallArguments, CallStart, Content, Event, ToolCallReader

if TYPE_CHECKING:
    from tpllama.engine.request import Output, SamplingParams
    from tpllama.engine.tokenizer import Tokenizer
    from tpllama.server.tools import ToolUse


class AnswerReader:
    """Events of one text. `is_free`: nothing says what the text must be, so that calls may come behind tags."""

    def __init__(self, tokenizer: Tokenizer, use: ToolUse, is_free: bool) -> None:
        self._reader = ToolCallReader(use.names, is_free, use.most_calls) if use.names else None
        special = tokenizer.special_tokens if self._reader else {}
        # Tags that are special tokens are not in the text.
        self.tags = {special[tag]: tag for tag in TAGS if tag in special}

    def push(self, text: str, token: int = -1) -> list[Event]:
        """Events that a token and the text that came with it bring."""
        if self._reader is None:
            return [Content(text)] if text else []
        return self._reader.push(text + self.tags.get(token, ""))

    def finish(self, finish_reason: str) -> tuple[list[Event], str]:
        """Events of what was held back, and why the answer ended: a call that was cut off is none."""
        if self._reader is None:
            return [], finish_reason
        events = self._reader.finish()
        has_called = self._reader.num_calls > 0 and not self._reader.is_within_call
        return events, "tool_calls" if has_called and finish_reason == "stop" else finish_reason


@dataclass
class Answer:
    """One whole text, read."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = "stop"


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """How many tokens there were, as OpenAI counts them."""
    total = prompt_tokens + new_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def read_output(tokenizer: Tokenizer, use: ToolUse, is_free: bool, output: Output, params: SamplingParams) -> Answer:
    """What the same tokens would have brought piece by piece."""
    reader = AnswerReader(tokenizer, use, is_free)
    events: list[Event] = []
    for text, token in _pieces(tokenizer, reader, output, params):
        events += reader.push(text, token)
    held, reason = reader.finish(output.finish_reason)
    answer = Answer(finish_reason=reason)
    for event in events + held:
        match event:
            case Content(text):
                answer.content += text
            case CallStart(_, name):
                answer.calls.append((name, ""))
            case CallArguments(index, text):
                name, so_far = answer.calls[index]
                answer.calls[index] = (name, so_far + text)
    return answer


def _pieces(
    tokenizer: Tokenizer, reader: AnswerReader, output: Output, params: SamplingParams
) -> Iterator[tuple[str, int]]:
    """The text; in pieces where a tag among the tokens has its place between them."""
    if reader.tags.keys().isdisjoint(output.token_ids):
        yield output.text, -1
        return
    stream = TextStream(tokenizer, output.prompt_token_ids, params.stop)
    for at, token in enumerate(output.token_ids):
        yield stream.push(token, may_stop=at + 1 >= params.min_tokens), token
    yield stream.finish(len(output.token_ids) >= params.min_tokens), -1
