"""How the steps of an engine are made up, and who goes first. Plain Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tpllama.engine.request import Request


@dataclass(frozen=True)
class Policy:
    """How steps are made up.

    max_batch_size, max_batch_tokens: sequences, and tokens, in one step. chunked_prefill: prompts may be cut to fit
    into a step; else a longer one has a step of its own. prefix_caching: what is in the cache is used for other prompts
    that begin alike. host_blocks: how many blocks the host's memory takes of preempted requests. alone: one sequence
    in a step, its prompt cut at multiples of max_batch_tokens and its own tokens one by one, so that nothing depends
    on its company. length_rope_limit: see `ModelMetadata`.
    """

    max_batch_size: int = 32
    max_batch_tokens: int = 512
    chunked_prefill: bool = True
    prefix_caching: bool = True
    host_blocks: int = 0
    alone: bool = False
    length_rope_limit: int | None = None


def order(request: Request) -> tuple[int, int, int]:
    """The lower goes first, and makes room last: the more urgent, then who came first, then samples in turn."""
    return request.priority, request.arrival, request.sample


def next_count(policy: Policy, request: Request, budget: int, is_first: bool) -> int:
    """How many of a request's tokens a step may compute that has room for `budget` more; is_first: it has none yet."""
    due = request.length - request.computed
    if policy.alone:
        prompt = len(request.prompt_ids)
        border = (request.computed // policy.max_batch_tokens + 1) * policy.max_batch_tokens
        return min(border, prompt) - request.computed if request.computed < prompt else 1
    if not policy.chunked_prefill and due > budget:
        return due if is_first else 0
    return min(due, budget)
