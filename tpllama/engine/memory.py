"""How many blocks the cache of keys and values has: from what a block takes and what memory is there. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tpllama.config import UserError

# What a user may ask for, and how it is stored: its name in torch, bytes of a value, bytes of a scale per vector.
KV_DTYPES = {"int8": ("int8", 1, 4), "fp8": ("float8_e4m3fn", 1, 4)}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Part of the memory that is there, for the caches of all ranks of a host; on a GPU, what else is needed is smaller.
_SHARE = {"cpu": 0.5, "cuda": 0.9}
# Blocks that hold only what might be used again take no more than this, unless running requests needed more before.
_WARM_BYTES = 256 << 20


@dataclass(frozen=True)
class CacheShape:
    """A rank's cache: `num_blocks` blocks of `block_size` tokens, on the host `num_host_blocks` more.

    dtype: as torch names it. num_warm_blocks: see `BlockPool`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    num_blocks: int = 0
    num_host_blocks: int = 0
    num_warm_blocks: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, scales included."""
        stored = {name: (item, scale) for name, item, scale in KV_DTYPES.values()}
        item, scale = stored.get(self.dtype) or (_ITEM_BYTES[self.dtype], 0)
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * item + scale)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks on the device."""
        return self.num_blocks * self.bytes_per_block


def stored_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """torch's name for how keys and values are stored: as asked, or in the model's dtype."""
    return KV_DTYPES[kv_cache_dtype][0] if kv_cache_dtype in KV_DTYPES else dtype


def fitting_blocks(shape: CacheShape, asked_bytes: int | None, needed_tokens: int, free_bytes: int, device: str) -> int:
    """Blocks that fit into `asked_bytes`; else into a share of `free_bytes`, and no more than `needed_tokens` take."""
    if asked_bytes is not None:
        return asked_bytes // shape.bytes_per_block
    return min(int(free_bytes * _SHARE[device]) // shape.bytes_per_block, -(-needed_tokens // shape.block_size))


def sized(shape: CacheShape, blocks: int, host_blocks: int, asked_bytes: int | None, device: str) -> CacheShape:
    """`shape` with so many blocks. Raises UserError where that isn't one."""
    if blocks < 1:
        given = f"{asked_bytes} bytes" if asked_bytes is not None else "no memory"
        raise UserError(
            f"found {given} for the cache of keys and values, expected at least one block's {shape.bytes_per_block} "
            f"on each rank, raise --kv-cache-memory or lower --block-size"
        )
    is_lazy = asked_bytes is None and device == "cpu"
    warm = max(_WARM_BYTES // shape.bytes_per_block, 1) if is_lazy else None
    return replace(shape, num_blocks=blocks, num_host_blocks=host_blocks, num_warm_blocks=warm)


def free_host_bytes() -> int:
    """Memory that this host can give without swapping, within the limit of the process's control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limits = [available]
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):
            continue  # no such group, or no limit ("max")
    return max(min(limits), 0)
