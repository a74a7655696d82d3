"""One step's work, as the leader describes it to every rank. Plain Python, no torch; small when serialised."""

from __future__ import annotations

from dataclasses import dataclass

from tpllama.engine.request import TokenLogprobs


@dataclass(frozen=True)
class Draw:
    """How to choose the token after a chunk.

    `key` makes the draw's noise its own: seed, sample and count of new tokens. `seen`: the ids that the repetition
    penalty applies to.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    key: tuple[int, int, int]
    seen: tuple[int, ...]
    logprobs: int | None


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, from position `start`, kept in cache row `row`; a draw after the last.

    `length` is the sequence's, all of the prompt included, however few of its tokens this chunk has: some RoPE types
    depend on it.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    length: int
    draw: Draw | None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


Batch = tuple[Chunk, ...]


@dataclass(frozen=True)
class Sampled:
    """The token drawn after one chunk."""

    token: int
    logprobs: TokenLogprobs | None
