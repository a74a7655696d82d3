"""Which rank this process is. Imports no torch.

A process is a rank because torchrun says so in its environment, or because `launch.Followers` made it one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tpllama.config import UserError


@dataclass(frozen=True)
class Place:
    """This process among the ranks. `port`, for ranks started by us: the leader's store on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    port: int | None = None


_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def torchrun_place(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun, or whatever speaks its environment, gave this process."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    numbers = {name: environ[name] for name in _TORCHRUN_NAMES if name in environ}
    for name, value in numbers.items():
        if not value.isdecimal():
            raise UserError(f"found {name}={value!r} in the environment, expected a number as torchrun sets it")
    rank, size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= size:
        raise UserError(f"found RANK={rank} in a world of {size}, expected it to be lower, correct the environment")
    return Place(rank, size, int(numbers.get("LOCAL_RANK", rank)), int(numbers.get("LOCAL_WORLD_SIZE", size)))


def resolve_tp(requested: int | None, place: Place | None) -> int:
    """The tensor-parallel degree: torchrun's world, or what the user asked for. Contradiction is an error."""
    if place is None:
        return 1 if requested is None else requested
    if requested not in (None, place.size):
        raise UserError(
            f"found --tp {requested} in a torchrun world of {place.size} ranks, expected the same number, "
            f"drop --tp or start torchrun with --nproc-per-node {requested}"
        )
    return place.size


def usable_cores() -> int:
    """Cores this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def threads_per_rank(local_size: int, environ: Mapping[str, str]) -> int:
    """Intra-op threads of one rank when `local_size` ranks share this host's cores.

    OMP_NUM_THREADS has the last word, but for the 1 that torchrun sets by itself for several ranks.
    """
    given = environ.get("OMP_NUM_THREADS", "")
    is_torchruns = given == "1" and local_size > 1 and "TORCHELASTIC_RUN_ID" in environ
    if given.isdigit() and int(given) > 0 and not is_torchruns:
        return int(given)
    return max(1, usable_cores() // local_size)
