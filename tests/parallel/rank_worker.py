"""What one rank of the tests in this folder does: `python rank_worker.py TASKS RANK SIZE PORT LISTENER_FD OUT`.

TASKS are names of functions below, joined by commas. What they return is saved to OUT/RANK.pt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpllama.blueprint import meta_model
from tpllama.llama_config import LlamaConfig
from tpllama.parallel.collectives import ProcessGroupRanks, RankLost, Ranks
from tpllama.parallel.mesh import join, leave
from tpllama.parallel.place import Place
from tpllama.parallel.plan import llama_plan
from tpllama.parallel.shard import owned_slices, shard
from tpllama.parallel.shared_memory import _SLOT_BYTES, SharedMemoryRanks

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)


def both(mesh: DeviceMesh, shared: Ranks) -> dict[str, Ranks]:
    """The two implementations, over the same processes."""
    assert isinstance(shared, SharedMemoryRanks)
    return {"shared": shared, "group": ProcessGroupRanks(mesh.get_group(), mesh.get_group())}


def reduce_and_gather(mesh: DeviceMesh, shared: Ranks) -> list[dict[str, Any]]:
    """Every operation over every dtype and a range of shapes, on small integers, which no order of adding rounds."""
    generator = torch.Generator().manual_seed(shared.rank)
    results = []
    for dtype in DTYPES:
        slot = _SLOT_BYTES // dtype.itemsize
        for shape in ((), (0,), (1,), (3, 0), (7,), (5, 13), (2, 3, 11), (slot,), (slot + 1,), (3, slot - 5)):
            x = torch.randint(-8, 8, shape, generator=generator).to(dtype)
            for name, ranks in both(mesh, shared).items():
                for operation in ("sum", "max", "gather"):
                    given = x.clone()
                    result = getattr(ranks, operation)(given)
                    results.append({"ranks": name, "operation": operation, "x": x, "result": result.clone()})
    strided = torch.arange(24.0).view(4, 6).t()[1:]
    for name, ranks in both(mesh, shared).items():
        for operation in ("sum", "max", "gather"):
            result = getattr(ranks, operation)(strided.clone(memory_format=torch.preserve_format))
            results.append({"ranks": name, "operation": operation, "x": strided, "result": result.clone()})
    return results


def sum_floats(mesh: DeviceMesh, shared: Ranks) -> dict[str, Any]:
    """Sums that round."""
    generator = torch.Generator().manual_seed(shared.rank)
    xs = [torch.randn(1000, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    sums = {name: [ranks.sum(x.clone()) for x in xs] for name, ranks in both(mesh, shared).items()}
    return {"x": xs, **sums}


def many_operations(mesh: DeviceMesh, shared: Ranks) -> list[bool]:
    """A long mix in which ranks arrive at different times; whether each result was right."""
    same, own = random.Random(0), random.Random(shared.rank)
    right = []
    for step in range(200):
        operation, size = same.choice(("sum", "max", "gather", "broadcast")), same.choice((1, 8, 600, 70_000))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        x = torch.full((size,), float(step % 50 + shared.rank))
        each = [float(step % 50 + rank) for rank in range(shared.size)]
        if operation == "broadcast":
            message = bytes([step % 256]) * size
            right.append(shared.broadcast(message if shared.rank == 0 else None) == message)
        elif operation == "gather":
            right.append(torch.equal(shared.gather(x)[:, -1], torch.tensor(each)))
        else:
            expected = sum(each) if operation == "sum" else max(each)
            right.append(bool((getattr(shared, operation)(x) == expected).all()))
    return right


def broadcast(mesh: DeviceMesh, shared: Ranks) -> list[tuple[str, bytes]]:
    """Messages of sizes around the borders of both implementations."""
    borders = [size for border in (4096, _SLOT_BYTES, 2 * _SLOT_BYTES) for size in (border - 8, border)]
    sizes = [0, 1, *(border + more for border in borders for more in (-1, 0, 1)), 1_000_003]
    received = []
    for size in sizes:
        message = random.Random(size).randbytes(size) if shared.rank == 0 else None
        received += [(name, ranks.broadcast(message)) for name, ranks in both(mesh, shared).items()]
    return received


def open_files(mesh: DeviceMesh, shared: Ranks) -> str:
    """Everything this process has mapped or open while the shared memory is in use."""
    shared.sum(torch.ones(3))
    descriptors = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return Path("/proc/self/maps").read_text() + "\n".join(descriptors)


def lose_rank(mesh: DeviceMesh, shared: Ranks) -> dict[str, Any]:
    """Rank 1 is killed; what the others find when they go on, and how long they take."""
    ranks = both(mesh, shared)[os.environ["LOSE"]]
    ranks.sum(torch.ones(3))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        ranks.sum(torch.ones(3))
    except RankLost as error:
        return {"seconds": time.monotonic() - started, "error": str(error)}
    return {"seconds": time.monotonic() - started, "error": None}


def shard_model(mesh: DeviceMesh, shared: Ranks) -> dict[str, Any]:
    """A model's parameters on this rank: local shapes of the DTensors, and the owned slices."""
    model = meta_model(LlamaConfig.from_hf(json.loads(os.environ["CONFIG"])))
    shard(model, mesh, llama_plan(model.config, shared.size))
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    local = {name: tuple(getattr(each, "_local_tensor", each).shape) for name, each in parameters.items()}
    owned = {name: [(part.start, part.stop) for part in owned_slices(each)] for name, each in parameters.items()}
    return {"local": local, "owned": owned, "global": {name: tuple(each.shape) for name, each in parameters.items()}}


def main() -> None:
    tasks, rank, size, port, listener, out = sys.argv[1:]
    torch.set_num_threads(1)
    if "CORES" in os.environ:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["CORES"])])
    place = Place(int(rank), int(size), int(rank), int(size), int(port))
    mesh, ranks = join(place, "cpu", socket.socket(fileno=int(listener)) if rank == "0" else None)
    torch.save({task: globals()[task](mesh, ranks) for task in tasks.split(",")}, Path(out) / f"{rank}.pt")
    if "lose_rank" in tasks:
        os._exit(0)  # there is no group left to take leave of
    leave()


if __name__ == "__main__":
    main()
