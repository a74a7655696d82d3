"""bench/quality.py's figures are what torch's losses make of `LLM.logits`; what can't run is said and passed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from pydoc_data.topics import topics
from runpy import run_path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpllama import LLM
from tpllama.config import UserError

ROOT = Path(__file__).parents[1]
SIZES = ("--tokens", "70", "--texts", "3", "--batch-size", "2")
TEXTS = [list(text.encode()) for text in sorted(topics.values(), key=len, reverse=True)[:3]]
# What was printed; the records by recipe, degree and dtype.
Swept = tuple[str, dict[tuple[str, int, str], dict[str, Any]]]
KINDS = ("kl_mean", "kl_p99", "top1", "max_difference")


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    tiny = run_path(str(ROOT / "bench/shapes.py"))["SHAPES"]["tiny"]
    return make_checkpoint(**tiny, attention_bias=False, mlp_bias=False)


@pytest.fixture(scope="module")
def quality() -> dict[str, Any]:
    """The bench's names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        return run_path(str(ROOT / "bench/quality.py"))


@pytest.fixture(scope="module")
def swept(quality: dict[str, Any], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    result = tmp_path_factory.mktemp("quality") / "results.jsonl"
    recipes = ("int4wo-64+head", "fp8dq-per_row")
    arguments = ("--model", str(model), *SIZES, "--recipes", *recipes, "--tps", "2", "1", "--markdown")
    with redirect_stdout(StringIO()) as out:
        quality["measure_all"](quality["parser"]().parse_args([*arguments, "--result-filename", str(result)]))
    records = [json.loads(line) for line in result.read_text().splitlines()]
    return out.getvalue(), {(record["recipe"], record["tp"], record["dtype"]): record for record in records}


def logits_of(model: Path, recipe: str, tp: int, dtype: str) -> tuple[Tensor, list[int]]:
    config, head = recipe.removesuffix("+head"), recipe.endswith("+head")
    with LLM(str(model), tp, config, quantize_lm_head=head, dtype=dtype) as llm:
        ids = [[byte % 211 for byte in text[:70]] for text in TEXTS]
        return torch.cat([llm.logits(ids[:2]), llm.logits(ids[2:])]), llm.blueprint.bytes_per_rank()


def distance(right: Tensor, own: Tensor) -> dict[str, float]:
    """KINDS, from torch's own divergence."""
    log_p, log_q = (logits.double().flatten(0, 1).log_softmax(-1) for logits in (right, own))
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    ranked = kl.sort().values
    place = 0.99 * (len(kl) - 1)
    low = int(place)
    same = [int(p) == int(q) for p, q in zip(log_p.argmax(-1), log_q.argmax(-1), strict=True)]
    p99 = float(ranked[low] + (place - low) * (ranked[low + 1] - ranked[low]))
    return dict(
        zip(KINDS, (float(kl.mean()), p99, sum(same) / len(same), float((right - own).abs().max())), strict=True)
    )


def test_figures_are_those_of_the_logits(model: Path, swept: Swept) -> None:
    none, _ = logits_of(model, "none", 1, "bfloat16")
    first: dict[str, Tensor] = {"none": none}
    following = torch.tensor([[byte % 211 for byte in text[1:70]] for text in TEXTS])
    perplexities = []
    for case, record in swept[1].items():
        if "reason" in record:
            continue
        own, weight_bytes = logits_of(model, *case)
        perplexities.append(float(F.cross_entropy(own[:, :-1].flatten(0, 1), following.flatten()).exp()))
        assert record["perplexity"] == pytest.approx(perplexities[-1], rel=1e-5)
        assert record["perplexity_ratio"] == pytest.approx(perplexities[-1] / perplexities[0], rel=1e-5)
        assert {name: record[name] for name in KINDS} == pytest.approx(distance(none, own), rel=1e-6, abs=1e-12)
        assert record["weight_bytes_per_rank"] == weight_bytes
        assert record["base_tp"] == 1
        to_base = {name: record[f"base_{name}"] for name in KINDS}
        if case[0] in first and record is not next(iter(swept[1].values())):
            assert to_base == pytest.approx(distance(first[case[0]], own), rel=1e-6, abs=1e-12)
        else:
            first[case[0]] = own
            assert to_base == dict.fromkeys(KINDS)


def test_none_is_itself_and_others_are_not(swept: Swept) -> None:
    records = swept[1]
    none = records["none", 1, "bfloat16"]
    assert next(iter(records.values())) is none
    assert (none["kl_mean"], none["kl_p99"], none["top1"], none["max_difference"]) == (0, 0, 1, 0)
    assert none["perplexity_ratio"] == 1
    exact = records["none", 1, "float32"]
    for tp in (1, 2):
        coarse = records["int4wo-64+head", tp, "bfloat16"]
        assert coarse["kl_mean"] > 10 * exact["kl_mean"] > 0
        # The weights are those of one rank: what is left is rounding.
        if tp == 2:
            assert coarse["base_kl_mean"] < coarse["kl_mean"] / 10


def test_what_cannot_run_is_recorded_with_its_reason(
    swept: Swept,
) -> None:
    out, records = swept
    for tp in (1, 2):
        record = records["fp8dq-per_row", tp, "bfloat16"]
        assert "on cpu, expected a GPU" in record["reason"]
        assert "perplexity" not in record
        assert f"| fp8dq-per_row | {tp} | not measured: found torchao config 'fp8dq-per_row' on cpu" in out
    assert any("group size 32 is used" in note for note in records["int4wo-64+head", 1, "bfloat16"]["notes"])
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + len(records)
    assert all(line.count("|") == rows[0].count("|") for line in rows if "not measured" not in line)
    assert sum("group size 32 is used" in line for line in lines) == 2  # a line for each reason, not for each layer


def test_a_single_text_is_enough(quality: dict[str, Any], model: Path, tmp_path: Path) -> None:
    result = tmp_path / "results.jsonl"
    sizes = ("--tokens", "70", "--texts", "1", "--batch-size", "1", "--tp", "1", "--dtype", "float32")
    arguments = ("--model", str(model), *sizes, "--recipes", "none", "--result-filename", str(result))
    with redirect_stdout(StringIO()):
        quality["measure_all"](quality["parser"]().parse_args(arguments))
    (record,) = map(json.loads, result.read_text().splitlines())
    none, _ = logits_of(model, "none", 1, "float32")
    own = F.cross_entropy(none[0, :-1], torch.tensor([byte % 211 for byte in TEXTS[0][1:70]]))
    assert record["perplexity"] == pytest.approx(float(own.exp()), rel=1e-5)


@pytest.mark.slow
def test_torchruns_ranks_sweep_together(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--model", str(model), *SIZES, "--recipes", "fp8dq-per_row", "int8wo", "--result-filename"]
    done = subprocess.run(
        [*command, str(ROOT / "bench/quality.py"), *arguments, str(result)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in result.read_text().splitlines()]
    seen = [(record["recipe"], record["tp"], "reason" in record) for record in records]
    assert seen == [("none", 2, False)] * 2 + [("fp8dq-per_row", 2, True), ("int8wo", 2, False)]
    assert len(done.stdout.splitlines()) == 1 + len(records)  # the followers say nothing


@pytest.fixture
def parsed(quality: dict[str, Any]) -> Callable[..., Any]:
    """The bench's cases for a command line."""

    def cases(*arguments: str) -> Any:
        given: Namespace = quality["parser"]().parse_args(list(arguments))
        return [(case.recipe, case.tp, case.dtype) for case in quality["cases"](given)]

    return cases


def test_cases(parsed: Callable[..., Any]) -> None:
    assert parsed("--recipes", "int8wo", "--tps", "2", "1", "--quantize-lm-head", "--dtype", "float32") == [
        ("none", 1, "float32"),
        *[(recipe, tp, "float32") for recipe in ("int8wo", "int8wo+head") for tp in (1, 2)],
    ]
    assert {recipe for recipe, _, _ in parsed("--device", "cpu")} > {"none", "int8wo", "8da4w-32"}
    assert not {recipe for recipe, _, _ in parsed("--device", "cpu")} & {"fp8dq-per_row", "none+head"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tps", "1", "3"), "in a torchrun world of 2 ranks"),
        (("--recipes", "int9"), "found torchao config 'int9'"),
        (("--recipes", "none+head"), "found --quantize-lm-head with torchao config none"),
        (("--torchao-config", "int8wo"), "give --recipes instead"),
        (("--batch-size", "0"), "found --batch-size 0, expected at least 1"),
        (("--texts", "0"), "found --texts 0, expected at least 1"),
        (("--tokens", "1"), "found --tokens 1, expected at least 2"),
    ],
)
def test_contradictions_are_one_line(
    parsed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=message) as raised:
        parsed(*arguments)
    assert "\n" not in str(raised.value)
