"""bench/latency.py and bench/reference_hf.py run, print what is promised, and tell right from wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[1]
RECORD = {
    *("run_name", "model", "device", "dtype", "tp", "torchao_config", "batch_size", "input_len", "output_len"),
    *("prefill_latency", "prefill_throughput", "median_decode_latency", "p99_decode_latency"),
    *("median_decode_throughput", "total_latency", "overall_throughput", "weight_bytes_per_rank"),
    *("achieved_bandwidth", "bandwidth_fraction", "load_seconds", "peak_memory_bytes_per_rank", "versions"),
    *("date", "cpu"),
}
LINES = (
    r"Prefill\. latency: +[\d.]+ s, throughput: +[\d.]+ token/s",
    r"Decode\.  latency: +[\d.]+ s, throughput: +[\d.]+ token/s",
    r"Decode\.  median latency: +[\d.]+ s, median throughput: +[\d.]+ token/s",
    r"Total\. latency: +[\d.]+ s, throughput: +[\d.]+ token/s",
)


def bench(script: str, *arguments: str, ranks: int = 0, code: int = 0) -> str:
    """What a bench prints, or complains; under torchrun with `ranks`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    program = [*launcher, str(ROOT / "bench" / script)] if ranks else [sys.executable, str(ROOT / "bench" / script)]
    done = subprocess.run(
        [*program, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sweep_under_torchrun(tmp_path: Path) -> None:
    """Recipes one after another, each in a process group of its own; a shape that can't run is told, not fatal."""
    result = tmp_path / "results.jsonl"
    said = bench(
        "latency.py", "--shape", "tiny", "--batch-size", "1", "3", "--input", "8", "9000", "--output", "4",
        "--torchao-config", "none", "int8wo", "--run-name", "sweep", "--result-filename", str(result), ranks=2,
    )  # fmt: skip
    for line in LINES:
        assert len(re.findall(f"^{line}$", said, re.MULTILINE)) == 4, (line, said)
    found = records(result)
    shapes = [(each["torchao_config"], each["batch_size"], each["input_len"]) for each in found]
    assert shapes == [(recipe, b, i) for recipe in ("none", "int8wo") for b in (1, 3) for i in (8, 9000)]
    for each in found:
        if each["input_len"] == 9000:
            assert "9000 + 4 tokens, expected at most 8192" in each["error"]
            continue
        assert set(each) >= RECORD
        assert (each["tp"], each["run_name"], each["model"], each["device"]) == (2, "sweep", "tiny", "cpu")
        assert each["decode_steps"] == 3 * each["repetitions"] == 15
        assert each["p99_decode_latency"] >= each["median_decode_latency"] > 0
        assert each["median_decode_throughput"] == pytest.approx(each["batch_size"] / each["median_decode_latency"])
        assert each["prefill_throughput"] == pytest.approx(each["batch_size"] * 8 / each["prefill_latency"])
        assert each["overall_throughput"] == pytest.approx(each["batch_size"] * 12 / each["total_latency"])
        assert len(each["weight_bytes_per_rank"]) == len(each["peak_memory_bytes_per_rank"]) == 2
        assert 0 < each["achieved_bandwidth"] == pytest.approx(each["bandwidth_fraction"] * each["read_bandwidth"])


def test_a_profile_accounts_for_the_whole_step(tmp_path: Path) -> None:
    said = bench(
        "latency.py", "--shape", "tiny", "--tp", "2", "--batch", "2", "--input", "8", "--output", "4",
        "--torchao-config", "int8dq", "--profile", str(tmp_path), "--repeat", "1",
    )  # fmt: skip
    table = said[said.index("Where a step's time goes") :]
    rows = {line.split()[0]: float(line.split()[3]) for line in table.splitlines()[2:10]}
    assert set(rows) == {"weights", "attention", "collectives", "sampling", "scheduler", "rest", "idle", "whole"}
    assert all(milliseconds > 0 for milliseconds in rows.values())
    assert sum(rows.values()) == pytest.approx(2 * rows["whole"], rel=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"int8dq-tp2-batch2-input8-output4-{stage}.json.gz" for stage in ("decode", "prefill")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "0"], "'0'"),
        (["--torchao-config", "int3"], "int3"),
        (["--against", "hf"], "--against without --correct"),
        (["--correct", "--against-model", "x"], "--against-model without --against"),
        (["--correct", "--prompt-filename", "/nothing"], "/nothing unreadable"),
        (["--result-filename", "/nowhere/F"], "/nowhere/F unwritable"),
        (["--max-batch-size", "0"], "max_batch_size 0"),
    ],
)
def test_bad_flags_are_one_line(arguments: list[str], words: str) -> None:
    said = bench("latency.py", *arguments, code=2)
    assert said.startswith("latency: error: found")
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_dead_rank_is_exit_code_1() -> None:
    command = [sys.executable, str(ROOT / "bench/latency.py"), "--shape", "tiny", "--tp", "2", "--output", "2000"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "loaded in" in process.stdout.readline()
            assert process.stdout.readline().startswith("Batch 1")
            [follower] = [
                child for child in psutil.Process(process.pid).children() if "tpllama.follow" in child.cmdline()
            ]
            follower.kill()
            said = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    assert process.returncode == 1
    assert "rank 1" in said


def test_the_embedded_model_computes_what_transformers_does() -> None:
    said = bench("latency.py", "--correct", "--against", "hf", "--output", "8", "--dtype", "float32", "--tp", "2")
    assert said[said.index("none against hf") :].startswith("none against hf, float32: the same")
    assert "42 of 42 (100.00%)" in said
    assert said.count("prefill logits (first half)") == said.count("prefill logits (final)") == 3
    assert "The capital of France is Paris" in said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in Hugging Face form, without a tokenizer, and prompts of token ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211, hidden_size=96, intermediate_size=224, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, initializer_range=0.1, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("latency")
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("[3, 1, 4, 1, 5, 9]\n[2, 7, 1, 8, 2, 8, 1, 8, 2]\n")
    return folder


FLAGS = ("--correct", "--output", "6")


def test_transformers_answers_are_printed_alike(model: Path) -> None:
    flags = (
        "--model",
        str(model / "model"),
        "--prompt-filename",
        str(model / "prompts.txt"),
        "--output",
        "6",
        "--dtype",
        "float32",
    )
    own, theirs = bench("latency.py", "--correct", *flags, "--tp", "2"), bench("reference_hf.py", *flags)
    numbers = re.compile(r"-?\d+\.\d+")
    assert numbers.sub("#", own) == numbers.sub("#", theirs)
    own_numbers, their_numbers = ([float(each) for each in numbers.findall(said)] for said in (own, theirs))
    assert len(own_numbers) == 2 * 2 * 7
    assert own_numbers == pytest.approx(their_numbers, abs=2e-3)


ALL = ("none", "int8wo", "int4wo-32", "8da4w-32", "fp8wo")


@pytest.mark.parametrize(
    ("against", "recipes"),
    [
        ("hf", ("int4wo-32",)),
        pytest.param("tp1", ("8da4w-32",), marks=pytest.mark.slow),
        pytest.param("hf", ALL, marks=pytest.mark.slow),
        pytest.param("tp1", ALL, marks=pytest.mark.slow),
    ],
)
def test_recipes_are_those_of_torchao_and_of_one_rank(
    model: Path, against: str, recipes: tuple[str, ...], tmp_path: Path
) -> None:
    result = tmp_path / "results.jsonl"
    said = bench(
        "latency.py", *FLAGS, "--model", str(model / "model"), "--prompt-filename", str(model / "prompts.txt"),
        "--dtype", "float32", "--against", against, "--tp", "3", "--result-filename", str(result),
        "--torchao-config", *recipes, "--quantize-lm-head",
    )  # fmt: skip
    found = {each["torchao_config"]: each for each in records(result)}
    assert tuple(found) == recipes, said
    assert all(each["same"] for each in found.values())
    assert all(each["rms"] < 1e-5 for name, each in found.items() if not name.startswith("8da4w"))


@pytest.mark.slow
def test_a_perturbed_weight_is_found(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    changed = model / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((model / "model/config.json").read_bytes())
    weights = load_file(model / "model/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] += 1.0
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    flags = (*FLAGS, "--prompt-filename", str(model / "prompts.txt"), "--dtype", "float32", "--against", "hf")
    own = ("--model", str(changed))
    assert "the same" in bench("latency.py", *flags, *own)
    said = bench("latency.py", *flags, *own, "--against-model", str(model / "model"), code=1)
    assert said.splitlines()[-1] == "latency: error: the answers of none are not those of the reference"
