"""What each recipe costs in quality, at each TP degree: against the weights as they are, and against fewer ranks.

    python bench/quality.py [--model M | --shape tiny] [--recipes R ..] [--quantize-lm-head] [--tps 1 2 3]
        [--tokens 512] [--texts 4] [--batch-size 2] [--markdown] [--run-name S] [--result-filename F]
        and the flags of `tpllama generate` for model, ranks, weights and cache

Texts are the first --tokens tokens of chapters of Python's documentation (texts.py), --batch-size of them at once.
Each measurement is an LLM of its own, one after the other, `none` at the lowest degree first: what all are compared
with. `none` in float32 follows: its distance is what bfloat16's rounding alone does. R+head is R with the output head
quantized too; --quantize-lm-head adds it for each R. What can't be measured is a line with its reason. Under torchrun
the degree is its world's. All figures are of whole distributions, computed in float64 from `LLM.logits`:

    MiB            of packed weights, on the rank that has most
    perplexity     exp of the mean negative log-probability of the texts' own tokens, but for each text's first
    ratio          of it to none's
    KL, p99        Kullback-Leibler divergence KL(none || recipe) = sum over tokens t of p(t) (ln p(t) - ln q(t)), p of
                   none, q of the recipe, in nats a token: mean and 99th percentile over all places
    top-1          share of places at which the likeliest token (of several alike the one of lowest id) is none's
    to TP 1        the same against the first measurement of this recipe, at the lowest degree: the largest absolute
                   difference of two logits, the mean of KL(TP 1 || TP N), and top-1. The quantized weights are the
                   same there, so this is the rounding of sums; compare it with none's own lines. Recipes that round
                   activations amplify it, whatever its size, to about their own distance from none
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from command import model_name, open_model, parser_for, run
from distributions import Distance, Kept, logits_of, losses
from record import append, surroundings
from texts import windows

from tpllama import LLM
from tpllama.config import UserError
from tpllama.parallel.place import resolve_tp, torchrun_place
from tpllama.quantization.recipes import RECIPES, RecipeMap
from tpllama.quantization.report import summarize

if TYPE_CHECKING:
    from tpllama.cli import Parser

_HEAD = "+head"
_WIDTHS = (20, 3, 7, 11, 7, 9, 9, 8, 9, 9, 8)


@dataclass(frozen=True)
class Case:
    """One measurement. recipe: with "+head" where the output head is quantized too."""

    recipe: str
    tp: int
    dtype: str

    @property
    def torchao_config(self) -> str:
        return self.recipe.removesuffix(_HEAD)

    @property
    def is_with_head(self) -> bool:
        return self.recipe.endswith(_HEAD)


class Sweep:
    """Measures case after case, the first of which is none, remembering what later ones are compared with."""

    def __init__(self, arguments: argparse.Namespace, first: Case, folder: Path) -> None:
        self._arguments = arguments
        self._first = first
        self._kept = Kept(folder)
        self._perplexity = math.nan  # the first one's
        self._base = ""  # the recipe whose logits at the lowest degree are kept

    def measure(self, case: Case) -> dict[str, Any]:
        """The case's figures. Raises UserError where it can't be measured; SystemExit on a follower, at its end."""
        arguments = argparse.Namespace(**{**vars(self._arguments), "tp": case.tp})
        weights = {"torchao_config": case.torchao_config, "quantize_lm_head": case.is_with_head, "dtype": case.dtype}
        with ExitStack() as stack:
            llm = open_model(arguments, stack, **weights)
            nll, to_none, to_base = self._score(llm, case)
            if case == self._first:
                self._perplexity = math.exp(nll)
            return {
                "weight_bytes_per_rank": llm.blueprint.bytes_per_rank(), "perplexity": math.exp(nll),
                "perplexity_ratio": math.exp(nll) / self._perplexity, **to_none.figures(),
                "base_tp": self._first.tp, **{f"base_{name}": value for name, value in to_base.figures().items()},
                "load_seconds": round(llm.load_seconds, 3), "notes": summarize(llm.blueprint.decisions)[1:],
            }  # fmt: skip

    def _score(self, llm: LLM, case: Case) -> tuple[float, Distance, Distance]:
        """Mean negative log-probability in nats; the distances to none, and to this recipe at the lowest degree."""
        is_base = case.tp == self._first.tp and case.recipe != self._base
        self._base = case.recipe if is_base else self._base
        nll, to_none, to_base = [], Distance(), Distance()
        texts = windows(llm, self._arguments.texts, self._arguments.tokens)
        for number, logits in enumerate(logits_of(llm, texts, self._arguments.batch_size)):
            nll.append(losses(logits, texts[number]))
            if case == self._first:
                self._kept.put("none", number, logits)
            to_none.add(self._kept.get("none", number), logits)
            if is_base:
                self._kept.put("base", number, logits)
            elif self._base == case.recipe:
                to_base.add(self._kept.get("base", number), logits)
        return float(torch.cat(nll).mean()), to_none, to_base


def parser() -> Parser:
    parser = parser_for("quality", __doc__)
    parser.add_argument("--recipes", nargs="+", metavar="R", help="default: all that the device can run")
    parser.add_argument("--tps", type=int, nargs="+", metavar="N", help="degrees; default: --tp, or torchrun's world")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each text")
    parser.add_argument("--texts", type=int, default=4, metavar="N")
    parser.add_argument("--batch-size", type=int, default=2, metavar="N", help="texts at once")
    parser.add_argument("--markdown", action="store_true", help="the table is in Markdown")
    return parser


def cases(arguments: argparse.Namespace) -> list[Case]:
    """What is measured, in order. Raises UserError for what can't be asked for."""
    for name, least in (("tokens", 2), ("texts", 1), ("batch_size", 1)):  # a text's first token has no probability
        if getattr(arguments, name) < least:
            raise UserError(f"found --{name.replace('_', '-')} {getattr(arguments, name)}, expected at least {least}")
    if arguments.torchao_config != "none":
        raise UserError(f"found --torchao-config {arguments.torchao_config}, expected recipes, give --recipes instead")
    if arguments.tps and arguments.tp:
        raise UserError("found --tp and --tps, expected one of them, drop --tp")
    torchrun = torchrun_place(os.environ)
    degrees = sorted({resolve_tp(tp, torchrun) for tp in arguments.tps or [arguments.tp]})
    if degrees[0] < 1:
        raise UserError(f"found degree {degrees[0]}, expected at least 1")
    recipes = dict.fromkeys(arguments.recipes or runnable(arguments.device))
    for recipe in recipes:
        RecipeMap.parse(recipe.removesuffix(_HEAD), recipe.endswith(_HEAD))
    heads = ("", _HEAD) if arguments.quantize_lm_head else ("",)
    wanted = dict.fromkeys(r + head for r in recipes for head in heads if r != "none" and not r.endswith(_HEAD))
    wanted |= {recipe: None for recipe in recipes if recipe.endswith(_HEAD)}
    none = [Case("none", tp, arguments.dtype) for tp in degrees]
    exact = [Case("none", degrees[0], "float32")] * (arguments.dtype != "float32")
    others = [Case(recipe, tp, arguments.dtype) for recipe, tp in itertools.product(wanted, degrees)]
    return [none[0], *exact, *(none[1:] if "none" in recipes else ()), *others]


def runnable(device: str) -> list[str]:
    from tpllama.start import resolve_device

    kind = resolve_device(device).type
    return [name for name, recipe in RECIPES.items() if recipe is None or kind in recipe.family.devices]


def measure_all(arguments: argparse.Namespace) -> None:
    every = cases(arguments)
    torchrun = torchrun_place(os.environ)
    is_leader = torchrun is None or torchrun.rank == 0
    table = Table(every[0].tp, arguments.markdown)
    if is_leader:
        print(table.header(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(arguments, every[0], Path(folder))
        for case in every:
            try:
                found = sweep.measure(case)
            except SystemExit:  # what a follower's LLM ends with: the next one has it follow again
                if is_leader:
                    raise
                continue
            except UserError as error:
                if case == every[0]:
                    raise
                found = {"reason": str(error)}
            if is_leader:
                print(table.row(case, found), flush=True)
                write(arguments, case, found)
    if is_leader:
        print(table.footer(), end="", flush=True)


def write(arguments: argparse.Namespace, case: Case, found: dict[str, Any]) -> None:
    if not arguments.result_filename:
        return
    same = ("run_name", "shape", "device", "batch_invariant", "compile", "strict", "seed", "tokens", "texts",
            "batch_size")  # fmt: skip
    facts = {"model": model_name(arguments), **{name: getattr(arguments, name) for name in same}}
    of_case = {"recipe": case.recipe, "tp": case.tp, "dtype": case.dtype}
    append(arguments.result_filename, {"bench": "quality", **surroundings(), **facts, **of_case, **found})


class Table:
    """Lines for people, as they come."""

    def __init__(self, base_tp: int, is_markdown: bool) -> None:
        self._base_tp = base_tp
        self._is_markdown = is_markdown
        self._notes: dict[str, list[str]] = {}  # recipes of each

    def header(self) -> str:
        to = f"to TP {self._base_tp}"
        names = ["recipe", "TP", "MiB", "perplexity", "ratio", "KL", "p99", "top-1", f"{to}: logits", "KL", "top-1"]
        if not self._is_markdown:
            names[8] = f"{to}:"
            return self._line(names)
        return self._line(names) + "\n" + self._line(["---", *["---:"] * (len(names) - 1)])

    def row(self, case: Case, found: dict[str, Any]) -> str:
        of_dtype = f", {case.dtype}" if case.recipe == "none" and case.dtype == "float32" else ""
        start = [case.recipe + of_dtype, str(case.tp)]
        if "reason" in found:
            return self._line([*start, f"not measured: {found['reason']}"])
        for note in found["notes"]:
            self._notes.setdefault(note, [])
            if case.recipe not in self._notes[note]:
                self._notes[note].append(case.recipe)
        formats = (
            ("perplexity", ".3f"), ("perplexity_ratio", ".4f"), ("kl_mean", ".3g"), ("kl_p99", ".3g"), ("top1", ".2%"),
            ("base_max_difference", ".3g"), ("base_kl_mean", ".3g"), ("base_top1", ".2%"),
        )  # fmt: skip
        numbers = ["-" if found[name] is None else f"{found[name]:{form}}" for name, form in formats]
        return self._line([*start, f"{max(found['weight_bytes_per_rank']) / (1 << 20):.1f}", *numbers])

    def footer(self) -> str:
        """What recipes did otherwise than asked."""
        lines = [f"{', '.join(recipes)}: {note}\n" for note, recipes in self._notes.items()]
        return "\n" + ("\n" if self._is_markdown else "").join(lines) if lines else ""

    def _line(self, cells: list[str]) -> str:
        if self._is_markdown:
            return f"| {' | '.join(cells)} |"
        first, *others = zip(cells, _WIDTHS, strict=False)
        return f"{first[0]:<{first[1]}} " + " ".join(f"{cell:>{width}}" for cell, width in others)


if __name__ == "__main__":
    run("quality", parser(), measure_all)
