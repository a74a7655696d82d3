"""The processes of bench/machine.py, one for each rank, on cores of their own where there are enough."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_SHORTEST_PASS_S, _FEWEST_PASSES = 0.02, 3
_LEAD_S = 0.0005  # from an order to its start, so that every rank has it by then
_END_S = 5.0
# What torchrun tells its ranks is not for the processes that a rank starts.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")


class Workers:
    """A process for each rank, which do a job's works at the same time, on request. They end when this one does."""

    def __init__(self, job: str, ranks: int, threads: int, device: str, size: int = 0) -> None:
        cores = cores_for(ranks * threads)
        share = len(cores) // ranks
        self._processes: list[subprocess.Popen[str]] = []
        with ExitStack() as stack:
            for rank in range(ranks):
                mine = cores[rank * share :][:share][:threads] or cores
                order = {"job": job, "rank": rank, "cores": mine, "threads": threads, "device": device, "size": size}
                self._processes.append(_start(order))
                stack.callback(_end, self._processes[-1])
            for process in self._processes:  # each has its memory then
                self.amounts: dict[str, float] = json.loads(_answer(process))
            self._stack = stack.pop_all()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rates(self, work: str, seconds: float) -> list[float]:
        """Amounts a second of all ranks together, for each of the passes of that time."""
        self._pass(work, 1)  # warms up
        repeats = math.ceil(_SHORTEST_PASS_S / self._pass(work, 1))
        amount = self.amounts[work] * repeats * len(self._processes)
        passes: list[float] = []
        end = time.perf_counter() + seconds
        while len(passes) < _FEWEST_PASSES or time.perf_counter() < end:
            passes.append(amount / self._pass(work, repeats))
        return passes

    def _pass(self, work: str, repeats: int) -> float:
        """Seconds from the first rank's start to the last one's end."""
        order = f"{work} {repeats} {time.perf_counter() + _LEAD_S}\n"
        for process in self._processes:
            with suppress(BrokenPipeError):  # the answer will tell
                assert process.stdin is not None
                process.stdin.write(order)
                process.stdin.flush()
        times = [tuple(map(float, _answer(process).split())) for process in self._processes]
        return max(end for _, end in times) - min(start for start, _ in times)


def _start(order: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A worker, in a session of its own, so that a terminal's signals leave it to end with its input."""
    command = [sys.executable, str(Path(__file__).with_name("machine_worker.py")), json.dumps(order)]
    env = clean_environment("OMP_NUM_THREADS")  # the order says how many
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of bench/machine.py ended with exit code {process.wait()}")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=_END_S)  # closes its input, and so it ends
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def clean_environment(*without: str) -> dict[str, str]:
    """This process's, for one that is none of torchrun's ranks and finds the package; `without` some names more."""
    dropped = (*_OF_TORCHRUN, *without)
    environment = {
        name: value for name, value in os.environ.items()
        if not (name in dropped or name.startswith("TORCHELASTIC_") or name.endswith(("_RANK", "_WORLD_SIZE")))
    }  # fmt: skip
    paths = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH", ""))
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Pins this thread, and what it starts, for a while."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def cores_for(needed: int) -> list[int]:
    """This process's cores, or all that the kernel gives out if those are too few: it may be a pinned rank."""
    cores = os.sched_getaffinity(0)
    if len(cores) < needed:
        with on_cores(range(os.sysconf("SC_NPROCESSORS_CONF"))):
            cores = os.sched_getaffinity(0)
    return sorted(cores)
