"""POST /v1/chat/completions: an assistant's answers, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tpllama.engine.text import Prompt
from tpllama.server.answers import AnswerReader, new_call_id, read_output, usage
from tpllama.server.errors import ApiError, openai_body
from tpllama.server.fields import (
    NO_MEANING,
    Count,
    SamplingFields,
    check_stream_options,
    sampling_params,
    text_constraint,
)
from tpllama.server.fitting import check_params, room_for
from tpllama.server.logprobs import chat_logprobs
from tpllama.server.openai_messages import ChatMessage, template_messages
from tpllama.server.openai_tools import FunctionTool, ToolChoice, tool_use
from tpllama.server.tool_calls import CallStart, Content, Event
from tpllama.server.tools import encode_with_tools, tool_constraint

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
    from tpllama.engine.text import Piece
    from tpllama.engine.tokenizer import Tokenizer


class ChatRequest(SamplingFields):
    """A conversation that the assistant is to answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_tokens: Count | None = Field(None, description="Default: as many as the context holds.")
    max_completion_tokens: Count | None = Field(None, description="Another name for max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto where there are tools.")
    parallel_tool_calls: bool | None = Field(None, description="false: calls after the first are dropped.")
    continue_final_message: bool | None = Field(None, description="Goes on with the assistant's last message.")
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description=NO_MEANING)
    metadata: dict[str, str] | None = Field(None, description=NO_MEANING)
    safety_identifier: str | None = Field(None, description=NO_MEANING)
    prompt_cache_key: str | None = Field(None, description=NO_MEANING)


@dataclass
class _Choice:
    """One answer that is streamed."""

    reader: AnswerReader
    unsent: list[TokenLogprobs] = field(default_factory=list)


class ChatExchange:
    """An Exchange for one ChatRequest."""

    def __init__(self, request: ChatRequest, ends_with_done: bool = True) -> None:
        check_stream_options(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "found top_logprobs without logprobs, expected both or none", param="top_logprobs")
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "found max_tokens and another max_completion_tokens, expected one", param="max_tokens")
        if request.continue_final_message and request.messages[-1].role != "assistant":
            raise ApiError(
                400, "found a last message to go on with that is not the assistant's, expected one that is",
                param="continue_final_message",
            )  # fmt: skip
        self.model_id = request.model
        self.is_stream = bool(request.stream)
        self.ends_with_done = ends_with_done
        self._request = request
        self._max_tokens = next(iter(limits), None)
        self._use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
        self._messages = template_messages(request.messages)
        answer = text_constraint(request)
        self._constraint = tool_constraint(self._use, answer) or answer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_prompt_tokens = 0
        self._num_new_tokens = 0
        self._choices: dict[int, _Choice] = {}

    def prepare(self, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
        request = self._request
        self._tokenizer: Tokenizer = llm.tokenizer
        goes_on = bool(request.continue_final_message)
        token_ids = encode_with_tools(llm.tokenizer, self._messages, self._use, goes_on)
        self._num_prompt_tokens = len(token_ids)
        self._context_length = llm.engine.limits.context_length
        room = room_for(llm, token_ids, self._max_tokens, "messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        self._params = sampling_params(request, room, logprobs=logprobs, constraint=self._constraint)
        check_params(llm, self._params)
        return [Prompt(token_ids)], [self._params]

    def on_piece(self, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if piece.sample not in self._choices:
            self._choices[piece.sample] = _Choice(AnswerReader(self._tokenizer, self._use, not self._constraint))
            deltas.append({"role": "assistant", "content": ""})
        choice = self._choices[piece.sample]
        choice.unsent += [piece.logprobs] if piece.logprobs else []
        num_sent = len(deltas)
        deltas += [self._delta(event) for event in choice.reader.push(piece.text, piece.token)]
        reason = None
        if piece.output:
            events, reason = choice.reader.finish(piece.output.finish_reason)
            deltas += [*(self._delta(event) for event in events), {}]
            self._num_new_tokens += piece.output.completion_tokens
        written = []
        for at, delta in enumerate(deltas):
            is_last = piece.output is not None and at == len(deltas) - 1
            carried, choice.unsent = (choice.unsent, []) if at >= num_sent else ([], choice.unsent)
            written.append(self._chunk(piece.sample, delta, carried, reason if is_last else None))
        return written

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
            case _:
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _chunk(
        self, index: int, delta: dict[str, Any], carried: list[TokenLogprobs], reason: str | None
    ) -> dict[str, Any]:  # fmt: skip
        logprobs = chat_logprobs(self._tokenizer, carried) if carried else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope("chat.completion.chunk", [choice])

    def on_end(self) -> list[dict[str, Any]]:
        if not self._request.includes_usage:
            return []
        return [self._envelope("chat.completion.chunk", []) | {"usage": self._usage()}]

    def answer(self, outputs: list[Output]) -> dict[str, Any]:
        choices = []
        for output in outputs:
            read = read_output(self._tokenizer, self._use, not self._constraint, output, self._params)
            message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
            if read.calls:
                message["content"] = read.content if read.content.strip() else None
                message["tool_calls"] = [
                    {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
                    for name, arguments in read.calls
                ]
            logprobs = None if output.logprobs is None else chat_logprobs(self._tokenizer, output.logprobs)
            choice = {"index": output.sample, "message": message, "logprobs": logprobs}
            choices.append(choice | {"finish_reason": read.finish_reason})
            self._num_new_tokens += output.completion_tokens
        return self._envelope("chat.completion", choices) | {"usage": self._usage()}

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_body(error)

    def limits(self) -> dict[str, Any]:
        """What `prepare` found: the answer of /v1/chat/completions/validate."""
        return {
            "valid": True,
            "model": self.model_id,
            "prompt_tokens": self._num_prompt_tokens,
            "max_new_tokens": self._params.max_new_tokens,
            "context_length": self._context_length,
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model_id,
            "choices": choices,
        }
        return envelope | ({"usage": None} if self.is_stream and self._request.includes_usage else {})

    def _usage(self) -> dict[str, int]:
        return usage(self._num_prompt_tokens, self._num_new_tokens)
