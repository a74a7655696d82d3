"""bench/machine.py measures something that a machine can do, whoever calls it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SANE = (0.5e9, 5000e9)
# As another bench calls it: a rank of torchrun's, pinned to a core.
CALLER = """
import json, os, sys
import psutil
from machine import Workers, read_bandwidth
own = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, own)
rates = [read_bandwidth(64 << 20, ranks, threads, seconds=0.1) for ranks, threads in ((1, 1), (2, 1), (1, 2), (3, 1))]
with Workers("read", 2, 1, "cpu", 1 << 20) as workers:
    cores = [os.sched_getaffinity(process.pid) for process in workers._processes]
    environments = [psutil.Process(process.pid).environ() for process in workers._processes]
print(json.dumps({
    "rates": rates, "left": len(psutil.Process().children()), "is_pinned": os.sched_getaffinity(0) == own,
    "cores": [sorted(each) for each in cores], "names": [name for each in environments for name in each],
}))
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT}{os.pathsep}{ROOT / 'bench'}"
    env = os.environ | {"PYTHONPATH": paths} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_pinned_rank_of_torchrun_can_measure() -> None:
    done = python("-c", CALLER, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="nowhere", MASTER_PORT="1",
                  TORCHELASTIC_RUN_ID="none", OMP_NUM_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(SANE[0] < rate < SANE[1] for rate in found["rates"])
    assert (found["left"], found["is_pinned"]) == (0, True)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(found["names"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(found["cores"][0]) & set(found["cores"][1])


def test_without_a_compiler_torch_reads(tmp_path: Path) -> None:
    code = "from machine import read_rates; reader, rates = read_rates(64 << 20, 1, seconds=0.1); print(reader, *rates)"
    done = python("-c", code, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    reader, *rates = done.stdout.split()
    assert reader == "torch_sum"
    assert all(SANE[0] < float(rate) < SANE[1] for rate in rates)


def test_a_process_that_dies_is_an_error() -> None:
    code = """
from machine import Workers
with Workers("read", 2, 1, "cpu", 1 << 20) as workers:
    workers._processes[1].kill()
    workers._processes[1].wait()
    workers.rates("c" if "c" in workers.amounts else "torch_sum", 0.1)
"""
    done = python("-c", code)
    assert done.returncode == 1
    assert "RuntimeError: a process of bench/machine.py ended with exit code -9" in done.stderr


def bench(result: Path, *arguments: str) -> dict[str, Any]:
    script = str(ROOT / "bench/machine.py")
    done = python(script, *arguments, "--seconds", "0.1", "--result-filename", str(result))
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout
    assert "matmul, bfloat16" in done.stdout
    (record,) = map(json.loads, result.read_text().splitlines())
    return record


def test_its_record(tmp_path: Path) -> None:
    record = bench(tmp_path / "result.jsonl", "--bytes", "1MB", "--run-name", "test")
    assert {"date", "cpu", "cores", "versions", "last_level_cache_bytes", "reader"} <= set(record)
    assert (record["bench"], record["run_name"], record["device"]) == ("machine", "test", "cpu")
    assert (record["ranks"], record["threads"], record["bytes_per_rank"]) == (1, 1, 10**6)
    assert record["fits_in_cache"] == (record["last_level_cache_bytes"] >= 10**6)
    assert record["read_bandwidth"] >= record["median_read_bandwidth"] > SANE[0]
    assert set(record["matmul_ops"]) == {"float32", "bfloat16", "int8"}
    assert min(record["matmul_ops"].values()) > 0
    assert record["allreduce_4kib_us"] is None


@pytest.mark.slow
def test_the_sum_over_ranks_is_measured(tmp_path: Path) -> None:
    times = bench(tmp_path / "result.jsonl", "--bytes", "1MB", "--ranks", "2")["allreduce_4kib_us"]
    assert set(times) == {"shared_memory", "shared_memory_python", "gloo"}
    assert min(times.values()) > 0


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    record = bench(tmp_path / "result.jsonl", "--bytes", "256MB", "--device", "cuda")
    assert record["reader"] in ("sum", "copy")
    assert SANE[0] < record["read_bandwidth"] < 20 * SANE[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "found --ranks 0, expected 1 to 1024"),
        (("--threads", "1025"), "found --threads 1025, expected 1 to 1024"),
        (("--seconds", "inf"), "found --seconds inf, expected a number above 0"),
        (("--seconds", "nan"), "found --seconds nan, expected a number above 0"),
        (("--seconds", "-1"), "found --seconds -1, expected a number above 0"),
        (("--device", "cuda"), "found 0 CUDA devices"),
        (("--result-filename", "/nowhere/result"), "found /nowhere/result unwritable"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = python(str(ROOT / "bench/machine.py"), *arguments, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"machine: error: {message}")


@pytest.mark.slow
def test_more_threads_than_cores_are_said_to_take_turns(tmp_path: Path) -> None:
    cores = os.sysconf("SC_NPROCESSORS_CONF")
    code = f"import sys; from machine import main; sys.argv += ['--threads', '{cores + 1}']; main()"
    done = python("-c", code, "--bytes", "1MB", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr
    assert f"note: {cores + 1} threads take turns on" in done.stderr


def test_what_a_gpu_has_free_bounds_what_is_read() -> None:
    code = """
import torch
from machine import measured_bytes
torch.cuda.device_count = lambda: 2
torch.cuda.mem_get_info = lambda number: ((80 << 20, 1 << 40), (40 << 20, 1 << 40))[number]
print([measured_bytes(1 << 30, ranks, "cuda") >> 20 for ranks in (1, 2, 4)])
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "[20, 10, 5]\n"), done.stderr
