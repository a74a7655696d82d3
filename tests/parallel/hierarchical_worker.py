"""Ranks for test_hierarchical.py: `python hierarchical_worker.py`, one JSON line for each group of ranks.

Ranks are forked from one process and told which host they are on; each does all TASKS. Of the last host the last rank
dies in the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shared_memory_worker import FORK, drawn, same, wrong_in_a_row
from torch import Tensor

from tpllama.parallel import hosts, mesh
from tpllama.parallel.collectives import RankLost, Ranks
from tpllama.parallel.place import Place

# The host of each rank, a letter each: uneven, mixed, and all by themselves.
LAYOUTS = ("aab", "abcabb", "abc")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
# 70,000 is more than a slot of shared memory in all dtypes but the smallest, and is added up in shares.
SHAPES = ((), (0,), (1,), (3, 0), (5, 13), (2, 3, 11), (4096,), (7, 10_001))


def expected_sum(layout: str, each: list[Tensor]) -> Tensor:
    """In rank order on each host, then in host order."""
    of_host: dict[str, Tensor] = {}
    for host, x in zip(layout, each, strict=True):
        of_host[host] = of_host[host] + x if host in of_host else x
    total, *others = of_host.values()
    for other in others:
        total = total + other
    return total


def equals_torch(ranks: Ranks, layout: str) -> dict[str, Any]:
    """All dtypes and shapes, numbers that round; and a digest of all results."""
    wrong, digest = [], hashlib.sha256()
    for dtype in DTYPES:
        for shape in SHAPES:
            each = [drawn(f"{dtype} {shape} {rank}", dtype, torch.Size(shape).numel()) for rank in range(ranks.size)]
            each = [x.view(shape) for x in each]
            largest = each[0]
            for x in each[1:]:
                largest = torch.maximum(largest, x)
            expected = {"sum": expected_sum(layout, each), "max": largest, "gather": torch.stack(each)}
            for operation, wanted in expected.items():
                found = getattr(ranks, operation)(each[ranks.rank].clone())
                digest.update(found.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                if not same(found, wanted, operation):
                    wrong.append(f"{operation} of {shape} {dtype}")
    strided = [torch.arange(24.0).view(4, 6).t()[1:] * (rank + 1) for rank in range(ranks.size)]
    if not torch.equal(
        ranks.sum(strided[ranks.rank].clone(memory_format=torch.preserve_format)), sum(strided[1:], strided[0])
    ):
        wrong.append("strided")
    return {"wrong": wrong, "digest": digest.hexdigest()}


def rows_do_not_depend_on_their_number(ranks: Ranks, layout: str) -> bool:
    """A row's sum has the same bits alone and among many, whichever way is taken for the size."""
    generator = torch.Generator().manual_seed(ranks.rank)
    many = torch.randn(300, 576, generator=generator).bfloat16()
    alone = [ranks.sum(many[row].clone()) for row in (0, 150, 299)]
    together = ranks.sum(many.clone())
    return all(torch.equal(together[row], x) for row, x in zip((0, 150, 299), alone, strict=True))


def messages_arrive(ranks: Ranks, layout: str) -> bool:
    sizes = [0, 1, 4087, 4088, 4089, (1 << 18) - 8, (1 << 18) - 7, 1_000_003]
    sent = [random.Random(size).randbytes(size) for size in sizes]
    return [ranks.broadcast(message if ranks.rank == 0 else None) for message in sent] == sent


def stays_in_step(ranks: Ranks, layout: str) -> int:
    return wrong_in_a_row(ranks, 300, (1, 9, 40_000), 0.02)


def can_be_compiled_around(ranks: Ranks, layout: str) -> bool:
    def function(x: Tensor) -> Tensor:
        return ranks.sum(x * 2) + 1

    x = torch.arange(12.0) + ranks.rank
    return torch.equal(torch.compile(function, backend="aot_eager")(x.clone()), function(x.clone()))


TASKS: tuple[Callable[[Ranks, str], Any], ...] = (
    equals_torch, rows_do_not_depend_on_their_number, messages_arrive, stays_in_step, can_be_compiled_around,
)  # fmt: skip


def loses_a_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Seconds from the death of the last rank in the middle of sums to the error of this one, and its text."""
    x = torch.ones(2000, dtype=torch.bfloat16)
    try:
        for step in range(10_000_000):
            ranks.sum(x.clone())
            if step == 20 and ranks.rank == ranks.size - 1:
                (folder / "died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
    except RankLost as error:
        found = {"seconds": time.monotonic() - float((folder / "died").read_text()), "error": str(error)}
    else:
        raise AssertionError("nothing was noticed")
    ranks.break_off()
    return found


def run_rank(rank: int, layout: str, listener: socket.socket, folder: Path) -> None:
    size = len(layout)
    hosts.identity = lambda: (layout[rank],)
    place = Place(rank, size, rank, size, listener.getsockname()[1])
    _, ranks = mesh.join(place, "cpu", listener if rank == 0 else None)
    found: dict[str, Any] = {"class": type(ranks).__name__}
    for task in TASKS:
        found[task.__name__] = task(ranks, layout)
    found["loses_a_rank"] = loses_a_rank(ranks, folder)
    (folder / str(rank)).write_text(json.dumps(found))
    os._exit(0)  # which closes the connections on which other hosts wait


def run_group(layout: str) -> list[dict[str, Any]]:
    """What each rank found, but for the last one, which dies."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        folder = Path(name)
        processes = [
            FORK.Process(target=run_rank, args=(rank, layout, listener, folder)) for rank in range(len(layout))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads((folder / str(rank)).read_text()) for rank in range(len(layout) - 1)]


if __name__ == "__main__":
    torch.set_num_threads(1)  # and so no threads that the forked ones would lack
    for layout in LAYOUTS:
        print(json.dumps({"layout": layout, "ranks": run_group(layout)}), flush=True)
