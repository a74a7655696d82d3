"""How sizes are dealt to ranks: pure arithmetic on heads, rows and the vocabulary. Imports no torch."""

from __future__ import annotations

import itertools

from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

# One (start, stop) per rank.
Ranges = tuple[tuple[int, int], ...]


def check_tp(config: LlamaConfig, tp: int) -> None:
    """Raises UserError for a degree at which some rank would be left with nothing."""
    legal = legal_tp(config)
    if tp not in legal:
        raise UserError(
            f"found tensor-parallel degree {tp}, expected 1 to {legal[-1]} (the model has {config.num_heads} attention "
            f"heads), choose --tp accordingly"
        )


def legal_tp(config: LlamaConfig) -> list[int]:
    """Every degree at which no rank is left without a query head, two MLP rows or a token of the vocabulary."""
    return list(range(1, min(config.num_heads, max(1, config.intermediate_size // 2), config.vocab_size) + 1))


def split_evenly(count: int, parts: int) -> Ranges:
    """`parts` contiguous ranges of 0..count whose sizes differ by at most one."""
    small, larger = divmod(count, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


def split_heads(num_heads: int, num_kv_heads: int, tp: int) -> tuple[Ranges, Ranges]:
    """Ranges of query heads and of key-value heads, in heads, per rank.

    Up to one rank per KV head, each rank owns whole KV groups: some KV heads with all their query heads.
    With more ranks, ranks are dealt to KV groups as evenly as can be; those of one group share its KV head
    (a replica each) and split its query heads. Either way a rank has equally many query heads per KV head.
    """
    queries_per_group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv = split_evenly(num_kv_heads, tp)
        return scale(kv, queries_per_group), kv
    q: list[tuple[int, int]] = []
    kv_of_rank: list[tuple[int, int]] = []
    for group, (first, last) in enumerate(split_evenly(tp, num_kv_heads)):
        base = group * queries_per_group
        q += [(base + start, base + stop) for start, stop in split_evenly(queries_per_group, last - first)]
        kv_of_rank += [(group, group + 1)] * (last - first)
    return tuple(q), tuple(kv_of_rank)


def split_size(size: int, tp: int) -> Ranges:
    """Ranges of an MLP or vocabulary of `size`, in units as large as the balance allows.

    Borders at multiples of a power of two keep most quantization groups on one rank and kernels on their
    fast path. A unit is good enough when the fullest rank has at most 1/16 more than its fair share.
    """
    fair = -(-size // tp)
    smallest = 2 - size % 2  # int4 holds two columns in a byte
    units = [unit for unit in (256, 128, 64, 32, 16, 8, 4, 2, 1) if size % unit == 0 and size // unit >= tp]
    units = [unit for unit in units if unit >= smallest] or units
    fullest = {unit: -(-(size // unit) // tp) * unit for unit in units}
    unit = next((unit for unit in units if fullest[unit] <= fair * 17 // 16), units[-1])
    return scale(split_evenly(size // unit, tp), unit)


def scale(ranges: Ranges, unit: int) -> Ranges:
    return tuple((start * unit, stop * unit) for start, stop in ranges)
