"""The table of quantization recipes, and the choice of one per layer.

A recipe is a torchao config with a name. Adding one means adding a row to `FAMILIES`.
torchao is imported only when a config is made, so that plans and errors come without waiting for it.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpllama.config import UserError

HEAD = "lm_head"
Extent = Literal["row", "group", "tensor"]
Kind = Literal["int8", "int4", "float8"]


def _int8wo(group_size: int) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def _int8dq(group_size: int) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)


def _int4wo(group_size: int) -> Any:
    from tpllama.quantization.int4 import Int4PlainConfig

    return Int4PlainConfig(group_size)


def _int4wo_of_torchao(group_size: int) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)


def _8da4w(group_size: int) -> Any:
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(group_size))  # type: ignore[attr-defined]


def _fp8wo(group_size: int) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig(set_inductor_config=False)


def _fp8dq_per_row(group_size: int) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)


def _fp8dq_per_tensor(group_size: int) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerTensor

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor(), set_inductor_config=False)


@dataclass(frozen=True)
class Family:
    """Recipes that differ in group size only.

    extent: the part of a weight that shares one scale. group_sizes: those the user may ask for, none for
    other extents. dynamic: activations are quantized too, per token, as they come. kind: what a weight becomes.
    devices: where it can run, a GPU from compute capability `capability` on; multiple_of: of what sizes must be one.
    saved_config: torchao's own config for a checkpoint's config.json, where ours isn't one of torchao's.
    """

    name: str
    config: Callable[[int], Any]
    extent: Extent
    dynamic: bool
    kind: Kind
    group_sizes: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    capability: tuple[int, int] = (0, 0)
    multiple_of: int = 1
    saved_config: Callable[[int], Any] | None = None


FAMILIES: tuple[Family, ...] = (
    Family("int8wo", _int8wo, "row", False, "int8"),
    Family("int8dq", _int8dq, "row", True, "int8"),
    Family("int4wo", _int4wo, "group", False, "int4", (32, 64, 128, 256), saved_config=_int4wo_of_torchao),
    Family("8da4w", _8da4w, "group", True, "int4", (32, 64, 128)),
    Family("fp8wo", _fp8wo, "row", False, "float8"),
    Family("fp8dq-per_row", _fp8dq_per_row, "row", True, "float8", (), ("cuda",), (8, 9), 16),
    Family("fp8dq-per_tensor", _fp8dq_per_tensor, "tensor", True, "float8", (), ("cuda",), (8, 9), 16),
)


@dataclass(frozen=True)
class Recipe:
    """A family at one group size (0 where the family has no groups)."""

    family: Family
    group_size: int = 0

    @property
    def name(self) -> str:
        return f"{self.family.name}-{self.group_size}" if self.group_size else self.family.name

    def config(self) -> Any:
        """The torchao config."""
        return self.family.config(self.group_size)

    def saved_config(self) -> Any:
        """The torchao config that a saved checkpoint names."""
        return (self.family.saved_config or self.family.config)(self.group_size)


RECIPES: dict[str, Recipe | None] = {"none": None} | {
    recipe.name: recipe
    for family in FAMILIES
    for recipe in [Recipe(family, size) for size in family.group_sizes or (0,)]
}


@dataclass(frozen=True)
class RecipeMap:
    """Patterns of module names, each with a recipe; the first that matches a module decides."""

    name: str
    rules: tuple[tuple[str, Recipe | None], ...]
    quantize_lm_head: bool = False

    @staticmethod
    def parse(text: str, quantize_lm_head: bool = False) -> RecipeMap:
        """Reads `--torchao-config`: a recipe's name or `@file.json`. Raises UserError."""
        named = _read_map(Path(text[1:])) if text.startswith("@") else {"*": text}
        rules = tuple((pattern, _recipe(name)) for pattern, name in named.items())
        if quantize_lm_head and not any(recipe for _, recipe in rules):
            raise UserError(
                "found --quantize-lm-head with torchao config none, expected a recipe, choose one or drop it"
            )
        return RecipeMap(text, rules, quantize_lm_head)

    def check_device(self, device: str, capability: tuple[int, int] | None = None) -> None:
        """Raises UserError for a recipe that `device`, a GPU of a compute capability if that is known, can't run."""
        for _, recipe in self.rules:
            if recipe is None or _runs(recipe, device, capability):
                continue
            found = device if device != "cuda" or capability is None else f"a GPU of {'{}.{}'.format(*capability)}"
            needed = "{}.{}".format(*recipe.family.capability)
            runnable = [name for name, each in RECIPES.items() if each is None or _runs(each, device, capability)]
            raise UserError(
                f"found torchao config {recipe.name!r} on {found}, expected a GPU of compute capability {needed}, "
                f"choose one of {', '.join(runnable)}"
            )

    def recipe_for(self, module: str) -> Recipe | None:
        """The recipe asked for module `module`. The output head takes part only where it is named or asked for."""
        for pattern, recipe in self.rules:
            if not fnmatch.fnmatchcase(module, pattern):
                continue
            if module == HEAD and not (self.quantize_lm_head or pattern == HEAD):
                return None
            return recipe
        return None

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raises UserError for a pattern that matches none of `modules`."""
        modules = list(modules)
        for pattern, _ in self.rules:
            if not any(fnmatch.fnmatchcase(module, pattern) for module in modules):
                raise UserError(
                    f"found pattern {pattern!r} in {self.name}, which matches no layer, expected one like "
                    f"{modules[0]!r}, correct or remove it"
                )


def _recipe(name: str) -> Recipe | None:
    if name not in RECIPES:
        raise UserError(f"found torchao config {name!r}, expected one of {', '.join(RECIPES)}, or @file.json")
    return RECIPES[name]


def _runs(recipe: Recipe, device: str, capability: tuple[int, int] | None) -> bool:
    is_able = device != "cuda" or capability is None or capability >= recipe.family.capability
    return device in recipe.family.devices and is_able


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON would keep the last of equal keys, where the first match wins."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a pattern stands there twice")
    return dict(pairs)


def _read_map(path: Path) -> dict[str, str]:
    try:
        rules = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError(
            f"found no readable recipe map {path} ({error.strerror}), expected a JSON file, check the path after @"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"found invalid JSON in {path}: {error}, expected an object of pattern: recipe") from None
    if not isinstance(rules, dict) or not rules or not all(isinstance(value, str) for value in rules.values()):
        raise UserError(f"found {path} without rules, expected a JSON object of module-name pattern: recipe name")
    return rules
