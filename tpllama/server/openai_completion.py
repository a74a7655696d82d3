"""POST /v1/completions: texts that go on from a prompt, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tpllama.engine.text import Prompt
from tpllama.server.answers import usage
from tpllama.server.errors import ApiError, openai_body
from tpllama.server.fields import MOST_TOKENS, SamplingFields, check_stream_options, sampling_params
from tpllama.server.fitting import check_params, room_for
from tpllama.server.logprobs import CompletionLogprobs

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
    from tpllama.engine.text import Piece
    from tpllama.engine.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16
_MOST_PROMPTS = 2048

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]], Field(min_length=1)]


def _kind(prompt: Any) -> str:
    """Which of its forms a prompt is meant to have, so that an error is about that one."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists_of_token_ids" if isinstance(first, list) else "token_ids"


class CompletionRequest(SamplingFields):
    """A prompt, or several: texts or token ids."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TokenIds, Tag("token_ids")]
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS), Tag("texts")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS), Tag("lists_of_token_ids")],
        Discriminator(_kind),
    ]
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Default: 16. 0 goes with echo.")
    logprobs: int | None = Field(None, ge=0, le=100)
    echo: bool | None = Field(None, description="The text begins with the prompt.")
    best_of: int | None = Field(None, ge=1, le=128, description="Only as many as n.")
    suffix: Literal[""] | None = Field(None, description="Texts are not made to fit into a gap.")
    return_token_ids: bool | None = Field(None, description="Whether choices have token_ids.")


@dataclass
class _Choice:
    """One text that is streamed: what of it was not sent yet."""

    logprobs: CompletionLogprobs | None
    is_begun: bool = False
    token_ids: list[int] = field(default_factory=list)


class CompletionExchange:
    """An Exchange for one CompletionRequest."""

    def __init__(self, request: CompletionRequest, ends_with_done: bool = True) -> None:
        check_stream_options(request)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, f"found best_of {request.best_of}, expected as many as n, drop it", param="best_of")
        if request.max_tokens == 0 and not request.echo:
            raise ApiError(400, "found max_tokens 0 without echo, expected at least 1", param="max_tokens")
        self.model_id = request.model
        self.is_stream = bool(request.stream)
        self.ends_with_done = ends_with_done
        self._request = request
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_prompt_tokens = 0
        self._num_new_tokens = 0
        self._choices: dict[int, _Choice] = {}

    def prepare(self, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
        request = self._request
        self._tokenizer: Tokenizer = llm.tokenizer
        given: list[Any] = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
        if isinstance(given[0], int):
            given = [given]
        self._prompts = [self._prompt(prompt) for prompt in given]
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        params = [self._params(llm, prompt) for prompt in self._prompts]
        check_params(llm, params[0])
        return self._prompts, params

    def _prompt(self, given: str | list[int]) -> Prompt:
        if isinstance(given, str):
            return Prompt(self._tokenizer.encode(given), given)
        return Prompt(list(given), self._tokenizer.decode(given))

    def _params(self, llm: LLM, prompt: Prompt) -> SamplingParams:
        request = self._request
        # There is a step for each token: of none, one is drawn and dropped.
        asked = None if request.max_tokens is None else max(request.max_tokens, 1)
        room = room_for(llm, prompt.token_ids, asked, "prompt", _DEFAULT_MAX_TOKENS)
        return sampling_params(
            request, room, logprobs=request.logprobs, prompt_logprobs=request.logprobs if request.echo else None
        )

    @property
    def _drops_token(self) -> bool:
        return self._request.max_tokens == 0

    @property
    def _tells_token_ids(self) -> bool:
        return bool(self._request.return_token_ids) or not self._tokenizer.has_text

    def on_piece(self, piece: Piece) -> list[dict[str, Any]]:
        number = self._number(piece.index, piece.sample)
        prompt = self._prompts[piece.index]
        if number not in self._choices:
            self._choices[number] = _Choice(self._logprobs_of(prompt, piece.prompt_logprobs))
        choice = self._choices[number]
        if piece.token >= 0 and not self._drops_token:
            choice.token_ids.append(piece.token)
            if choice.logprobs:
                choice.logprobs.push(piece.token, piece.logprobs)
        text = "" if self._drops_token else piece.text
        if not choice.is_begun and self._request.echo:
            text = (prompt.text or "") + text
        choice.is_begun = True
        if piece.output:
            self._num_new_tokens += self._count(piece.output)
        if not (text or piece.output or (self._tells_token_ids and choice.token_ids)):
            return []
        written = self._choice(number, text, piece.output, choice.logprobs, choice.token_ids)
        choice.token_ids = []
        return [self._envelope([written])]

    def on_end(self) -> list[dict[str, Any]]:
        if not self._request.includes_usage:
            return []
        return [self._envelope([]) | {"usage": self._usage()}]

    def answer(self, outputs: list[Output]) -> dict[str, Any]:
        choices = []
        for output in outputs:
            prompt = self._prompts[output.index]
            tokens = [] if self._drops_token else output.token_ids
            logprobs = self._logprobs_of(prompt, output.prompt_logprobs)
            if logprobs:
                for token, entry in zip(tokens, output.logprobs or [], strict=False):
                    logprobs.push(token, entry)
            text = ((prompt.text or "") if self._request.echo else "") + ("" if self._drops_token else output.text)
            number = self._number(output.index, output.sample)
            choices.append(self._choice(number, text, output, logprobs, tokens))
            self._num_new_tokens += self._count(output)
        return self._envelope(choices) | {"usage": self._usage()}

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_body(error)

    def _number(self, index: int, sample: int) -> int:
        return index * (self._request.n or 1) + sample

    def _count(self, output: Output) -> int:
        return 0 if self._drops_token else output.completion_tokens

    def _logprobs_of(self, prompt: Prompt, about_prompt: list[TokenLogprobs] | None) -> CompletionLogprobs | None:
        """Where the log-probabilities of a text are collected; with echo, those of the prompt are in."""
        if self._request.logprobs is None:
            return None
        if not self._request.echo:
            return CompletionLogprobs(self._tokenizer, prompt.token_ids)
        logprobs = CompletionLogprobs(self._tokenizer, [])
        logprobs.push_prompt(prompt.token_ids, about_prompt or [])
        return logprobs

    def _choice(
        self, number: int, text: str, output: Output | None, logprobs: CompletionLogprobs | None, tokens: list[int]
    ) -> dict[str, Any]:  # fmt: skip
        reason = "length" if output and self._drops_token else output and output.finish_reason
        choice = {
            "index": number,
            "text": text,
            "logprobs": logprobs.take() if logprobs else None,
            "finish_reason": reason,
        }
        return choice | ({"token_ids": list(tokens)} if self._tells_token_ids else {})

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model_id,
            "choices": choices,
        }
        return envelope | ({"usage": None} if self.is_stream and self._request.includes_usage else {})

    def _usage(self) -> dict[str, int]:
        return usage(self._num_prompt_tokens, self._num_new_tokens)
