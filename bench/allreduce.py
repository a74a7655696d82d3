"""Latency of the sum over ranks of one host: shared memory against gloo, in one run, alternating.

    python -m torch.distributed.run --nproc-per-node 2 bench/allreduce.py [--result-filename F]

Each rank is pinned to a core of its own where there are enough. Prints the median and the 99th percentile in
microseconds, from the leader.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from tpllama.parallel.collectives import ProcessGroupRanks, Ranks
from tpllama.parallel.shared_memory import SharedMemoryRanks

SIZES_BYTES = (4096, 65536, 1 << 20)
ROUNDS, REPEATS = 10, 50


def measure(ranks: Ranks, x: torch.Tensor) -> list[float]:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        ranks.sum(x)
        times.append((time.perf_counter() - started) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= size:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    ways: dict[str, Ranks] = {"shared_memory": SharedMemoryRanks(group), "gloo": ProcessGroupRanks(group, group)}
    for size_bytes in SIZES_BYTES:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, ranks in ways.items():
                times[way] += measure(ranks, torch.zeros(size_bytes // 2, dtype=torch.bfloat16))
        if rank == 0:
            report(size, size_bytes, times, arguments.result_filename)
    dist.barrier()


def report(ranks: int, size_bytes: int, times: dict[str, list[float]], result_filename: str | None) -> None:
    medians = {way: statistics.median(values) for way, values in times.items()}
    p99 = {way: statistics.quantiles(values, n=100)[98] for way, values in times.items()}
    for way in times:
        print(f"{ranks} ranks, {size_bytes:>8} bytes, {way:>13}: median {medians[way]:8.1f} us, p99 {p99[way]:8.1f} us")
    print(f"    gloo / shared_memory: {medians['gloo'] / medians['shared_memory']:.1f}")
    if result_filename:
        record = {
            "bench": "allreduce", "date": date.today().isoformat(), "ranks": ranks, "bytes": size_bytes,
            "median_us": medians, "p99_us": p99, "cpu": cpu_model(), "torch": torch.__version__,
        }  # fmt: skip
        with Path(result_filename).open("a") as file:
            file.write(json.dumps(record) + "\n")


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
