"""Latency of one batch: prefill, each decode step, and the whole, for every shape and recipe that is asked for.

    python bench/latency.py [--model M | --shape 1b] [--tp 2] [--torchao-config R..] [--batch-size B..]
        [--input-len I..] [--output-len O..] [--repeat N] [--run-name S] [--result-filename F]
        [--log-decode-step K] [--profile [DIR]] and the flags of `tpllama generate` for model, ranks, weights and cache
    python bench/latency.py --correct [--against hf|tp1] [--cut-len N] [--prompt-filename F]   (see correctness.py)

Also under torchrun, which then says how many ranks there are. Every shape of the lists' product is measured on every
recipe: B prompts of I random token ids, seeded and new for each repetition, computed in one step if they are at most
16,384 tokens (--max-batch-tokens says otherwise), then O - 1 decode steps, greedy and to the full length. A warm-up of
the same B and I comes before. A shape is repeated until it has 20 decode steps, at most 5 times.

    Prefill  from the call until every prompt has its first new token; the median of the repetitions
    Decode   a step that gives each of the B texts one token: median and 99th percentile over all such steps
    Total    from the first step to the last token; the median of the repetitions
    GB/s     packed weights that a step reads (all ranks, without embedding rows and keys and values) by the median
             decode latency; beside it the share of what the machine read from a set of that size (see machine.py)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batch_latency import Shape, measure_shape, measured_bandwidth, random_prompts
from command import count, given, model_name, open_model, parser_for, recipe_options, run
from record import append, surroundings
from steps import StepLog

from tpllama import LLM
from tpllama.cli import Parser
from tpllama.config import UserError
from tpllama.parallel.place import threads_per_rank, torchrun_place
from tpllama.quantization.recipes import RecipeMap

_MOST_PREFILL_TOKENS, _MOST_TEXTS = 16384, 1 << 16
_SETTINGS = (
    *("quantize_lm_head", "compile", "seed", "batch_invariant", "kv_cache_dtype", "max_batch_size", "max_batch_tokens"),
    *("block_size", "prefix_caching", "chunked_prefill", "load_format", "json_model_override_args"),
)


def parser() -> Parser:
    parser = parser_for("latency", __doc__)
    add = parser.add_argument
    add("--torchao-config", default=["none"], nargs="+", metavar="R", help="recipes, or @file.json, one after another")
    add("--batch-size", "--batch", type=count, nargs="+", default=[1], metavar="B")
    add("--input-len", "--input", type=count, nargs="+", default=[256], metavar="I")
    add("--output-len", "--output", type=count, nargs="+", metavar="O", help="16; with --correct 32")
    add("--repeat", type=count, metavar="N", help="repetitions of each shape")
    add("--log-decode-step", type=count, metavar="K", help="print every K-th decode step; default: the first")
    add("--profile", nargs="?", const="profile", metavar="DIR", help="traces, and a table of where a step's time goes")
    add("--correct", "--correctness-test", action="store_true", help="print logits and texts instead of timing")
    add("--against", choices=("hf", "tp1"), help="with --correct: compare with transformers, or with one rank")
    add("--against-model", metavar="M", help="with --against: another checkpoint for the other side")
    add("--cut-len", type=count, default=4, metavar="N", help="with --correct: tokens of a prompt's first half")
    add("--prompt-filename", metavar="F", help="with --correct: one prompt a line, text or a JSON list of token ids")
    add("--save-answers", metavar="F", help="with --correct: write the numbers to a safetensors file")
    add("--continue-answers", metavar="F", help="with --correct: score these texts instead of writing own ones")
    parser.set_defaults(max_batch_size=None, max_batch_tokens=None)
    return parser


def work(arguments: argparse.Namespace) -> None:
    if arguments.correct:
        from correctness import check

        check(arguments)
        return
    for name in ("against", "against_model", "prompt_filename", "save_answers", "continue_answers"):
        if getattr(arguments, name):
            raise UserError(f"found --{name.replace('_', '-')} without --correct, expected both, add --correct")
    shapes = [Shape(*each) for each in itertools.product(
        arguments.batch_size, arguments.input_len, arguments.output_len or [16]
    )]  # fmt: skip
    for recipe in arguments.torchao_config:
        RecipeMap.parse(recipe)  # a wrong name is said before anything is measured
    place = torchrun_place(os.environ)
    for recipe in arguments.torchao_config:
        try:
            with ExitStack() as stack:
                measure_recipe(arguments, recipe, shapes, stack)
        except UserError as error:  # of many, the others are measured
            if len(arguments.torchao_config) == 1:
                raise
            if place is None or place.rank == 0:
                print(f"{recipe} can't run: {error}", flush=True)
                record(arguments, {"bench": "latency", "run_name": arguments.run_name, "torchao_config": recipe,
                                   **surroundings(), "error": str(error)})  # fmt: skip
        except SystemExit:  # a follower of torchrun's: its part of this recipe is done
            if place is None or place.rank == 0:
                raise


def measure_recipe(arguments: argparse.Namespace, recipe: str, shapes: Sequence[Shape], stack: ExitStack) -> None:
    most = min(max(shape.batch_size for shape in shapes), _MOST_TEXTS)
    tokens = max(shape.batch_size * shape.input_len for shape in shapes)
    llm = open_model(
        arguments, stack, **recipe_options(arguments, recipe), max_batch_size=given(arguments.max_batch_size, most),
        max_batch_tokens=given(arguments.max_batch_tokens, max(most, min(tokens, _MOST_PREFILL_TOKENS))),
    )  # fmt: skip
    facts = describe(arguments, recipe, llm)
    print(f"{facts['model']}, {recipe}, tp {facts['tp']}, {facts['dtype']}, {facts['device']}: "
          f"loaded in {facts['load_seconds']:.2f} s")  # fmt: skip
    log = StepLog(llm.engine)
    bandwidth = measured_bandwidth(llm)
    ran = []
    for number, shape in enumerate(shapes):
        print(f"Batch {shape.batch_size}, input {shape.input_len}, output {shape.output_len}")
        sizes = dataclasses.asdict(shape)
        try:
            fields = measure_shape(llm, log, shape, arguments, f"{arguments.seed} {number}", bandwidth)
            ran.append(shape)
        except UserError as error:
            print(f"can't run: {error}", flush=True)
            fields = {"error": str(error)}
        except Exception as error:
            record(arguments, {**facts, **sizes, "error": f"{type(error).__name__}: {error}"})
            raise
        record(arguments, {**facts, **sizes, **fields})
    if arguments.profile:
        from stages import Profiler

        profiler = Profiler(llm, log)
        for number, shape in enumerate(ran):
            prompts = random_prompts(llm, shape, f"{arguments.seed} profile {number}")
            sizes = f"batch{shape.batch_size}-input{shape.input_len}-output{shape.output_len}"
            name = f"{Path(recipe).stem}-tp{facts['tp']}-{sizes}"
            profiler.profile(prompts, shape.output_len, arguments.profile, name)


def describe(arguments: argparse.Namespace, recipe: str, llm: LLM) -> dict[str, Any]:
    """What was measured, on what."""
    blueprint = llm.blueprint
    return {
        "bench": "latency", "run_name": arguments.run_name, "model": model_name(arguments),
        "device": blueprint.device, "dtype": arguments.dtype, "tp": blueprint.tp, "torchao_config": recipe,
        "threads_per_rank": threads_per_rank(blueprint.tp, os.environ),
        **{name: getattr(blueprint.engine, name) for name in _SETTINGS}, "quantized": quantized(llm),
        "weight_bytes_per_rank": blueprint.bytes_per_rank(), "load_seconds": round(llm.load_seconds, 3),
        **surroundings(),
    }  # fmt: skip


def quantized(llm: LLM) -> dict[str, int]:
    """How many linears became what, by recipe: of a checkpoint that is stored quantized too."""
    recipes = [decision.recipe.name if decision.recipe else "none" for decision in llm.blueprint.decisions.values()]
    return dict(Counter(recipes))


def record(arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
    if arguments.result_filename:
        append(arguments.result_filename, fields)


if __name__ == "__main__":
    run("latency", parser(), work)
