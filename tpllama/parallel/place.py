"""Which rank this process is, and which cores are its own. Imports no torch.

A process is a rank because torchrun says so in its environment, or because `launch.Followers` made it one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, order=True)
class Core:
    """A core that runs threads, as the kernel numbers it: `physical` is the first of those that share one."""

    node: int
    physical: int
    number: int


# Where the user says where threads run, and how to say that they may run anywhere.
_PLACED_BY_USER = ("OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
PIN = "TPLLAMA_PIN"


def split_cores(cores: Iterable[Core], ranks: int) -> list[set[int]] | None:
    """Cores for each rank, as many physical ones for one as for another, or None where there are fewer than ranks.

    A node's are used up before the next one's, and a rank's are of one node if there are as many ranks as nodes.
    """
    nodes: dict[int, dict[int, set[int]]] = {}
    for core in sorted(cores):
        nodes.setdefault(core.node, {}).setdefault(core.physical, set()).add(core.number)
    parts = [list(node.values()) for node in nodes.values()]
    if ranks < len(parts):
        parts = [[each for part in parts for each in part]]
    if sum(map(len, parts)) < ranks:  # threads of one physical core are better than turns on one thread
        parts = [[{number} for node in parts for physical in node for number in sorted(physical)]]
    for share in range(max(map(len, parts), default=0), 0, -1):
        starts = [(part, start) for part in parts for start in range(0, len(part) - share + 1, share)]
        if len(starts) >= ranks:
            return [set().union(*part[start : start + share]) for part, start in starts[:ranks]]
    return None


def own_cores(place: Place, environ: Mapping[str, str]) -> set[int] | None:
    """The cores that this rank keeps to; None where it goes where the kernel puts it.

    So it does as a leader, whose process and threads are its user's; where the user, or who started the ranks, placed
    threads; and where a quota of time allows fewer cores than it sees: others have the same ones.
    """
    if place.rank == 0 or not hasattr(os, "sched_getaffinity") or environ.get(PIN) == "0":
        return None
    numbers = os.sched_getaffinity(0)
    is_placed = any(name in environ for name in _PLACED_BY_USER) or numbers != os.sched_getaffinity(os.getppid())
    if is_placed or (_quota() or len(numbers)) < len(numbers):
        return None
    shares = split_cores(map(_core, numbers), place.local_size)
    return shares[place.local_rank] if shares else None


def threads_per_rank(local_size: int, environ: Mapping[str, str]) -> int:
    """Intra-op threads of one rank when `local_size` ranks share this host's cores: one for each physical core.

    OMP_NUM_THREADS has the last word, but for the 1 that torchrun sets by itself for several ranks.
    """
    given = environ.get("OMP_NUM_THREADS", "")
    is_torchruns = given == "1" and local_size > 1 and "TORCHELASTIC_RUN_ID" in environ
    if given.isdigit() and int(given) > 0 and not is_torchruns:
        return int(given)
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // local_size)
    cores = [_core(number) for number in os.sched_getaffinity(0)]
    shares = split_cores(cores, local_size) or [set()]
    own = len({core.physical for core in cores if core.number in shares[0]})
    return max(1, min(own, int((_quota() or len(cores)) // local_size)))


def _core(number: int, root: Path = Path("/sys/devices/system/cpu")) -> Core:
    """A core and what it shares; of a kernel that doesn't tell, a core by itself on node 0."""
    folder = root / f"cpu{number}"
    node = next((path.name.removeprefix("node") for path in folder.glob("node[0-9]*")), "0")
    try:
        siblings = (folder / "topology" / "thread_siblings_list").read_text()
    except OSError:
        siblings = str(number)
    return Core(int(node), int(siblings.replace("-", ",").split(",")[0]), number)


def _quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the strictest of this process's control groups (version 2) allows."""
    try:
        own = next(line[3:].strip("/") for line in groups.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    allowed = []
    for folder in (root / own, *(root / own).parents):
        if not folder.is_relative_to(root):
            break
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except OSError:  # as the root group
            continue
        if limit != "max":
            allowed.append(int(limit) / int(period))
    return min(allowed, default=None)
