"""What becomes of each layer, decided from shapes alone, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpllama.config import UserError
from tpllama.quantization.recipes import RecipeMap
from tpllama.quantization.report import Decision, decide, decide_stored, summarize

# SmolLM2's sizes, an input of 96 that takes groups of 32 only, one of 100 that takes none.
SHAPES = {
    "model.layers.0.self_attn.q_proj": (576, 576),
    "model.layers.0.mlp.down_proj": (576, 1536),
    "model.layers.1.mlp.up_proj": (1536, 96),
    "model.layers.1.mlp.down_proj": (100, 100),
    "lm_head": (1000, 576),
}
Q, DOWN, UP, ODD, HEAD = SHAPES


def decided(config: str, head: bool = False, strict: bool = False) -> dict[str, Decision]:
    return decide(SHAPES, RecipeMap.parse(config, head), strict)


def names(decisions: dict[str, Decision]) -> list[str]:
    return [decision.recipe.name if decision.recipe else "none" for decision in decisions.values()]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("none", ["none", "none", "none", "none"]),
        ("int8wo", ["int8wo"] * 4),
        ("fp8wo", ["fp8wo"] * 4),
        ("int4wo-32", ["int4wo-32", "int4wo-32", "int4wo-32", "none"]),
        ("int4wo-64", ["int4wo-64", "int4wo-64", "int4wo-32", "none"]),
        ("int4wo-128", ["int4wo-64", "int4wo-128", "int4wo-32", "none"]),
        ("int4wo-256", ["int4wo-64", "int4wo-256", "int4wo-32", "none"]),
        ("8da4w-128", ["8da4w-64", "8da4w-128", "8da4w-32", "none"]),
    ],
)
def test_groups_are_as_large_as_asked_for_and_as_fits(config: str, expected: list[str]) -> None:
    assert names(decided(config)) == [*expected, "none"]


def test_reasons_are_told() -> None:
    decisions = decided("int4wo-128")
    assert decisions[DOWN] == Decision(decisions[DOWN].recipe, "as asked")
    assert decisions[Q].regrouped
    assert decisions[Q].action == "quantized"
    assert decisions[Q].reason == "in_features 576 is not a multiple of 128, group size 64 is used"
    assert decisions[ODD].refused
    assert decisions[ODD].action == "kept"
    assert decisions[ODD].reason == "in_features 100 is not a multiple of any group size from 32"
    assert decisions[HEAD].reason == "the output head is quantized only with --quantize-lm-head or by name"
    assert not decisions[HEAD].refused
    assert {decision.reason for decision in decided("none").values()} == {"recipe none"}


def test_the_head_takes_part_when_asked_for() -> None:
    assert names(decided("int8wo", head=True)) == ["int8wo"] * 5
    assert decided("int8wo", head=True)[HEAD].reason == "as asked"


def test_sizes_that_a_kernel_cannot_take_are_kept() -> None:
    decisions = decided("fp8dq-per_row")
    assert names(decisions) == ["fp8dq-per_row"] * 3 + ["none", "none"]
    assert decisions[ODD].reason == "fp8dq-per_row needs sizes that are multiples of 16"


@pytest.mark.parametrize(
    ("config", "layer", "reason"),
    [
        ("int4wo-128", Q, "in_features 576 is not a multiple of 128"),
        ("int4wo-32", ODD, "in_features 100 is not a multiple of any group size from 32"),
        ("fp8dq-per_tensor", ODD, "needs sizes that are multiples of 16"),
    ],
)
def test_strict_names_the_layer_the_reason_and_the_remedy(config: str, layer: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"found layer {layer} that can't be quantized as asked: .*{reason}") as error:
        decided(config, strict=True)
    assert "choose a recipe that fits it in a map (@file.json) or drop --strict" in str(error.value)


def test_strict_accepts_what_fits() -> None:
    assert names(decided("int8wo", strict=True)) == ["int8wo"] * 4 + ["none"]
    fitting = {name: SHAPES[name] for name in (Q, DOWN)}
    assert names(decide(fitting, RecipeMap.parse("int4wo-64"), strict=True)) == ["int4wo-64"] * 2


def write_map(path: Path, rules: dict[str, str]) -> str:
    (path / "map.json").write_text(json.dumps(rules))
    return f"@{path / 'map.json'}"


def test_a_map_decides_layer_by_layer(tmp_path: Path) -> None:
    rules = {"*.self_attn.*": "int8dq", "*.1.mlp.up_proj": "int4wo-32", "lm_head": "8da4w-128", "*": "none"}
    decisions = decided(write_map(tmp_path, rules))
    assert names(decisions) == ["int8dq", "none", "int4wo-32", "none", "8da4w-64"]
    assert decisions[DOWN].reason == "recipe none"


@pytest.mark.parametrize(
    ("rules", "head", "reason"),
    [
        ({"*.mlp.*": "int8wo", "*": "none"}, False, "recipe none"),
        ({"*.mlp.*": "int8wo"}, True, "recipe none"),
        ({"*": "int8wo"}, False, "the output head is quantized only with --quantize-lm-head or by name"),
    ],
)
def test_why_the_head_is_kept_is_told_as_it_is(tmp_path: Path, rules: dict[str, str], head: bool, reason: str) -> None:
    assert decided(write_map(tmp_path, rules), head)[HEAD].reason == reason


def test_quantizing_nothing_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no layer that int4wo-32 can quantize \(in_features 100 is not"):
        decide({ODD: (100, 100)}, RecipeMap.parse("int4wo-32"), strict=False)
    only_odd = write_map(tmp_path, {ODD: "int4wo-32"})
    with pytest.raises(UserError, match=r"found no layer that @.* can quantize \(in_features 100 is not"):
        decided(only_odd)
    with pytest.raises(UserError, match=r"found no layer that @.* can quantize \(the output head is quantized only"):
        decided(write_map(tmp_path, {"lm_*": "int8wo"}))
    assert names(decided(write_map(tmp_path, {"*": "none"}))) == ["none"] * 5


def test_a_pattern_without_a_layer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found pattern 'model.layers.7.\*'"):
        decided(write_map(tmp_path, {"model.layers.7.*": "int8wo", "*": "int8wo"}))


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ("none", []),
        ("int8wo", ["quantized 4 linear layers to int8wo; kept 1"]),
        (
            "int4wo-128",
            [
                "quantized 1 linear layers to int4wo-64, 1 linear layers to int4wo-128, 1 linear layers to int4wo-32; "
                "kept 2",
                f"regrouped: in_features 576 is not a multiple of 128, group size 64 is used (1 layers, first {Q})",
                f"regrouped: in_features 96 is not a multiple of 128, group size 32 is used (1 layers, first {UP})",
                f"kept: in_features 100 is not a multiple of any group size from 32 (1 layers, first {ODD})",
            ],
        ),
    ],
)
def test_the_summary_counts_and_groups_deviations(config: str, lines: list[str]) -> None:
    assert summarize(decided(config)) == lines


def test_the_summary_groups_layers_of_one_reason() -> None:
    shapes: dict[str, Any] = {f"model.layers.{layer}.q_proj": (8, 96) for layer in range(12)}
    lines = summarize(decide(shapes, RecipeMap.parse("int4wo-64"), strict=False))
    assert lines[1].endswith("(12 layers, first model.layers.0.q_proj)")
    assert len(lines) == 2


def test_the_summary_says_read_of_what_was_quantized_before() -> None:
    recipe = decided("int8wo")[Q].recipe
    assert recipe is not None
    _, decisions = decide_stored(SHAPES, {Q: recipe, DOWN: recipe}, RecipeMap.parse("none"), strict=False)
    assert summarize(decisions) == ["read 2 linear layers as int8wo; kept 3"]
