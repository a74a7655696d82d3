"""An executor whose cache holds tokens instead of keys and values, and whose logits are a hash of what it finds there.

Any mistake in blocks, copies, moves to the host, positions or draws changes the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from tpllama.engine.batch import Batch, Chunk, Draw, Result, Sampled
from tpllama.engine.cache import slots_of
from tpllama.engine.memory import CacheShape
from tpllama.engine.request import TokenLogprobs

VOCAB = 50


def shape(num_blocks: int, block_size: int, num_host_blocks: int = 0) -> CacheShape:
    return CacheShape(1, 1, 2, "float32", block_size, num_blocks, num_host_blocks)


def next_token(context: Sequence[tuple[int, int]], draw: Draw) -> int:
    """Of tokens with the lengths that they are rotated for, and everything that a draw says."""
    # Sets come in any order.
    said = draw._replace(counts=tuple(sorted(draw.counts)))
    digest = blake2b(repr((list(context), said)).encode(), digest_size=8).digest()
    token = int.from_bytes(digest) % VOCAB
    while token in draw.banned:
        token = (token + 1) % VOCAB
    return token


class MockExecutor:
    """A ModelExecutor. `steps` counts what it ran, `computed` the tokens of it.

    length_rope_limit: beyond it, a token's keys depend on the length that it is rotated for; None: they never do.
    """

    def __init__(self, cache_shape: CacheShape, length_rope_limit: int | None) -> None:
        self.cache_shape = cache_shape
        self.length_rope_limit = length_rope_limit
        size = cache_shape.block_size
        self.cache: list[tuple[int, int] | None] = [None] * (cache_shape.num_blocks * size)
        self.host: list[tuple[int, int] | None] = [None] * (cache_shape.num_host_blocks * size)
        self.steps = self.computed = 0

    def run(self, batch: Batch) -> list[Result]:
        self.steps += 1
        size = self.cache_shape.block_size
        for to, source, blocks in (
            (self.host, self.cache, batch.to_host), (self.cache, self.cache, batch.copies),
            (self.cache, self.host, batch.from_host),
        ):  # fmt: skip
            for from_block, to_block in blocks:
                to[to_block * size : (to_block + 1) * size] = source[from_block * size : (from_block + 1) * size]
        written = [slot for chunk in batch.chunks for slot in self._write(chunk)]
        assert len(written) == len(set(written)), "two chunks write the same slot"
        return [self._result(chunk) for chunk in batch.chunks]

    def _write(self, chunk: Chunk) -> list[int]:
        slots = slots_of(chunk.runs, chunk.start, chunk.stop, self.cache_shape)
        assert len(slots) == len(chunk.tokens) > 0
        self.computed += len(slots)
        for slot, position, token in zip(slots, range(chunk.start, chunk.stop), chunk.tokens, strict=True):
            limit = self.length_rope_limit
            length = 0 if limit is None else max(chunk.prompt_length, position + 1, limit)
            self.cache[slot] = (token, length)
        return slots

    def _result(self, chunk: Chunk) -> Result:
        context = [self.cache[slot] for slot in slots_of(chunk.runs, 0, chunk.stop, self.cache_shape)]
        assert None not in context, "a chunk looks at slots that nobody wrote"
        drawn = tuple(Sampled(next_token(context, draw)) for draw in chunk.draws)  # type: ignore[arg-type]
        following = chunk.scored.following if chunk.scored else ()
        scored = tuple(
            TokenLogprobs(token, float(next_token(context[: chunk.start + 1 + place], Draw())), ())  # type: ignore[arg-type]
            for place, token in enumerate(following)
        )
        return Result(drawn, scored)

    def logits(self, tokens: list[list[int]]) -> object:
        raise NotImplementedError

    def peak_memory_bytes(self) -> list[int]:
        return [0]
