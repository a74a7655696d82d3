"""How the steps of an engine are made up. Plain Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How steps are made up.

    max_batch_size, max_batch_tokens: sequences, and tokens, in one step. chunked_prefill: prompts may be cut to fit
    into a step. prefix_caching: what is in the cache is used for other prompts that begin alike. host_blocks: how many
    blocks the host's memory takes of preempted requests. alone: one sequence in a step, its prompt cut at multiples of
    max_batch_tokens and its own tokens one by one, so that nothing depends on its company. has_length_rope: keys
    depend on the prompt's length.
    """

    max_batch_size: int = 32
    max_batch_tokens: int = 512
    chunked_prefill: bool = True
    prefix_caching: bool = True
    host_blocks: int = 0
    alone: bool = False
    has_length_rope: bool = False
