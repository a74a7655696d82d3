"""How many blocks the cache of keys and values has: from what a block takes and what memory is there. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tpllama.config import UserError


class ScaledForm(NamedTuple):
    """Values of one byte with a float32 scale for each vector of head_dim: torch's name, the largest value."""

    dtype: str
    largest: float


# What `--kv-cache-dtype` may say (config.py), beside auto.
KV_DTYPES = {"int8": ScaledForm("int8", 127), "fp8": ScaledForm("float8_e4m3fn", 448)}
SCALED_FORMS = {form.dtype: form for form in KV_DTYPES.values()}
_SCALE_BYTES = 4
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# torch's CUDA kernel reads through block tables where blocks are multiples of this.
DEFAULT_BLOCK_TOKENS = {"cpu": 16, "cuda": 256}
# Part of the memory that is there, for the caches of all ranks of a host; on a GPU, what else is needed is smaller.
_SHARE = {"cpu": 0.5, "cuda": 0.9}
# Where nothing says how much memory there is.
UNKNOWN_FREE_BYTES = 4 << 30
# Blocks that hold only what might be used again take no more than this, unless running requests needed more before.
_WARM_BYTES = 256 << 20


@dataclass(frozen=True)
class CacheShape:
    """A rank's cache: `num_blocks` blocks of `block_size` tokens, and one that fills up steps.

    num_host_blocks: blocks on the host, for preempted requests.
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
        is_scaled = self.dtype in SCALED_FORMS
        vector = self.head_dim + _SCALE_BYTES if is_scaled else self.head_dim * _ITEM_BYTES[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * vector

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks on the device, the one that fills up steps included."""
        return (self.num_blocks + 1) * self.bytes_per_block


def stored_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """torch's name for how keys and values are stored: as asked, or in the model's dtype."""
    return KV_DTYPES[kv_cache_dtype].dtype if kv_cache_dtype in KV_DTYPES else dtype


def asked_blocks(shapes: Sequence[CacheShape], asked_bytes: int) -> int:
    """Blocks that fit into so many bytes on every rank. Raises UserError where these are none."""
    largest = max(shape.bytes_per_block for shape in shapes)
    blocks = asked_bytes // largest - 1
    if blocks < 1:
        raise UserError(
            f"found {asked_bytes} bytes for the cache of keys and values, expected room for two blocks of {largest} "
            f"on each rank, raise --kv-cache-memory or lower --block-size"
        )
    return blocks


def fitting_blocks(shape: CacheShape, asked_bytes: int | None, needed_tokens: int, free_bytes: int, device: str) -> int:
    """Blocks that fit into `asked_bytes`; else into a share of `free_bytes`, and no more than `needed_tokens` take.

    Raises UserError where more was asked for than is free, or where not even one block is.
    """
    if asked_bytes is not None:
        if asked_bytes > free_bytes:
            raise UserError(
                f"found {asked_bytes} bytes asked for the cache of keys and values, expected at most the {free_bytes} "
                f"that are free for each rank, lower --kv-cache-memory"
            )
        return asked_blocks([shape], asked_bytes)
    blocks = int(free_bytes * _SHARE[device]) // shape.bytes_per_block - 1
    if blocks < 1:
        raise UserError(
            f"found {free_bytes} bytes free for each rank, expected room for a cache of keys and values, of "
            f"{shape.bytes_per_block} a block, give it more memory or choose a smaller model or recipe"
        )
    return min(blocks, -(-needed_tokens // shape.block_size))


def sized(shape: CacheShape, blocks: int, host_blocks: int, is_lazy: bool) -> CacheShape:
    """`shape` with so many blocks. is_lazy: memory is taken as it is used, and not for what is merely kept."""
    warm = max(_WARM_BYTES // shape.bytes_per_block, 1) if is_lazy else None
    return replace(shape, num_blocks=blocks, num_host_blocks=host_blocks, num_warm_blocks=warm)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can take without swapping, within the limits of its control groups; None if unknown.

    /proc/meminfo and /proc/self/cgroup (proc(5), cgroups(7)). Pages of files count as free: they give way.
    """
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError, ValueError):
        return None
    limits += _group_limits(root)
    return max(min(limits), 0)


def _group_limits(root: Path) -> Iterator[int]:
    """What is left in each control group that the process is in, from its own up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        for group in (Path(path), *Path(path).parents):
            left = _left_in(root / mount / str(group).lstrip("/"), *names)
            if left is not None:
                yield left


def _left_in(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    """None where a group has no limit ("max"), or is not to be seen from here."""
    try:
        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return left + sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return None
