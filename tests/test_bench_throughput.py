"""bench/throughput.py runs, and what it counts adds up. Nothing about time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TINY = {
    "model_type": "llama", "vocab_size": 211, "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
RATES = {"requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s", "decode_tokens_per_s"}
TIMES = {"seconds", "step_ms", "python_ms", "gap_ms", "broadcast_ms", "broadcast_share"}


def bench(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The bench's records, measured on a config of TINY with random weights."""
    (folder / "config.json").write_text(json.dumps(TINY))
    result = folder / "results.jsonl"
    command = [sys.executable, str(ROOT / "bench/throughput.py"), "--model", str(folder), "--load-format", "dummy"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments, "--result-filename", str(result)],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in result.read_text().splitlines()]
    assert len([line for line in done.stdout.splitlines() if line.strip()[0].isdigit()]) >= len(records)
    return records


def test_a_record_for_each_concurrency(tmp_path: Path) -> None:
    sizes = ("--num-prompts", "4", "--input-len", "20", "--output-len", "6")
    records = bench(tmp_path, *sizes, "--concurrency", "1", "4", "--tp", "2", "--run-name", "tiny")
    assert [record["concurrency"] for record in records] == [1, 4]
    for record in records:
        assert (record["bench"], record["run_name"], record["tp"], record["device"]) == ("throughput", "tiny", 2, "cpu")
        assert {"date", "cpu", "versions", "model", "torchao_config", "load_seconds", "outputs_digest"} <= set(record)
        assert all(record[name] > 0 for name in RATES | TIMES - {"gap_ms"})
        assert len(record["peak_memory_bytes_per_rank"]) == 2
        # Every prompt is computed once, every text has its full length, and each token but a first one takes a decode.
        assert record["prompt_tokens"] == record["computed_prompt_tokens"] == 4 * 20
        assert record["completion_tokens"] == 4 * 6
        assert record["total_tokens_per_s"] == pytest.approx(
            record["input_tokens_per_s"] + record["output_tokens_per_s"], rel=1e-3
        )
        assert (record["found_prompt_tokens"], record["preempted"]) == (0, 0)
    one, four = records
    assert one["decode_steps"] == 4 * 5
    assert four["decode_steps"] == 5


def test_a_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    sizes = ("--num-prompts", "3", "--input-len", "5", "--output-len", "4", "--shared-prefix", "64")
    without, cached = bench(tmp_path, *sizes, "--dtype", "float32", "--max-batch-tokens", "64")
    assert (without["prefix_caching"], cached["prefix_caching"]) == (False, True)
    assert without["computed_prompt_tokens"] == without["prompt_tokens"] == 3 * (64 + 5)
    assert cached["computed_prompt_tokens"] == 64 + 3 * 5
    assert cached["found_prompt_tokens"] == 2 * 64
    assert cached["same_outputs"] == 3
    assert without["outputs_digest"] == cached["outputs_digest"]
