"""One step's work, as the leader describes it to every rank. Plain Python, no torch.

Serialised it takes some hundred bytes a sequence, and a bit for each token of the vocabulary where a repetition
penalty or a grammar applies.
"""

from __future__ import annotations

from typing import NamedTuple

from tpllama.engine.request import TokenLogprobs

# Consecutive blocks of the cache: the first one's number, and how many.
Run = tuple[int, int]
# From block, to block.
Copy = tuple[int, int]


class Draw(NamedTuple):
    """How to choose one token from a row of logits.

    In this order: where `allowed` is given, only tokens whose bit is set in it (bit t % 8 of byte t // 8) may be drawn,
    and never those of `banned`; `bias` is added to its tokens' logits; the repetition penalty applies to the
    tokens whose bits are set in `seen`, presence and frequency penalty to those in `counts`, which has (token, times
    drawn so far); then come temperature (0: the likeliest token), top_k, top_p among those, and min_p.

    `key` makes the draw's noise its own: seed, sample and count of new tokens. `logprobs`: how many of the likeliest
    tokens to report, of the model's own distribution.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: tuple[int, int, int] = (0, 0, 0)
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen: bytes = b""
    counts: tuple[tuple[int, int], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    allowed: bytes | None = None


class Scored(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted: those that follow a chunk's first tokens, one each."""

    following: tuple[int, ...]
    logprobs: int


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, from position `start`, kept in the blocks of `runs`, which begin at 0.

    Some RoPE types depend on a sequence's length: a token is rotated for `prompt_length` tokens, or for itself and
    all before it where these are more, however the tokens were cut into chunks. Each of `draws` chooses a token
    that follows the last one: several for the samples of one prompt.
    """

    start: int
    tokens: tuple[int, ...]
    prompt_length: int
    runs: tuple[Run, ...]
    draws: tuple[Draw, ...] = ()
    scored: Scored | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Batch(NamedTuple):
    """Chunks, whose tokens follow each other in this order, after blocks were moved.

    First `to_host`, then `copies`, then `from_host` (the first and the last between the device's cache and the host's):
    so each reads what was there before the step.
    """

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[Copy, ...] = ()
    to_host: tuple[Copy, ...] = ()
    from_host: tuple[Copy, ...] = ()


class Sampled(NamedTuple):
    """A token that was drawn, or why there is none."""

    token: int
    logprobs: TokenLogprobs | None = None


class Result(NamedTuple):
    """What one chunk gave: a token for each of its draws, and log-probabilities of its scored tokens."""

    drawn: tuple[Sampled, ...] = ()
    scored: tuple[TokenLogprobs, ...] = ()
