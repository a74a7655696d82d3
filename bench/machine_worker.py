"""A process of bench/machine.py: one rank's reading or multiplying.

It gets its order as JSON in its argument, pins itself, says what its works are and how much each does, then does
what the lines of its input ask, `work repeats start`, and answers with the times of start and end. It ends with its
input.

The reader is ten lines of C, made with the C compiler that is found and called through ctypes: on 2 cores of an AMD
EPYC it reads 1 GB at 41.8 GB/s with one thread and 80.8 with two. torch's sum of int64 reaches 39.5 and 72.2, so
fractions of it would be up to 12 % too good; numpy's max of bytes 29.9 and 41.1, torch's mv of float32 22.
Where there is no compiler torch's sum is the reader. Memory is numpy's, so that it lies in huge pages where the
kernel gives them on request; torch's does not, and reads up to 4 % slower.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MATMUL_SIZE = 2048
_STEP_BYTES = 256  # what the reader takes at a time
_READER = """
#include <stddef.h>
typedef unsigned long long wide __attribute__((vector_size(64)));
unsigned long long read_all(const wide *part, size_t count, size_t repeats) {
    wide a = {0}, b = {0}, c = {0}, d = {0};
    while (repeats--) {
        for (size_t i = 0; i < count; i += 4) a |= part[i], b |= part[i + 1], c |= part[i + 2], d |= part[i + 3];
        __asm__ volatile("" ::: "memory");
    }
    a |= b | c | d;
    return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}
"""


class Work(NamedTuple):
    """Something to do over and over: bytes or operations each time, and what does it so many times."""

    amount: float
    run: Callable[[int], object]


def main() -> None:
    order = json.loads(sys.argv[1])
    os.sched_setaffinity(0, order["cores"])
    works = _matmuls(order) if order["job"] == "matmul" else _reads(order)
    print(json.dumps({name: work.amount for name, work in works.items()}), flush=True)
    for line in sys.stdin:
        name, repeats, start = line.split()
        time.sleep(max(0.0, float(start) - time.perf_counter()))
        started = time.perf_counter()
        seconds = works[name].run(int(repeats))  # of a GPU, its own clock's; else nothing
        ended = started + seconds if isinstance(seconds, float) else time.perf_counter()
        print(started, ended, flush=True)


def _reads(order: dict[str, Any]) -> dict[str, Work]:
    if order["device"] != "cpu":
        return _gpu_reads(order)
    library = compile_reader()
    threads, cores = order["threads"], order["cores"]
    # Each thread reads what it wrote first, so that it lies near its core.
    places = [{core} for core in cores] if threads <= len(cores) else [set(cores)] * threads
    lanes = [ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, place)) for place in places[:threads]]
    part_bytes = max(1, order["size"] // threads // _STEP_BYTES) * _STEP_BYTES
    readers = [lane.submit(_part_reader, part_bytes, library) for lane in lanes]
    pairs = [(lane, reader.result()) for lane, reader in zip(lanes, readers, strict=True)]

    def run(repeats: int) -> None:
        for done in [lane.submit(reader, repeats) for lane, reader in pairs]:
            done.result()

    return {"c" if library else "torch_sum": Work(part_bytes * threads, run)}


def _part_reader(size: int, library: ctypes.CDLL | None) -> Callable[[int], object]:
    """What reads one thread's part so many times."""
    import numpy as np

    memory = np.ones(size + _STEP_BYTES, dtype=np.uint8)
    part = memory[-memory.ctypes.data % _STEP_BYTES :][:size]
    if library:
        return lambda repeats: library.read_all(part.ctypes.data, size // 64, repeats)
    import torch

    torch.set_num_threads(1)
    numbers = torch.from_numpy(part.view(np.int64))
    return lambda repeats: [numbers.sum() for _ in range(repeats)][-1]


def compile_reader() -> ctypes.CDLL | None:
    """The reader, or None where it can't be made."""
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "reader.c", Path(folder) / "reader.so"
        source.write_text(_READER)
        for compiler in filter(None, map(shutil.which, ("cc", "gcc", "clang"))):
            command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(path)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                library = ctypes.CDLL(str(path))
                library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
                library.read_all.restype = ctypes.c_ulonglong
                return library
    return None


def _gpu_reads(order: dict[str, Any]) -> dict[str, Work]:
    """A sum, and a copy, which moves each byte twice: whichever is faster shows what the memory can do."""
    import torch

    source = torch.ones(order["size"] // 4, device=_gpu(order))
    target = torch.empty_like(source)
    size = source.nbytes
    return {"sum": Work(size, _timed(source.sum)), "copy": Work(2 * size, _timed(lambda: target.copy_(source)))}


def _matmuls(order: dict[str, Any]) -> dict[str, Work]:
    import torch

    is_cpu = order["device"] == "cpu"
    device = torch.device("cpu") if is_cpu else _gpu(order)
    torch.set_num_threads(order["threads"])
    shape, works = (MATMUL_SIZE, MATMUL_SIZE), {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        a, b = (torch.randint(-8, 8, shape, device=device).to(dtype) for _ in range(2))
        multiply = torch._int_mm if dtype == torch.int8 else torch.mm

        def once(multiply: Callable[..., object] = multiply, a: torch.Tensor = a, b: torch.Tensor = b) -> object:
            return multiply(a, b)

        run = (lambda repeats, once=once: [once() for _ in range(repeats)][-1]) if is_cpu else _timed(once)
        works[str(dtype).removeprefix("torch.")] = Work(2.0 * MATMUL_SIZE**3, run)
    return works


def _gpu(order: dict[str, Any]) -> Any:
    """The rank's GPU, made the current one, which events and streams are of."""
    import torch

    device = torch.device(order["device"], order["rank"] % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _timed(once: Callable[[], object]) -> Callable[[int], float]:
    """What does it so many times on the GPU and says how long that took there, in seconds."""
    import torch

    def run(repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            once()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return run


if __name__ == "__main__":
    main()
