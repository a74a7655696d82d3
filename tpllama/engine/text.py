"""A request's tokens as text, piece by piece, and its output at the end. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from tpllama.engine.request import Output, Request, TokenLogprobs
from tpllama.engine.tokenizer import TextStream, Tokenizer

_NO_NUMBERS = "the model's logits are no numbers: a weight is damaged (--strict names it) or overflows"


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text where there is one."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class Piece:
    """New text of one sample of one prompt; with the last one comes the whole output.

    token: -1 where none was left to draw. logprobs: the token's; prompt_logprobs: with the first piece.
    """

    index: int
    sample: int
    text: str
    token: int
    output: Output | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Pieces(Protocol):
    """What takes the pieces of texts, or an error in place of the rest. Called in the middle of a step: it's quick."""

    def append(self, piece: Piece | Exception, /) -> None: ...


class Text:
    """What becomes of one request. `pieces` takes what comes of it."""

    def __init__(self, request: Request, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.request = request
        self.prompt = prompt
        self.pieces: Pieces = deque[Piece | Exception]()
        self._taken = 0
        self._stream = TextStream(tokenizer, prompt.token_ids, request.params.stop)

    def take_newest(self) -> None:
        """Makes a piece of the newest token, and ends the request where its text holds a stop string.

        What goes wrong is this text's own, and the others go on.
        """
        try:
            self._take_newest()
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises
            self.request.finish_reason = "stop"
            self.pieces.append(error)

    def _take_newest(self) -> None:
        request = self.request
        text, token = "", -1
        may_stop = len(request.new_ids) >= request.params.min_tokens
        if len(request.new_ids) > self._taken:
            token = request.new_ids[-1]
            text = self._stream.push(token, may_stop)
        logprobs = request.logprobs[-1] if token >= 0 and request.params.logprobs is not None else None
        is_first, self._taken = self._taken == 0, len(request.new_ids)
        if self._stream.is_stopped:
            request.finish_reason = "stop"
        if request.has_failed:
            self.pieces.append(RuntimeError(_NO_NUMBERS))
            return
        output = None
        if request.finish_reason is not None:
            text += self._stream.finish(may_stop)
            if self._stream.is_stopped:
                request.finish_reason = "stop"
            output = self._output()
        about_prompt = request.prompt_logprobs if is_first and request.params.prompt_logprobs is not None else None
        self.pieces.append(Piece(request.index, request.sample, text, token, output, logprobs, about_prompt))

    def _output(self) -> Output:
        request, params = self.request, self.request.params
        assert request.finish_reason is not None
        return Output(
            index=request.index,
            sample=request.sample,
            prompt=self.prompt.text,
            prompt_token_ids=request.prompt_ids,
            text=self._stream.text,
            token_ids=request.new_ids,
            finish_reason=request.finish_reason,
            logprobs=request.logprobs if params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if params.prompt_logprobs is not None else None,
        )
