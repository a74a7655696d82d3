"""What the answers of llama-stack 0.2's inference API have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpllama.server.fitting import check_params, room_for
from tpllama.server.llama_stack_forms import StackFields, sampling_params
from tpllama.server.logprobs import by_token

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
    from tpllama.engine.text import Prompt
    from tpllama.engine.tokenizer import Tokenizer


def all_params(
    llm: LLM, request: StackFields, prompts: list[Prompt], constraint: dict[str, Any], field: str
) -> list[SamplingParams]:
    """One prompt's parameters differ from another's in how much room there is."""
    max_tokens = (request.sampling_params and request.sampling_params.max_tokens) or None
    rooms = [room_for(llm, prompt.token_ids, max_tokens, field) for prompt in prompts]
    params = [sampling_params(request, room, constraint) for room in rooms]
    check_params(llm, params[0])
    return params


def stop_reason(tokenizer: Tokenizer, output: Output) -> str:
    if output.finish_reason == "length":
        return "out_of_tokens"
    end_of_message = tokenizer.special_tokens.get("<|eom_id|>")
    is_partial = end_of_message is not None and output.token_ids[-1:] == [end_of_message]
    return "end_of_message" if is_partial else "end_of_turn"


def told_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    if entries is None:
        return None
    return [{"logprobs_by_token": by_token(tokenizer, entry)} for entry in entries]


def metrics(output: Output) -> list[dict[str, Any]]:
    counts = {"prompt_tokens": output.prompt_tokens, "completion_tokens": output.completion_tokens}
    counts["total_tokens"] = output.prompt_tokens + output.completion_tokens
    return [{"metric": name, "value": count, "unit": "tokens"} for name, count in counts.items()]
