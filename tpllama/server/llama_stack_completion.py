"""llama-stack 0.2's completion and batch-completion. No `[DONE]` ends their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpllama.engine.text import Prompt
from tpllama.server.errors import ApiError, llama_stack_body
from tpllama.server.llama_stack_answers import all_params, metrics, stop_reason, told_logprobs
from tpllama.server.llama_stack_forms import StackBatchCompletionRequest, StackCompletionRequest, answer_constraint
from tpllama.server.llama_stack_messages import text_of

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
    from tpllama.engine.text import Piece
    from tpllama.engine.tokenizer import Tokenizer


class StackCompletionExchange:
    """An Exchange for one text, or for a batch, that goes on from what is given."""

    ends_with_done = False

    def __init__(self, request: StackCompletionRequest | StackBatchCompletionRequest) -> None:
        self._is_batch = isinstance(request, StackBatchCompletionRequest)
        contents = request.content_batch if isinstance(request, StackBatchCompletionRequest) else [request.content]
        self._texts = [text_of(content) for content in contents]
        self.model_id = request.model_id
        self.is_stream = isinstance(request, StackCompletionRequest) and bool(request.stream)
        self._request = request
        self._unsent: list[TokenLogprobs] = []

    def prepare(self, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
        self._tokenizer: Tokenizer = llm.tokenizer
        prompts = [Prompt(llm.tokenizer.encode(text), text) for text in self._texts]
        field = "content_batch" if self._is_batch else "content"
        return prompts, all_params(llm, self._request, prompts, answer_constraint(self._request), field)

    def on_piece(self, piece: Piece) -> list[dict[str, Any]]:
        self._unsent += [piece.logprobs] if piece.logprobs else []
        if not (piece.text or piece.output):
            return []
        told, self._unsent = self._unsent, []
        event = {
            "delta": piece.text,
            "stop_reason": piece.output and stop_reason(self._tokenizer, piece.output),
            "logprobs": told_logprobs(self._tokenizer, told) if told else None,
        }
        return [event | ({"metrics": metrics(piece.output)} if piece.output else {})]

    def on_end(self) -> list[dict[str, Any]]:
        return []

    def answer(self, outputs: list[Output]) -> dict[str, Any]:
        answers = [
            {
                "content": output.text,
                "stop_reason": stop_reason(self._tokenizer, output),
                "logprobs": told_logprobs(self._tokenizer, output.logprobs),
                "metrics": metrics(output),
            }
            for output in outputs
        ]
        return {"batch": answers} if self._is_batch else answers[0]

    def error(self, error: ApiError) -> dict[str, Any]:
        return llama_stack_body(error)
