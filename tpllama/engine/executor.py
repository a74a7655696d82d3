"""The seam between a model and the engine: what it is, how it comes to be, and what it is asked to do.

Another architecture meets these, and the engine runs it: `build.py` does it for Llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tpllama.config import EngineConfig
from tpllama.engine.batch import Batch, Result
from tpllama.engine.memory import DEFAULT_BLOCK_TOKENS, CacheShape, stored_dtype

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelMetadata:
    """One rank's view of a model: counts of the whole, and what of it this rank has.

    owned_tokens: the range of token ids whose logits this rank computes. length_rope_limit: where keys depend on the
    length of their prompt, the length up to which they are those of any other. scale: of a query's products with keys.
    eos_token_ids: those that end a text by what the files say.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    owned_tokens: tuple[int, int]
    length_rope_limit: int | None
    scale: float
    eos_token_ids: tuple[int, ...]

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    def cache_shape(self, engine: EngineConfig, device: str) -> CacheShape:
        """What this rank's cache is made of; how many blocks it has is for the memory to say."""
        stored = stored_dtype(engine.kv_cache_dtype, engine.dtype)
        block_size = engine.block_size or DEFAULT_BLOCK_TOKENS[device]
        return CacheShape(self.num_layers, self.num_kv_heads, self.head_dim, stored, block_size)


class LayerKVCache(Protocol):
    """One layer's keys and values, as a model's attention sees them (`model.llama.KVCache`)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k, v [tokens, kv_heads, head_dim]; attention of q [tokens, heads, head_dim] over what is stored."""


class CausalModel(Protocol):
    """A rank's share of a model, ready to run."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        caches: Sequence[LayerKVCache] | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Logits of the tokens that this rank owns (see `model.llama.Llama.forward`)."""


class ModelLoader(Protocol):
    """Fetches a rank's share of a model's weights."""

    @property
    def metadata(self) -> ModelMetadata:
        """What the model will be; known before anything is read."""

    def load(self) -> CausalModel:
        """Reads, quantizes and packs. Raises UserError for files that can't be loaded."""


class ModelExecutor(Protocol):
    """What the engine asks of the model, whether it runs on one rank or many."""

    @property
    def cache_shape(self) -> CacheShape:
        """The leader's cache; all ranks' have as many blocks."""

    def run(self, batch: Batch) -> list[Result]:
        """Computes the batch: a result for each of its chunks."""

    def logits(self, tokens: list[list[int]]) -> Tensor:
        """Logits of whole sequences of equal length, float32 [batch, seq, vocab], by the reference forward."""

    def peak_memory_bytes(self) -> list[int]:
        """Each rank's peak memory so far."""


def bucket(count: int) -> int:
    """The size to which a step of `count` tokens is filled up: a power of two, or three quarters of one above 16."""
    size = 1 << max(count - 1, 0).bit_length()
    return size * 3 // 4 if size >= 16 and count <= size * 3 // 4 else size
