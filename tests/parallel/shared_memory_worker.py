"""Ranks for test_shared_memory.py: `python shared_memory_worker.py`, one JSON line for each group of ranks.

Ranks are forked from one process, because most of what starting one takes is importing torch. Each does all TASKS.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # before ranks are forked
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tpllama.parallel.collectives import RankLost, Ranks
from tpllama.parallel.shared_memory import _SLOT_BYTES, SharedMemoryRanks

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FORK = multiprocessing.get_context("fork")
SIZES = (2, 3, 5)
CASES = 60
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@functools.cache
def messages(case: int) -> list[Tensor]:
    """What the ranks say in one of CASES. Drawn before they are forked."""
    choice, dtype = random.Random(case), DTYPES[case % len(DTYPES)]
    slot = _SLOT_BYTES // dtype.itemsize
    border = choice.choice((1, 64 // dtype.itemsize, 8192 // dtype.itemsize, slot // 2, slot, 2 * slot))
    count = max(choice.choice((border, border + choice.randint(-9, 9), choice.randint(1, border))), 1)
    return [drawn(f"{case} {rank}", dtype, count) for rank in range(max(SIZES))]


def drawn(seed: str, dtype: torch.dtype, count: int) -> Tensor:
    """Numbers that round when they are added; now and then any bits: NaN, infinities, subnormals, overflows."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(60))
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) > 0.7
    scaled = torch.randn(count, generator=generator, dtype=torch.float64) * 2.0 ** (random.Random(seed).randint(-26, 9))
    any_bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    is_any = torch.rand(count, generator=generator) < 0.1
    return torch.where(is_any, any_bits, scaled.to(dtype)) if dtype in FLOATS else any_bits


def same(found: Tensor, expected: Tensor, operation: str) -> bool:
    """The same bits; but one NaN is as good as another, and the maximum of 0 and -0 may be either."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    if operation == "max":
        return torch.equal(found.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(found.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    return bool(((found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())).all())


def equals_torch(ranks: SharedMemoryRanks) -> dict[str, Any]:
    """All dtypes, from one element to several slots, against torch in rank order; and a digest of all results."""
    wrong, digest = [], hashlib.sha256()
    for case in range(CASES):
        each = messages(case)[: ranks.size]
        added, largest = each[0], each[0]
        for x in each[1:]:
            added, largest = added + x, torch.maximum(largest, x)
        for operation, expected in (("sum", added), ("max", largest), ("gather", torch.stack(each))):
            found = getattr(ranks, operation)(each[ranks.rank].clone())
            digest.update(found.view(torch.uint8).numpy().tobytes())
            if not same(found, expected, operation):
                wrong.append(f"{operation} of {each[0].numel()} {each[0].dtype}, case {case}")
    return {"wrong": wrong, "digest": digest.hexdigest()}


def equals_torch_for_every_value(ranks: SharedMemoryRanks) -> list[str]:
    """All 65536 values of the narrow formats, beside neighbours of other signs and sizes."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        for turn in (0, 1, 2, 77, 2**10 + 1, 2**14 + 13, 2**15, 2**15 + 5):
            each = [every.roll(turn * rank) for rank in range(ranks.size)]
            expected = each[0]
            for x in each[1:]:
                expected = expected + x
            if not same(ranks.sum(each[ranks.rank].clone()), expected, "sum"):
                wrong.append(f"{dtype}, turned by {turn}")
    return wrong


def wrong_in_a_row(ranks: Ranks, steps: int, sizes: tuple[int, ...], lateness: float) -> int:
    """How many of so many operations, back to back, were wrong. lateness: the share that a rank comes late to."""
    same_for_all, own, wrong = random.Random(1), random.Random(ranks.rank), 0
    for step in range(steps):
        operation, count = same_for_all.choice(("sum", "max", "gather", "broadcast")), same_for_all.choice(sizes)
        if own.random() < lateness:
            time.sleep(own.random() * 0.007)
        x = torch.full((count,), float(step % 50 + ranks.rank))
        each = [float(step % 50 + rank) for rank in range(ranks.size)]
        if operation == "broadcast":
            message = step.to_bytes(4, "little") * count
            wrong += ranks.broadcast(message if ranks.rank == 0 else None) != message
        elif operation == "gather":
            wrong += ranks.gather(x)[:, -1].tolist() != each
        else:
            wrong += not bool((getattr(ranks, operation)(x) == (sum(each) if operation == "sum" else max(each))).all())
    return wrong


def stays_in_step(ranks: SharedMemoryRanks) -> int:
    return wrong_in_a_row(ranks, 4000, (1, 9, 5000), 0.003)


def is_native(ranks: SharedMemoryRanks) -> list[bool]:
    """What the ranks use, and what they use if one of them can't have C++."""
    assert dist.group.WORLD is not None
    mixed = SharedMemoryRanks(dist.group.WORLD, allow_native=ranks.rank > 0)
    return [each._native is not None for each in (ranks, mixed)]


def is_part_of_a_graph(ranks: SharedMemoryRanks) -> bool:
    """Whether a compiled function with sums and maxima is one graph with the results of eager mode."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ranks.sum(x * 2)
        return ranks.max((y - ranks.rank).t()) + y.t(), ranks.sum(x.t())

    x = torch.arange(12.0).view(3, 4)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(x.clone())
    return all(torch.equal(*pair) for pair in zip(found, function(x.clone()), strict=True))


def can_be_broken_off(ranks: SharedMemoryRanks) -> float:
    """Seconds until a signal's exception ends the leader's wait, and all go on after it."""
    assert dist.group.WORLD is not None
    if ranks.rank > 0:
        time.sleep(0.4)
        ranks.sum(torch.ones(5))
        return 0.0
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    started = time.monotonic()
    try:
        ranks.sum(torch.ones(5))
    except TimeoutError:
        return time.monotonic() - started
    return -1.0


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def loses_a_rank(ranks: SharedMemoryRanks, folder: Path) -> dict[str, Any]:
    """Seconds from the death of a rank in the middle of sums to the error of another one, and its text."""
    x, dying = torch.ones(2000, dtype=torch.bfloat16), ranks.size - 1
    try:
        for step in range(10_000_000):
            ranks.sum(x.clone())
            if step == 300 and ranks.rank == dying:
                (folder / "died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
    except RankLost as error:
        return {"seconds": time.monotonic() - float((folder / "died").read_text()), "error": str(error)}
    raise AssertionError("nothing was noticed")


def run_rank(rank: int, size: int, allow_native: bool, folder: Path) -> None:
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    ranks = SharedMemoryRanks(dist.group.WORLD, allow_native)
    found: dict[str, Any] = {}
    for task in (
        is_native,
        equals_torch,
        equals_torch_for_every_value,
        stays_in_step,
        is_part_of_a_graph,
        can_be_broken_off,
    ):
        found[task.__name__] = task(ranks)
    (folder / str(rank)).write_text(json.dumps(found | {"loses_a_rank": loses_a_rank(ranks, folder)}))


def run_group(size: int, allow_native: bool) -> list[dict[str, Any]]:
    """What each rank found, but for the last one, which dies."""
    with tempfile.TemporaryDirectory() as name:
        processes = [FORK.Process(target=run_rank, args=(rank, size, allow_native, Path(name))) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads((Path(name) / str(rank)).read_text()) for rank in range(size - 1)]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # and so no threads that the forked ones would lack
    for case in range(CASES):
        messages(case)
    for size in SIZES:
        for allow_native in (True, False):
            found = run_group(size, allow_native)
            print(json.dumps({"size": size, "allow_native": allow_native, "ranks": found}), flush=True)
