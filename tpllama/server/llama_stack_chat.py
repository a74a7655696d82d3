"""llama-stack 0.2's chat-completion and batch-chat-completion. No `[DONE]` ends their streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpllama.engine.text import Prompt
from tpllama.server.answers import AnswerReader, new_call_id, read_output
from tpllama.server.errors import ApiError, llama_stack_body
from tpllama.server.llama_stack_answers import all_params, metrics, stop_reason, told_logprobs
from tpllama.server.llama_stack_forms import StackBatchChatRequest, StackChatRequest, answer_constraint, tool_use
from tpllama.server.llama_stack_messages import template_messages
from tpllama.server.tool_calls import CallArguments, CallStart, Content, Event
from tpllama.server.tools import encode_with_tools, tool_constraint

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
    from tpllama.engine.text import Piece
    from tpllama.engine.tokenizer import Tokenizer


@dataclass
class _OpenCall:
    """A call whose arguments still come."""

    name: str
    call_id: str
    arguments: str = ""


@dataclass
class _Stream:
    """The answer that is streamed."""

    reader: AnswerReader
    unsent: list[TokenLogprobs] = field(default_factory=list)
    call: _OpenCall | None = None


class StackChatExchange:
    """An Exchange for an assistant's answer to one conversation, or to each of a batch."""

    ends_with_done = False

    def __init__(self, request: StackChatRequest | StackBatchChatRequest) -> None:
        self._is_batch = isinstance(request, StackBatchChatRequest)
        given = request.messages_batch if isinstance(request, StackBatchChatRequest) else [request.messages]
        self._conversations = [template_messages(conversation) for conversation in given]
        self._use = tool_use(request)
        answer = answer_constraint(request)
        self._constraint = tool_constraint(self._use, answer) or answer
        self.model_id = request.model_id
        self.is_stream = isinstance(request, StackChatRequest) and bool(request.stream)
        self._request = request
        self._stream: _Stream | None = None

    def prepare(self, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
        self._tokenizer: Tokenizer = llm.tokenizer
        prompts = [Prompt(encode_with_tools(llm.tokenizer, each, self._use)) for each in self._conversations]
        field = "messages_batch" if self._is_batch else "messages"
        self._params = all_params(llm, self._request, prompts, self._constraint, field)
        return prompts, self._params

    def on_piece(self, piece: Piece) -> list[dict[str, Any]]:
        written = []
        if self._stream is None:
            self._stream = _Stream(AnswerReader(self._tokenizer, self._use, not self._constraint))
            written.append(_event("start", _text("")))
        stream = self._stream
        stream.unsent += [piece.logprobs] if piece.logprobs else []
        events = stream.reader.push(piece.text, piece.token)
        if piece.output:
            events += stream.reader.finish(piece.output.finish_reason)[0]
        deltas = [delta for event in events for delta in self._deltas(stream, event)]
        if piece.output:
            deltas += self._end_call(stream)
        for delta in deltas:
            written.append(_event("progress", delta, self._take_logprobs(stream)))
        if piece.output:
            reason = stop_reason(self._tokenizer, piece.output)
            last = _event("complete", _text(""), self._take_logprobs(stream), reason)
            written.append(last | {"metrics": metrics(piece.output)})
        return written

    def _deltas(self, stream: _Stream, event: Event) -> list[dict[str, Any]]:
        match event:
            case Content(text):
                return [*self._end_call(stream), _text(text)]
            case CallStart(_, name):
                ended = self._end_call(stream)
                stream.call = _OpenCall(name, new_call_id())
                return [*ended, _call_delta("", "started")]
            case CallArguments(_, text):
                assert stream.call is not None
                stream.call.arguments += text
                return [_call_delta(text, "in_progress")]

    def _end_call(self, stream: _Stream) -> list[dict[str, Any]]:
        call, stream.call = stream.call, None
        if call is None:
            return []
        written = _call(call.name, call.arguments, call.call_id)
        is_whole = isinstance(written["arguments"], dict)
        return [_call_delta(written, "succeeded") if is_whole else _call_delta(call.arguments, "failed")]

    def _take_logprobs(self, stream: _Stream) -> list[dict[str, Any]] | None:
        told, stream.unsent = stream.unsent, []
        return told_logprobs(self._tokenizer, told) if told else None

    def on_end(self) -> list[dict[str, Any]]:
        return []

    def answer(self, outputs: list[Output]) -> dict[str, Any]:
        answers = [self._whole(output) for output in outputs]
        return {"batch": answers} if self._is_batch else answers[0]

    def _whole(self, output: Output) -> dict[str, Any]:
        read = read_output(self._tokenizer, self._use, not self._constraint, output, self._params[output.index])
        message = {
            "role": "assistant",
            "content": read.content,
            "stop_reason": stop_reason(self._tokenizer, output),
            "tool_calls": [_call(name, arguments, new_call_id()) for name, arguments in read.calls],
        }
        return {
            "completion_message": message,
            "logprobs": told_logprobs(self._tokenizer, output.logprobs),
            "metrics": metrics(output),
        }

    def error(self, error: ApiError) -> dict[str, Any]:
        return llama_stack_body(error)


def _event(
    kind: str, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, stop_reason: str | None = None
) -> dict[str, Any]:
    return {"event": {"event_type": kind, "delta": delta, "logprobs": logprobs, "stop_reason": stop_reason}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call_delta(call: str | dict[str, Any], status: str) -> dict[str, Any]:
    return {"type": "tool_call", "tool_call": call, "parse_status": status}


def _call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    """A call, with the arguments' text where they are no object."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    is_object = isinstance(parsed, dict)
    return {
        "call_id": call_id,
        "tool_name": name,
        "arguments": parsed if is_object else arguments,
        "arguments_json": arguments,
    }
