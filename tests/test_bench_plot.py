"""bench/plot.py draws what results say, the same each time, and refuses in one line what it can't draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SAME = {
    "bench": "latency", "run_name": "test", "model": "1b", "device": "cpu", "dtype": "bfloat16", "cpu": "2 x CPU",
    "date": "2026-11-30",
}  # fmt: skip
RECIPES = ("none", "int8wo", "8da4w-32")


def plot(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, str(ROOT / "bench/plot.py"), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(SAME | record) + "\n" for record in records))
    return path


def latencies(**changes: Any) -> Iterable[dict[str, Any]]:
    for number, name in enumerate(RECIPES):
        for tp in (1, 2):
            settings = {"threads_per_rank": 2 // tp, "compile": "auto", "max_batch_tokens": 32}
            shape = {**settings, "torchao_config": name, "tp": tp, "batch_size": 1, "input_len": 32, "output_len": 16}
            figures = {"median_decode_latency": 0.1 / (number + tp), "bandwidth_fraction": 0.5 if tp == 1 else None}
            yield shape | ({"error": "too large"} if (number, tp) == (2, 2) else figures) | changes


def throughputs() -> Iterable[dict[str, Any]]:
    sizes = {"bench": "throughput", "num_prompts": 8, "input_len": 32, "output_len": 16, "tp": 2}
    for name in RECIPES:
        for concurrency in (1, 4, 4):
            figures = {"output_tokens_per_s": 10.0 * concurrency, "median_decode_tokens_per_s": None}
            yield (
                {"torchao_config": name, "concurrency": concurrency, "batch_invariant": name == "none"}
                | sizes
                | figures
            )


def drawn(chart: str, results: Path, out: Path, *more: str) -> str:
    done = plot(chart, "--results", results, "--run-name", "test", "--out", out, *more)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    return out.read_text()


def test_decode_latency(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    others = [*latencies(run_name="other"), {"bench": "throughput", "torchao_config": "none"}]
    results = write(tmp_path / "latency.jsonl", [*latencies(), *latencies(batch_size=8, max_batch_tokens=99), *others])
    svg = drawn("latency", results, tmp_path / "one.svg")
    assert svg == drawn("latency", results, tmp_path / "two.svg")
    texts = (
        "1b, bfloat16, on 2 x CPU, 2026-11-30",
        "batch 8, 32 + 16 tokens",
        "2 ranks",
        "100  (50%)",
        "could not run",
    )
    assert [text for text in (*RECIPES, *texts) if f"<!-- {text} -->" not in svg.replace("Decode latency: ", "")] == []


def test_throughput(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = write(tmp_path / "throughput.jsonl", throughputs())
    svg = drawn("throughput", results, tmp_path / "one.svg", "--where", "model=1b", "tp=2")
    names = ("none, TP 2, batch-invariant", "int8wo, TP 2", "8da4w-32, TP 2")
    assert [name for name in names if f"<!-- {name} -->" not in svg] == []


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = write(
        tmp_path / "latency.jsonl", [*latencies(), *latencies(run_name="two"), *latencies(run_name="two", model="8b")]
    )
    given = ("latency", "--results", results, "--out", tmp_path / "out.svg")
    for arguments, words in (
        (
            ("--run-name", "none"),
            f"found nothing with bench=latency run_name=none in {results}, expected at least one line",
        ),
        (("--run-name", "two"), "found several values of model, 1b, 8b, expected one, choose by --where model=..."),
    ):
        done = plot(*given, *arguments)
        assert (done.returncode, done.stderr) == (2, f"plot: error: {words}\n")
    assert not (tmp_path / "out.svg").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": "off"}, "several values of compile, auto, off,"),
        ({"kv_cache_dtype": "float8"}, "several values of kv_cache_dtype, None, float8,"),
        ({"batch_invariant": True}, "several values of batch_invariant, None, True,"),
        ({"threads_per_rank": 4}, "several values of threads_per_rank, 2, 4,"),
        ({"max_batch_tokens": 16}, "several values of max_batch_tokens, 32, 16,"),
    ],
)
def test_what_was_set_otherwise_is_no_repetition(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("matplotlib")
    results = write(tmp_path / "latency.jsonl", [*latencies(), *latencies(**changes)])
    done = plot("latency", "--results", results, "--run-name", "test", "--out", tmp_path / "out.svg")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    (field,) = changes
    assert f"choose by --where {field}=..." in done.stderr


def test_heads_have_bars_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = write(tmp_path / "latency.jsonl", [*latencies(), *latencies(quantize_lm_head=True)])
    assert "<!-- int8wo + lm_head -->" in drawn("latency", results, tmp_path / "out.svg")


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    binary, other = tmp_path / "binary", write(tmp_path / "other", [{"bench": "quality"}])
    binary.write_bytes(b"\xff\xfe\x00")
    out = tmp_path / "out.svg"
    for results, where, message in (
        (binary, out, f"found no text in {binary}, expected"),
        (other, out, f"found nothing with bench=throughput run_name=test in {other}, expected"),
        (other, tmp_path / "nowhere/out.svg", f"found --out {tmp_path}/nowhere/out.svg unwritable, expected"),
    ):
        done = plot("throughput", "--results", results, "--run-name", "test", "--out", where)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"plot: error: {message}")


def test_without_matplotlib_the_remedy_is_told(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    results = write(tmp_path / "latency.jsonl", latencies())
    given = ("latency", "--results", results, "--run-name", "test", "--out", tmp_path / "out.svg")
    done = plot(*given, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr == "plot: error: found no matplotlib, expected it for charts, do: pip install 'tpllama[bench]'\n"
