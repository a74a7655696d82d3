"""What the next step has to know of a request: tokens, where they are kept, what is drawn. Plain Python, no torch."""

from __future__ import annotations

import time

from tpllama.engine.batch import Chunk, Draw, Scored
from tpllama.engine.request import Request


def next_chunk(request: Request, count: int) -> Chunk:
    """The next `count` tokens of a request. After the last one there is, a token is drawn, and for each sibling."""
    request.begun_s = request.begun_s or time.perf_counter()
    start, stop = request.computed, request.computed + count
    draws = tuple(map(_draw, (request, *request.siblings))) if stop == request.length else ()
    runs = tuple(request.blocks.runs)
    scored = _scored(request, start, stop)
    return Chunk(start, request.tokens(start, stop), len(request.prompt_ids), runs, draws, scored)


def _scored(request: Request, start: int, stop: int) -> Scored | None:
    count = request.params.prompt_logprobs
    if count is None or stop <= len(request.prompt_logprobs) or start + 1 >= len(request.prompt_ids):
        return None
    return Scored(tuple(request.prompt_ids[start + 1 : stop + 1]), count)


def _draw(request: Request) -> Draw:
    params = request.params
    assert params.seed is not None
    too_short = len(request.new_ids) < params.min_tokens
    return Draw(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        key=(params.seed, request.sample, len(request.new_ids)),
        logprobs=params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seen=bytes(request.seen),
        counts=tuple(request.counts.items()) if params.presence_penalty or params.frequency_penalty else (),
        bias=tuple(params.logit_bias.items()),
        banned=tuple(request.end_ids) if too_short else (),
        allowed=request.constraint.allowed() if request.constraint is not None else None,
    )
