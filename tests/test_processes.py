"""Ranks as processes: started, under torchrun, killed at any time. Nothing hangs and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Run

from tpllama import LLM, SamplingParams
from tpllama.prepare import Preparation

LONG = ["Tell me a very long story.", "--max-new-tokens", "4000", "--ignore-eos"]


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    """`tpllama generate` on 2 ranks, once it has begun to print its long answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tpllama", "generate", *LONG, "--tp", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        yield process
    finally:
        process.kill()
        process.communicate()


def followers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_all_end(processes: list[psutil.Process], within_s: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_killed_follower_ends_the_run_with_one_line(long_run: subprocess.Popen[str]) -> None:
    before = shared_memory()
    children = followers(long_run)
    children[0].kill()
    started = time.monotonic()
    _, stderr = long_run.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert long_run.returncode == 1
    assert stderr.splitlines() == [
        "tpllama: error: rank 1 was ended by SIGKILL (out of memory, or killed from outside)"
    ]
    assert_all_end(children)
    assert shared_memory() <= before


def test_a_killed_leader_leaves_no_orphans(long_run: subprocess.Popen[str]) -> None:
    children = followers(long_run)
    long_run.kill()
    assert_all_end(children)


def test_ctrl_c_is_clean(long_run: subprocess.Popen[str]) -> None:
    children = followers(long_run)
    long_run.send_signal(signal.SIGINT)
    _, stderr = long_run.communicate(timeout=20)
    assert long_run.returncode == 130
    assert stderr == ""
    assert_all_end(children)


def test_termination_ends_all(long_run: subprocess.Popen[str]) -> None:
    children = followers(long_run)
    long_run.terminate()
    long_run.communicate(timeout=20)
    assert_all_end(children)


def test_a_closed_pipe_ends_the_run(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tpllama generate {' '.join(map(repr, LONG))} --tp 2 | head -c 20"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert len(result.stdout) == 20
    assert "Traceback" not in result.stderr


def test_a_rank_that_raises_is_named_with_its_reason(tpllama: Run, tmp_path: Path) -> None:
    # A sitecustomize that makes rank 1's load fail, as a broken disk under one rank would.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.argv[:1] == ['-m'] and 'tpllama.follow' in ' '.join(sys.orig_argv):\n"
        "    import tpllama.checkpoint.gguf as gguf\n"
        "    def broken(self, name, index):\n"
        "        raise OSError(5, 'Input/output error')\n"
        "    gguf.GgufCheckpoint.read = broken\n"
    )
    result = tpllama("generate", "hi", "--tp", "2", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "rank 1 failed" in result.stderr
    assert "Input/output error" in result.stderr


def torchrun(ranks: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "tpllama"]
    return subprocess.Popen(
        [*command, "generate", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_under_torchrun_the_text_is_printed_once() -> None:
    process = torchrun(2, "What is the capital of France?", "--torchao-config", "int8wo")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.count("Paris") == 1
    assert stderr.count("new tokens") == 1


def test_under_torchrun_a_killed_rank_ends_the_run() -> None:
    process = torchrun(2, *LONG)
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        ranks = psutil.Process(process.pid).children(recursive=True)
        ranks[-1].kill()
        started = time.monotonic()
        _, stderr = process.communicate(timeout=40)
        assert time.monotonic() - started < 10
        assert process.returncode == 1
        assert "SIGKILL" in stderr
        assert_all_end(ranks)
    finally:
        process.kill()


def test_a_step_that_breaks_off_leaves_no_wrong_answers() -> None:
    """Ranks out of step must not go on: a later call says so instead of computing on mixed-up messages."""
    with LLM(tp=2) as llm:
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        layer = runner.model.model.layers[3]
        handle = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", SamplingParams(max_new_tokens=4))
        handle.remove()
        with pytest.raises(RuntimeError, match="out of step"):
            llm.generate("Hello", SamplingParams(max_new_tokens=4))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_follower_that_dies_before_it_joins_is_an_error_not_a_hang() -> None:
    preparation = Preparation(tp=2)
    psutil.Process().children()[-1].kill()
    with pytest.raises(RuntimeError, match="rank 1 was ended by SIGKILL"):
        preparation.load()


def test_a_failed_second_model_leaves_the_first_alone() -> None:
    with LLM(tp=2) as llm:
        before = llm.generate("Hello", SamplingParams(max_new_tokens=4))
        with pytest.raises(RuntimeError, match="process group"):
            LLM(tp=2)
        assert llm.generate("Hello", SamplingParams(max_new_tokens=4)) == before


def test_followers_run_no_code_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('ran')")
    command = [sys.executable, "-P", "-c", "from tpllama.cli import main; main()", "generate", "hi", "--tp", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "--max-new-tokens", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=env,
        check=False,
    )
    assert result.returncode == 0, result.stderr
