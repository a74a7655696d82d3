"""What becomes of each linear layer under a recipe, and why: decided from shapes, before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpllama.config import UserError
from tpllama.quantization.recipes import HEAD, Family, Recipe, RecipeMap

_NO_RECIPE = "recipe none"
_AS_STORED = "as stored"


@dataclass(frozen=True)
class Decision:
    """A layer's fate. `recipe` is what will be applied, None to keep the weight; `reason` says why it is so."""

    recipe: Recipe | None
    reason: str
    regrouped: bool = False
    refused: bool = False

    @property
    def action(self) -> str:
        return "kept" if self.recipe is None else "quantized"


def decide(shapes: Mapping[str, tuple[int, int]], recipes: RecipeMap, strict: bool) -> dict[str, Decision]:
    """A decision per linear module, from its global (out_features, in_features).

    Raises UserError: a pattern without a layer; a recipe that quantizes nothing; with `strict`, a layer that
    can't be quantized as asked.
    """
    recipes.check_patterns(shapes)
    decisions = {name: _decide(name, shape, recipes) for name, shape in shapes.items()}
    for name, decision in decisions.items():
        if strict and (decision.regrouped or decision.refused):
            raise UserError(
                f"found layer {name} that can't be quantized as asked: {decision.reason}, expected it to fit under "
                f"--strict, choose a recipe that fits it in a map (@file.json) or drop --strict"
            )
    asked = any(recipe is not None for _, recipe in recipes.rules)
    if asked and not any(decision.recipe for decision in decisions.values()):
        reason = next((each.reason for each in decisions.values() if each.reason != _NO_RECIPE), _NO_RECIPE)
        raise UserError(
            f"found no layer that {recipes.name} can quantize ({reason}), expected at least one, choose another recipe "
            f"or none"
        )
    return decisions


def decide_stored(
    shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, Recipe], asked: RecipeMap, strict: bool
) -> tuple[RecipeMap, dict[str, Decision]]:
    """What the files themselves decide, for a checkpoint with quantized linear modules, and the map that says so.

    Raises UserError for a quantized module that is no linear one, and where `asked` wants something else.
    """
    for name in stored:
        if name not in shapes:
            raise UserError(
                f"found {name} stored quantized, expected only linear layers to be, quantize the original again"
            )
    names = sorted({recipe.name for recipe in stored.values()})
    if any(recipe is not None for _, recipe in asked.rules):
        wanted = {name: decision.recipe for name, decision in decide(shapes, asked, strict).items()}
        different = [name for name in shapes if wanted[name] != stored.get(name)]
        if different:
            is_now = recipe.name if (recipe := stored.get(different[0])) else "unquantized"
            raise UserError(
                f"found {different[0]} stored as {is_now}, expected what --torchao-config {asked.name} makes of it, "
                f"leave --torchao-config out or give the original model"
            )
    decisions = {
        name: Decision(stored[name], _AS_STORED) if name in stored else Decision(None, "stored unquantized")
        for name in shapes
    }
    rules = tuple((name, stored.get(name)) for name in shapes)
    return RecipeMap(", ".join(names), rules, quantize_lm_head=HEAD in stored), decisions


def _decide(name: str, shape: tuple[int, int], recipes: RecipeMap) -> Decision:
    recipe = recipes.recipe_for(name)
    if recipe is None:
        if name == HEAD and replace(recipes, quantize_lm_head=True).recipe_for(HEAD) is not None:
            return Decision(None, "the output head is quantized only with --quantize-lm-head or by name")
        return Decision(None, _NO_RECIPE)
    if any(size % recipe.family.multiple_of for size in shape):
        return Decision(
            None, f"{recipe.name} needs sizes that are multiples of {recipe.family.multiple_of}", refused=True
        )
    if recipe.family.extent != "group":
        return Decision(recipe, "as asked")
    return _fit_group(recipe, shape[1])


def _fit_group(recipe: Recipe, in_features: int) -> Decision:
    family: Family = recipe.family
    fitting = [size for size in family.group_sizes if size <= recipe.group_size and in_features % size == 0]
    if not fitting:
        smallest = family.group_sizes[0]
        return Decision(
            None, f"in_features {in_features} is not a multiple of any group size from {smallest}", refused=True
        )
    largest = max(fitting)
    if largest == recipe.group_size:
        return Decision(recipe, "as asked")
    reason = f"in_features {in_features} is not a multiple of {recipe.group_size}, group size {largest} is used"
    return Decision(Recipe(family, largest), reason, regrouped=True)


def summarize(decisions: Mapping[str, Decision]) -> list[str]:
    """Lines for people: how many layers are quantized or were so already, and deviations from what was asked."""
    quantized = Counter(decision.recipe.name for decision in decisions.values() if decision.recipe)
    if not quantized:
        return []
    kept = sum(decision.recipe is None for decision in decisions.values())
    is_stored = any(decision.reason == _AS_STORED for decision in decisions.values())
    verb, link = ("read", "as") if is_stored else ("quantized", "to")
    counts = ", ".join(f"{count} linear layers {link} {name}" for name, count in quantized.items())
    lines = [f"{verb} {counts}; kept {kept}"]
    deviations: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        if decision.regrouped or decision.refused:
            deviations.setdefault(f"{'regrouped' if decision.regrouped else 'kept'}: {decision.reason}", []).append(
                name
            )
    lines += [f"{reason} ({len(names)} layers, first {names[0]})" for reason, names in deviations.items()]
    return lines
