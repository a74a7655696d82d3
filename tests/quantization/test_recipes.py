"""Names of recipes, maps from module-name patterns to recipes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchao.core.config import AOBaseConfig

from tpllama.config import UserError
from tpllama.quantization.recipes import RECIPES, RecipeMap

NAMES = [
    "none", "int8wo", "int8dq", "int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256",
    "8da4w-32", "8da4w-64", "8da4w-128", "fp8wo", "fp8dq-per_row", "fp8dq-per_tensor",
]  # fmt: skip
ON_CPU = [name for name in NAMES if not name.startswith("fp8dq")]
MODULES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.10.mlp.up_proj",
    "lm_head",
]
WriteMap = Callable[[Any], str]


@pytest.fixture
def write_map(tmp_path: Path) -> WriteMap:
    """Writes a map, as an object or as raw text; the value for --torchao-config."""

    def write(rules: Any) -> str:
        path = tmp_path / "map.json"
        path.write_text(rules if isinstance(rules, str) else json.dumps(rules))
        return f"@{path}"

    return write


def recipes_of(config: str, quantize_lm_head: bool = False) -> list[str]:
    """Names of the recipes for MODULES."""
    recipes = RecipeMap.parse(config, quantize_lm_head)
    return [recipe.name if recipe else "none" for recipe in map(recipes.recipe_for, MODULES)]


def test_the_names_are_those_of_the_contract() -> None:
    assert list(RECIPES) == NAMES
    assert all(recipe is None or recipe.name == name for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_every_recipe_has_a_torchao_config(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe is not None
    assert isinstance(recipe.config(), AOBaseConfig)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_name_holds_for_every_layer_but_the_head(name: str) -> None:
    assert recipes_of(name) == [name] * 4 + ["none"]
    assert recipes_of(name, quantize_lm_head=True) == [name] * 5


@pytest.mark.parametrize(
    "name",
    ["", "int8", "int8wo ", "INT8WO", "my-int8wo", "int8wo-32", "int4wo", "int4wo-16", "int4wo-032", "8da4w-256"],
)
def test_names_match_exactly_or_are_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UserError) as refused:
        RecipeMap.parse(name)
    assert str(refused.value) == f"found torchao config {name!r}, expected one of {', '.join(NAMES)}, or @file.json"


@pytest.mark.parametrize("name", ["fp8dq-per_row", "fp8dq-per_tensor"])
def test_what_the_device_cannot_run_is_refused_with_the_reason_and_the_choices(write_map: WriteMap, name: str) -> None:
    expected = (
        f"found torchao config {name!r} on cpu, expected a GPU of compute capability 8.9, "
        f"choose one of {', '.join(ON_CPU)}"
    )
    for config in (name, write_map({"*.mlp.*": "int8wo", "*": name})):
        with pytest.raises(UserError) as refused:
            RecipeMap.parse(config).check_device("cpu")
        assert str(refused.value) == expected
        RecipeMap.parse(config).check_device("cuda")


@pytest.mark.parametrize("name", ON_CPU)
def test_every_device_runs_the_others(name: str) -> None:
    RecipeMap.parse(name).check_device("cpu")
    RecipeMap.parse(name).check_device("cuda")


def test_the_first_pattern_that_matches_decides(write_map: WriteMap) -> None:
    rules = {"*.layers.1.*": "int4wo-32", "*.mlp.*": "int8wo", "*.up_proj": "fp8wo", "*": "none"}
    assert recipes_of(write_map(rules)) == ["none", "int8wo", "int4wo-32", "int8wo", "none"]


def test_a_layer_that_no_pattern_matches_is_left_alone(write_map: WriteMap) -> None:
    assert recipes_of(write_map({"*.mlp.*": "int8wo"})) == ["none", "int8wo", "int8wo", "int8wo", "none"]


@pytest.mark.parametrize(
    ("rules", "asked", "head"),
    [
        ({"lm_head": "int8wo", "*": "none"}, False, "int8wo"),
        ({"*": "int8wo"}, False, "none"),
        ({"*": "int8wo"}, True, "int8wo"),
        ({"lm_*": "int8wo", "*": "fp8wo"}, False, "none"),
        ({"lm_head": "none", "*": "int8wo"}, True, "none"),
        ({"*.mlp.*": "int8wo"}, True, "none"),
    ],
)
def test_the_head_takes_part_where_it_is_named_or_asked_for(
    write_map: WriteMap, rules: dict[str, str], asked: bool, head: str
) -> None:
    assert recipes_of(write_map(rules), asked)[-1] == head


def test_a_pattern_that_matches_nothing_is_an_error(write_map: WriteMap) -> None:
    recipes = RecipeMap.parse(write_map({"*.mpl.*": "int8wo", "*": "none"}))
    with pytest.raises(
        UserError, match=r"found pattern '\*\.mpl\.\*' in @.*map\.json, which matches no layer"
    ) as error:
        recipes.check_patterns(MODULES)
    assert MODULES[0] in str(error.value)
    RecipeMap.parse(write_map({"*.mlp.*": "int8wo", "lm_head": "none"})).check_patterns(MODULES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "found invalid JSON in .*map.json"),
        ("", "found invalid JSON in .*map.json"),
        ('{"*": "int8wo", "*": "fp8wo"}', "found invalid JSON in .*map.json: a pattern stands there twice"),
        ("[" * 100_000, "found invalid JSON in .*map.json"),
        ("[]", "found .*map.json without rules, expected a JSON object of module-name pattern: recipe name"),
        ("{}", "without rules"),
        ('{"*": 8}', "without rules"),
        ('{"*": null}', "without rules"),
        ('{"*": "int8"}', "found torchao config 'int8', expected one of none, int8wo"),
        ('{"*": "@map.json"}', "found torchao config '@map.json', expected one of"),
    ],
)
def test_a_bad_map_is_an_error(write_map: WriteMap, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RecipeMap.parse(write_map(text))


def test_a_missing_map_is_an_error_with_its_path(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match=f"found no readable recipe map {path} .*, check the path after @"):
            RecipeMap.parse(f"@{path}")
