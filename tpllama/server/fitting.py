"""Whether a request can be served by the model that is loaded, said before any of it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpllama.engine.engine import check_prompt
from tpllama.server.errors import ApiError

if TYPE_CHECKING:
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import SamplingParams


def room_for(llm: LLM, token_ids: list[int], max_tokens: int | None, param: str, default: int | None = None) -> int:
    """How many new tokens a prompt may get: as many as asked for, else `default` or what the context holds.

    Raises ApiError or UserError for a prompt that is none, and for one that leaves no room for what is asked for.
    """
    limits = llm.engine.limits
    if len(token_ids) + (max_tokens or 1) > limits.context_length:
        asked = "" if max_tokens is None else f" and {max_tokens} to be made"
        raise ApiError(
            400,
            f"found {len(token_ids)} tokens in the prompt{asked}, expected at most the context's "
            f"{limits.context_length} together, shorten the prompt or ask for fewer",
            param=param,
            code="context_length_exceeded",
        )
    check_prompt(token_ids, limits.context_length, limits.vocab_size)
    room = limits.context_length - len(token_ids)
    return min(room, room if default is None else default) if max_tokens is None else max_tokens


def check_params(llm: LLM, params: SamplingParams) -> None:
    """Raises ApiError or UserError for what this model can't do: ids that it lacks, an impossible grammar."""
    engine = llm.engine
    if params.stop and not engine.tokenizer.has_text:
        raise ApiError(400, "found stop strings for a checkpoint without a tokenizer, expected none", param="stop")
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in tokens:
            if not 0 <= token < engine.limits.vocab_size:
                raise ApiError(
                    400, f"found token id {token}, expected 0 to {engine.limits.vocab_size - 1}, correct it", param=name
                )
    engine.grammars.constraint(params)
