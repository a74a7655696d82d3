"""Plan x recipe x ranks: the acceptance test of tensor parallelism and quantization together.

Every model is built under every recipe on 1, 2, 3 and 4 ranks, by one launch of real processes per degree
(matrix_worker.py), and what the ranks saved is compared here:

- the integers, scales and zero points of each rank are those of one rank, sliced, bit for bit;
- the logits differ from one rank's by rounding alone: the order in which summands of a row-split layer are added;
- one rank's logits are those of transformers' model, quantized by torchao in the usual way;
- a checkpoint that `tpllama quantize` wrote has, at every degree, the weights that the original has after loading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_worker import launch
from torch import Tensor, nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import quantize_
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
)
from transformers import LlamaForCausalLM

from tpllama.blueprint import Blueprint
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig
from tpllama.export import export
from tpllama.llama_config import LlamaConfig
from tpllama.parallel.plan import Split, llama_plan, style_of
from tpllama.quantization.recipes import RECIPES, Recipe
from tpllama.start import draw_blueprint

ROOT = Path(__file__).parents[1]
SMOLLM2: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
# Biases; in_features 112 fits no group, 192 and 320 fit 64 but not 128; ranks cut through groups of 64 (2 ranks)
# and of 32 (3 and 4 ranks) in attention and MLP.
ODD: dict[str, Any] = {
    "hidden_size": 112,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
}
MODELS = {"smollm2": SMOLLM2, "odd": ODD}
MAP = {"*.self_attn.*": "int8dq", "model.layers.0.mlp.*": "int4wo-32", "lm_head": "int8wo", "*": "fp8wo"}
# Name: (--torchao-config, --quantize-lm-head). "map" is MAP, as a file.
CPU_RECIPES = [name for name, recipe in RECIPES.items() if recipe is None or "cpu" in recipe.family.devices]
CASES = {name: (name, False) for name in [*CPU_RECIPES, "map"]} | {
    f"{name}+head": (name, True) for name in ("int8wo", "int4wo-32", "8da4w-32")
}
DYNAMIC = [name for name in CASES if name.startswith(("int8dq", "8da4w", "map"))]
DEGREES = (2, 3, pytest.param(4, marks=pytest.mark.slow))
# A batch of two texts; and 24 texts of one token, no two of which can spoil each other.
# What `tpllama quantize` writes.
SAVED = ", saved"
SAVED_CASES = [f"{case}{SAVED}" for case in CASES if case != "none"]
BATCHES = [
    [[1 + (7 * place + 13 * text) % 200 for place in range(8)] for text in range(2)],
    [[8 * i] for i in range(24)],
]

# RMS of a recipe's TP noise in bfloat16 logits, in multiples of that of `none`, which is 0.9 to 1.3 % of the logits.
# Measured: static 0.97 to 1.24, dynamic 1.2 (the map, dynamic in part) to 3.1. Dynamic recipes round activations to
# 8 bits: a difference in the last bit of bfloat16 becomes a step of 1/256.
BF16_NOISE = {"static": 2.0, "dynamic": 4.5}
# Relative RMS in float32 logits. Measured: at most 1.9e-6.
FLOAT32_NOISE = 1e-5
# Where a float32 activation lies at the border of two integers, rounding decides which: a whole step, of which there
# are 256. Measured: at most 2.5e-2 of a token's logits; 58 to 100 % of single tokens have no such activation. (int8dq
# has most: torchao maps the largest value of a token, if it is negative, to exactly -127.5.)
FLIPPED_NOISE = 5e-2
UNFLIPPED_TOKENS = 0.25


class Matrix:
    """Builds all cases at a degree when one is first asked for."""

    def __init__(self, folder: Path, checkpoints: dict[str, Path]) -> None:
        self.folder = folder
        self.checkpoints = checkpoints
        (folder / "map.json").write_text(json.dumps(MAP))
        self.done: set[int] = set()

    def engine(self, model: str, case: str, dtype: str, tp: int = 1) -> EngineConfig:
        """The engine for a case; a case that ends with SAVED loads what was quantized and written before."""
        if case.endswith(SAVED):
            return EngineConfig(
                str(self.saved(model, case.removesuffix(SAVED), dtype)), tp=tp, dtype=dtype, device="cpu"
            )
        name, quantize_lm_head = CASES[case]
        name = f"@{self.folder / 'map.json'}" if name == "map" else name
        return EngineConfig(
            str(self.checkpoints[model]), tp=tp, torchao_config=name, quantize_lm_head=quantize_lm_head, dtype=dtype,
            device="cpu",
        )  # fmt: skip

    def saved(self, model: str, case: str, dtype: str) -> Path:
        path = self.folder / f"{model}.{case}.{dtype}.saved"
        if not path.exists():
            export(self.blueprint(model, case, dtype), open_checkpoint(str(self.checkpoints[model])), path)
        return path

    def blueprint(self, model: str, case: str, dtype: str, tp: int = 1) -> Blueprint:
        engine = self.engine(model, case, dtype, tp)
        return draw_blueprint(engine, open_checkpoint(engine.model))

    def result(self, model: str, case: str, dtype: str, tp: int, rank: int = 0) -> dict[str, Any]:
        if tp not in self.done:
            self._launch(tp)
            self.done.add(tp)
        return torch.load(self.folder / f"{model}.{case}.{dtype}.tp{tp}.rank{rank}.pt", mmap=True)

    def logits(self, model: str, case: str, dtype: str, tp: int) -> list[Tensor]:
        return [logits.double() for logits in self.result(model, case, dtype, tp)["logits"]]

    def _launch(self, tp: int) -> None:
        fields = ("model", "torchao_config", "quantize_lm_head", "dtype")
        cases = []
        for model in MODELS:
            for dtype in ("bfloat16", "float32"):
                saved = SAVED_CASES if dtype == "bfloat16" else []
                for case in [*CASES, *saved]:
                    engine = self.engine(model, case, dtype)
                    wanted = {field: getattr(engine, field) for field in fields}
                    keeps_weights = dtype == "bfloat16" or model == "odd"
                    cases.append({"key": f"{model}.{case}.{dtype}", "engine": wanted, "keeps_weights": keeps_weights})
        launch(self.folder, tp, {"batches": BATCHES, "cases": cases}, timeout_s=300)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    yield Matrix(folder, {name: make_checkpoint(**fields) for name, fields in MODELS.items()})
    shutil.rmtree(folder)  # pytest would keep half a gigabyte of three runs each


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def rms(x: Tensor) -> float:
    return x.pow(2).mean().sqrt().item()


def per_token(x: Tensor, reference: Tensor) -> Tensor:
    """The relative error of each token's logits."""
    return ((x - reference).norm(dim=-1) / reference.norm(dim=-1)).flatten()


def assert_equal_but_for_flips(logits: Tensor, reference: Tensor) -> None:
    errors = per_token(logits, reference)
    assert (errors < FLOAT32_NOISE).double().mean() >= UNFLIPPED_TOKENS
    assert errors.max() < FLIPPED_NOISE


def owned_part(whole: Tensor, columns: int, local_columns: int, groups: int, style: Split, rank: int) -> Tensor:
    """What of a part of the whole weight (one value per column, group of columns or row) a rank must have.

    columns, local_columns: the weight's, whole and on the rank; groups: into how many the rank divides its own.
    """
    start, stop = style.ranges[rank]
    if style.dim == 0:
        return whole[start:stop]
    borders = start + torch.arange(groups + 1) * (local_columns // groups)
    first, last = (each // (columns // whole.shape[1]) for each in (borders[:-1], borders[1:] - 1))
    assert torch.equal(first, last), "a group of the rank's lies in two of the whole's"
    return whole[:, first]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize(("model", "dtype"), [("smollm2", "bfloat16"), ("odd", "bfloat16"), ("odd", "float32")])
def test_each_ranks_weights_are_one_ranks_sliced(matrix: Matrix, model: str, dtype: str, tp: int, case: str) -> None:
    whole = matrix.result(model, case, dtype, 1)["weights"]
    plan = matrix.blueprint(model, case, dtype, tp).plan
    for rank in range(tp):
        for name, parts in matrix.result(model, case, dtype, tp, rank)["weights"].items():
            style, of_one = style_of(plan, name), whole[name]
            assert style is not None
            assert parts.keys() == of_one.keys()
            sizes = of_one["qdata"].shape[1], parts["qdata"].shape[1]
            for kind, part in parts.items():
                expected = owned_part(of_one[kind], *sizes, part.shape[1], style, rank)
                assert torch.equal(bits(part), bits(expected)), (name, kind, rank)


@pytest.mark.parametrize("case", SAVED_CASES)
@pytest.mark.parametrize("tp", [1, *DEGREES])
@pytest.mark.parametrize("model", MODELS)
def test_a_saved_checkpoint_is_what_was_quantized_here(matrix: Matrix, model: str, tp: int, case: str) -> None:
    for rank in range(tp):
        saved = matrix.result(model, case, "bfloat16", tp, rank)
        quantized = matrix.result(model, case.removesuffix(SAVED), "bfloat16", tp, rank)
        assert saved["weights"].keys() == quantized["weights"].keys()
        for name, parts in saved["weights"].items():
            assert parts.keys() == quantized["weights"][name].keys()
            for kind, part in parts.items():
                assert torch.equal(bits(part), bits(quantized["weights"][name][kind])), (name, kind, rank)
        for ours, theirs in zip(saved["logits"], quantized["logits"], strict=True):
            assert torch.equal(ours, theirs)


def test_the_odd_model_regroups_keeps_and_cuts_through_groups(matrix: Matrix) -> None:
    decisions = matrix.blueprint("odd", "int4wo-128", "bfloat16").decisions
    assert decisions["model.layers.0.self_attn.o_proj"].regrouped
    assert decisions["model.layers.0.self_attn.q_proj"].refused
    whole = matrix.result("odd", "int4wo-64", "bfloat16", 1)["weights"]
    for tp, smaller in ((2, 32), (3, 16), (4, 16)):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            parts = [matrix.result("odd", "int4wo-64", "bfloat16", tp, rank)["weights"] for rank in range(tp)]
            parts = [part[f"model.layers.1.{name}"] for part in parts]
            sizes = {part["qdata"].shape[1] // part["scale"].shape[1] for part in parts}
            one = whole[f"model.layers.1.{name}"]
            assert one["qdata"].shape[1] // one["scale"].shape[1] == 64
            assert min(sizes) <= smaller


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_logits_differ_by_reduction_noise(matrix: Matrix, model: str, tp: int, case: str) -> None:
    def noise(case: str) -> float:
        return rms(matrix.logits(model, case, "bfloat16", tp)[0] - matrix.logits(model, case, "bfloat16", 1)[0])

    limit = BF16_NOISE["dynamic" if case in DYNAMIC else "static"]
    assert noise("none") < 0.03 * rms(matrix.logits(model, "none", "bfloat16", 1)[0])
    assert noise(case) < limit * noise("none")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("model", MODELS)
def test_float32_logits_equal_one_ranks(matrix: Matrix, model: str, tp: int, case: str) -> None:
    texts, tokens = matrix.logits(model, case, "float32", tp)
    one_texts, one_tokens = matrix.logits(model, case, "float32", 1)
    if case in DYNAMIC:
        assert_equal_but_for_flips(tokens, one_tokens)
        assert rms(texts - one_texts) < FLIPPED_NOISE * rms(one_texts)
    else:
        assert rms(texts - one_texts) < FLOAT32_NOISE * rms(one_texts)
        assert rms(tokens - one_tokens) < FLOAT32_NOISE * rms(one_tokens)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [1, *DEGREES])
@pytest.mark.parametrize(("model", "dtype"), [(model, dtype) for model in MODELS for dtype in ("bfloat16", "float32")])
def test_planned_bytes_are_the_loaded_ones(matrix: Matrix, model: str, dtype: str, tp: int, case: str) -> None:
    for rank in range(tp):
        result = matrix.result(model, case, dtype, tp, rank)
        assert result["planned_bytes"] == result["bytes"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_one_rank_equals_transformers_quantized_by_torchao(matrix: Matrix, model: str, case: str) -> None:
    reference = LlamaForCausalLM.from_pretrained(matrix.checkpoints[model], dtype=torch.float32).eval()
    for name, decision in matrix.blueprint(model, case, "float32").decisions.items():
        if decision.recipe is not None:
            quantize_as_torchao(reference.get_submodule(name), decision.recipe)
    for batch, logits in zip(BATCHES, matrix.logits(model, case, "float32", 1), strict=True):
        expected = reference(torch.tensor(batch)).logits.double()
        if case.startswith("8da4w"):  # torchao multiplies by the dequantized weight, we by its integers
            assert rms(logits - expected) < FLIPPED_NOISE * rms(expected)
            if len(batch) > 2:
                assert_equal_but_for_flips(logits, expected)
        else:
            assert rms(logits - expected) < FLOAT32_NOISE * rms(expected)


def quantize_as_torchao(linear: nn.Linear, recipe: Recipe) -> None:
    """Quantizes one of transformers' linears by torchao's own config for the CPU."""
    weight = linear.weight.detach().clone()  # a tied embedding stays as it is
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if recipe.family.name != "int4wo":
        quantize_(linear, recipe.config())
    elif recipe.group_size <= 128 and weight.shape[0] % 16 == 0:
        quantize_(linear, PrototypeInt4WeightOnlyConfig(recipe.group_size))
    else:  # no config for the CPU: by hand
        block, limits = (1, recipe.group_size), (torch.int32, 0, 15)
        scale, zero = _choose_qparams_affine_tinygemm(weight, MappingType.ASYMMETRIC, block, *limits, 1e-6)
        q = _quantize_affine_tinygemm(weight, block, scale, zero, *limits)
        linear.weight = nn.Parameter(_dequantize_affine_tinygemm(q, block, scale, zero, *limits), requires_grad=False)
        return
    assert type(linear.weight) is not nn.Parameter, "torchao left this layer as it was"


def test_the_map_and_the_head_reach_the_layers_they_name(matrix: Matrix) -> None:
    def recipes(case: str) -> dict[str, str]:
        decisions = matrix.blueprint("smollm2", case, "bfloat16").decisions
        return {name: decision.recipe.name if decision.recipe else "none" for name, decision in decisions.items()}

    mapped = recipes("map")
    assert mapped["model.layers.0.self_attn.q_proj"] == mapped["model.layers.1.self_attn.o_proj"] == "int8dq"
    assert mapped["model.layers.0.mlp.up_proj"] == "int4wo-32"
    assert mapped["model.layers.1.mlp.up_proj"] == "fp8wo"
    assert mapped["lm_head"] == "int8wo"
    assert recipes("int8wo")["lm_head"] == "none"
    assert recipes("8da4w-32+head")["lm_head"] == "8da4w-32"
    config = LlamaConfig.from_hf(open_checkpoint(str(matrix.checkpoints["smollm2"])).fields)
    assert llama_plan(config, 4)["lm_head"].ranges[-1][1] == config.vocab_size
