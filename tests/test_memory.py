"""Loading takes a rank's packed share and about one decoder layer: bench/load_memory.py, as a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load(shape: str, *arguments: str, result: Path) -> list[dict[str, Any]]:
    """Runs the bench, which exits 1 where a rank's peak is past its bound; its records."""
    command = [sys.executable, str(ROOT / "bench/load_memory.py"), "--shape", shape, *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--result-filename", str(result)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in result.read_text().splitlines()]


def test_a_quarter_billion_weights(tmp_path: Path) -> None:
    one, two = load("small", "--tp", "1", "2", result=tmp_path / "results.jsonl")
    assert [(record["tp"], len(record["ranks"])) for record in (one, two)] == [(1, 1), (2, 2)]
    for record in (one, two):
        for rank in record["ranks"]:
            assert rank["peak"] - rank["baseline"] <= rank["bound"]
            # The weights are really there, and hardly more than them is left.
            assert 0.9 * rank["packed"] < rank["after"] - rank["baseline"] < rank["packed"] + 60e6
    # Less than the model in bfloat16, which a rank must never hold.
    assert all(rank["bound"] < 2 * one["ranks"][0]["packed"] for rank in two["ranks"])
    halves = [rank["packed"] for rank in two["ranks"]]
    assert sum(halves) == pytest.approx(one["ranks"][0]["packed"], rel=0.01)


def test_a_large_weight_is_quantized_in_blocks(tmp_path: Path) -> None:
    """The head here has as many weights as three layers; float32 copies of it would be past the bound."""
    [record] = load("small", "--tp", "1", "--quantize-lm-head", result=tmp_path / "results.jsonl")
    [rank] = record["ranks"]
    # Nor is what its blocks freed still held afterwards, though it is the last weight.
    assert rank["after"] - rank["baseline"] < rank["packed"] + 60e6


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8wo", "int4wo-128", "8da4w-128", "fp8wo", "none"])
def test_a_billion_weights(tmp_path: Path, recipe: str) -> None:
    records = load("1b", "--tp", "1", "2", "--torchao-config", recipe, result=tmp_path / "results.jsonl")
    assert [record["tp"] for record in records] == [1, 2]
