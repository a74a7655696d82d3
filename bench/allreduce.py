"""Latency of the sum over ranks of one host: shared memory, in C++ and in Python, and gloo, in one run, alternating.

    python -m torch.distributed.run --nproc-per-node 2 bench/allreduce.py [--result-filename F]

Each rank is pinned to a core of its own where there are enough. Prints the median and the 99th percentile in
microseconds, from the leader. Where nothing compiles, shared memory means Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from record import append, surroundings

from tpllama.parallel.collectives import ProcessGroupRanks, Ranks
from tpllama.parallel.shared_memory import SharedMemoryRanks

REPEATS = {4096: 50, 65536: 50, 1 << 20: 20, 2 << 20: 20, 16 << 20: 5}  # by bytes, in each round
ROUNDS = 20


def measure(ranks: Ranks, x: torch.Tensor, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        ranks.sum(x)
        times.append((time.perf_counter() - started) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-name", default="default")
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    machine = surroundings()
    if len(cores) >= size:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    ways: dict[str, Ranks] = {
        "shared_memory": SharedMemoryRanks(group),
        "shared_memory_python": SharedMemoryRanks(group, allow_native=False),
        "gloo": ProcessGroupRanks(group, group),
    }
    for size_bytes, repeats in REPEATS.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, ranks in ways.items():
                times[way] += measure(ranks, torch.zeros(size_bytes // 2, dtype=torch.bfloat16), repeats)
        if rank == 0:
            medians, p99 = report(size, size_bytes, times)
            if arguments.result_filename:
                fields = {"bench": "allreduce", "run_name": arguments.run_name, "ranks": size, "bytes": size_bytes}
                append(arguments.result_filename, fields | {"median_us": medians, "p99_us": p99} | machine)
    dist.barrier()
    dist.destroy_process_group()


def report(ranks: int, size_bytes: int, times: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Prints medians and 99th percentiles, and returns both."""
    medians = {way: round(statistics.median(values), 2) for way, values in times.items()}
    p99 = {way: round(statistics.quantiles(values, n=100)[98], 2) for way, values in times.items()}
    for way in times:
        name = f"{ranks} ranks, {size_bytes:>8} bytes, {way:>20}"
        print(f"{name}: median {medians[way]:8.1f} us, p99 {p99[way]:8.1f} us")
    return medians, p99


if __name__ == "__main__":
    main()
