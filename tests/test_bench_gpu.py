"""Without a GPU bench/gpu.sh says so; what it would call is spelled as latency.py takes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = ROOT / "bench/gpu.sh"


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "RESULTS": str(tmp_path / "gpu.jsonl")}
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env=env, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("gpu.sh: found no GPU that torch can use, expected one")
    assert not list(tmp_path.iterdir())


def test_its_measurements_are_ones_that_the_bench_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from latency import parser

    from tpllama.quantization.recipes import RECIPES

    text = SCRIPT.read_text()
    flags = re.search(r"bench/latency.py (.*?)\"\$\{@:3\}\"", text, re.DOTALL)
    assert flags
    words = flags[1].replace("\\\n", " ").replace('"$1"', "8b").replace('"$2"', "int4wo-128").split()
    arguments = parser().parse_args([word.strip('"') for word in words] + ["--compile", "on"])
    assert (arguments.shape, arguments.batch_size, arguments.input_len) == ("8b", [1, 8, 32], [128])
    named = set(re.findall(r"measure \S+ ([a-z]\S+)", text))
    for several in re.findall(r"for recipe in (.*); do", text):
        named |= set(several.split())
    assert {"none", "int8wo", "int4wo-128", "fp8wo", "fp8dq-per_row"} <= named <= set(RECIPES)
