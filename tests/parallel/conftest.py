"""Real ranks: processes that run tasks of rank_worker.py together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY

ROOT = Path(__file__).parents[2]
# One launch does all of these: starting a rank takes longer than most tasks.
TASKS = {
    2: "reduce_and_gather,many_operations,open_files,shard_model",
    3: "reduce_and_gather,many_operations,sum_floats,broadcast,shard_model",
}


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`run_ranks(task, size)`: what the task returned on each rank. Three ranks share one core."""
    done: dict[int, list[Any]] = {}

    def run(task: str, size: int) -> list[Any]:
        if size not in done:
            env = {"CONFIG": json.dumps(TINY), "CORES": "1" if size == 3 else "2"}
            done[size] = launch_ranks(tmp_path_factory.mktemp("ranks"), TASKS[size], size, **env)
        return [each[task] for each in done[size]]

    return run


@pytest.fixture
def lose_rank(tmp_path: Path) -> Callable[[str], list[Any]]:
    """`lose_rank("shared" or "group")`: what ranks 0 and 2 of three found when rank 1 was killed."""

    def run(ranks: str) -> list[Any]:
        found = launch_ranks(tmp_path, "lose_rank", 3, without=1, LOSE=ranks)
        return [each["lose_rank"] for each in found]

    return run


def launch_ranks(out: Path, tasks: str, size: int, without: int | None = None, **env: str) -> list[dict[str, Any]]:
    """Each rank's results, except those of rank `without`, which is expected to die, and is not waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "tests/parallel/rank_worker.py"), tasks]
                + [str(value) for value in (rank, size, port, fd, out)],
                pass_fds=[fd],
                env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        others = [(rank, process) for rank, process in enumerate(processes) if rank != without]
        try:
            said = [process.communicate(timeout=120)[1] for _, process in others]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert not any(process.returncode for _, process in others), "\n".join(said)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank, _ in others]


@pytest.fixture
def parallel_fields() -> dict[str, Any]:
    """The config of the task shard_model."""
    return TINY
