"""Latency of one batch: prefill, each decode step, and the whole, for every shape and recipe that is asked for.

    python bench/latency.py [--model M | --shape 1b] [--tp 2] [--torchao-config R..] [--batch-size B..]
        [--input-len I..] [--output-len O..] [--repeat N] [--run-name S] [--result-filename F]
        [--log-decode-step K] [--profile [DIR]] and the flags of `tpllama generate` for model, ranks, weights and cache
    python bench/latency.py --correct [--against hf|tp1] [--cut-len N] [--prompt-filename F]   (see correctness.py)

Also under torchrun, which then says how many ranks there are. Every shape of the lists' product is measured on every
recipe: B prompts of I random token ids, seeded and new for each repetition, all computed in one step (of at most
16,384 tokens; --max-batch-tokens says otherwise), then O - 1 decode steps, greedy and to the full length. A warm-up
of the same B and I comes before. A shape is repeated until it has 20 decode steps, at most 5 times.

    Prefill  from the first step's start until every prompt has its first new token; the median of the repetitions
    Decode   a step that gives each text one token: median and 99th percentile over all such steps
    Total    from the first step to the last token; the median of the repetitions
    GB/s     packed weights that a step reads (all ranks, without embedding rows and keys and values) by the median
             decode latency; beside it the share of what the machine read from a set of that size (see machine.py)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from command import open_model, parser_for, recipe_options, run
from record import append, surroundings
from steps import StepLog

from tpllama import LLM, SamplingParams
from tpllama.cli import Parser
from tpllama.config import UserError
from tpllama.parallel.place import threads_per_rank, torchrun_place

_MOST_PREFILL_TOKENS = 16384
_ENOUGH_STEPS, _MOST_REPETITIONS = 20, 5
_WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class Shape:
    batch_size: int
    input_len: int
    output_len: int

    @property
    def repetitions(self) -> int:
        """How often it is measured, to have enough decode steps."""
        return max(1, min(_MOST_REPETITIONS, -(-_ENOUGH_STEPS // max(self.output_len - 1, 1))))


@dataclass
class Repetition:
    """Seconds of one repetition."""

    prefill: float
    decodes: list[float]
    total: float


def parser() -> Parser:
    parser = parser_for("latency", __doc__)
    add = parser.add_argument
    add("--torchao-config", default=["none"], nargs="+", metavar="R", help="recipes, or @file.json, one after another")
    add("--batch-size", "--batch", type=_count, nargs="+", default=[1], metavar="B")
    add("--input-len", "--input", type=_count, nargs="+", default=[256], metavar="I")
    add("--output-len", "--output", type=_count, nargs="+", default=[16], metavar="O")
    add("--repeat", type=_count, metavar="N", help="repetitions of each shape")
    add("--log-decode-step", type=int, default=0, metavar="K", help="print every K-th decode step (0: the first)")
    add("--profile", nargs="?", const="profile", metavar="DIR", help="traces, and a table of where a step's time goes")
    add("--correct", "--correctness-test", action="store_true", help="print logits and texts instead of timing")
    add("--against", choices=("hf", "tp1"), help="with --correct: compare with transformers, or with one rank")
    add("--against-model", metavar="M", help="with --against: another checkpoint for the other side")
    add("--cut-len", type=_count, default=4, metavar="N", help="with --correct: tokens of a prompt's first half")
    add("--prompt-filename", metavar="F", help="with --correct: one prompt a line, text or a JSON list of token ids")
    add("--save-answers", metavar="F", help="with --correct: write the numbers to a safetensors file")
    add("--continue-answers", metavar="F", help="with --correct: score these texts instead of writing own ones")
    parser.set_defaults(max_batch_size=None, max_batch_tokens=None)
    return parser


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 1 << 24:
        raise argparse.ArgumentTypeError(f"found {text[:20]!r}, expected whole numbers from 1 to {1 << 24}")
    return number


def work(arguments: argparse.Namespace) -> None:
    if arguments.correct:
        from correctness import check

        check(arguments)
        return
    for name in ("against", "against_model", "prompt_filename", "save_answers", "continue_answers"):
        if getattr(arguments, name):
            raise UserError(f"found --{name.replace('_', '-')} without --correct, expected both, add --correct")
    shapes = [Shape(*each) for each in itertools.product(
        arguments.batch_size, arguments.input_len, arguments.output_len
    )]  # fmt: skip
    place = torchrun_place(os.environ)
    for recipe in arguments.torchao_config:
        try:
            with ExitStack() as stack:
                measure_recipe(arguments, recipe, shapes, stack)
        except SystemExit:  # a follower of torchrun's: its part of this recipe is done
            if place is None or place.rank == 0:
                raise


def measure_recipe(arguments: argparse.Namespace, recipe: str, shapes: Sequence[Shape], stack: ExitStack) -> None:
    most = max(shape.batch_size for shape in shapes)
    tokens = max(shape.batch_size * shape.input_len for shape in shapes)
    llm = open_model(
        arguments, stack, **recipe_options(arguments, recipe), max_batch_size=arguments.max_batch_size or most,
        max_batch_tokens=arguments.max_batch_tokens or max(most, min(tokens, _MOST_PREFILL_TOKENS)),
    )  # fmt: skip
    facts = describe(arguments, recipe, llm)
    print(f"{facts['model']}, {recipe}, tp {facts['tp']}, {facts['dtype']}, {facts['device']}: "
          f"loaded in {facts['load_seconds']:.2f} s")  # fmt: skip
    log = StepLog(llm.engine)
    bandwidth = measured_bandwidth(llm)
    for number, shape in enumerate(shapes):
        print(f"Batch {shape.batch_size}, input {shape.input_len}, output {shape.output_len}")
        sizes = dataclasses.asdict(shape)
        try:
            fields = measure_shape(llm, log, shape, arguments, f"{arguments.seed} {number}", bandwidth)
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
        for number, shape in enumerate(shapes):
            prompts = random_prompts(llm, shape, f"{arguments.seed} profile {number}")
            name = f"{Path(recipe).stem}-tp{facts['tp']}-batch{shape.batch_size}-input{shape.input_len}"
            profiler.profile(prompts, shape.output_len, arguments.profile, name)


def measure_shape(
    llm: LLM, log: StepLog, shape: Shape, arguments: argparse.Namespace, seed: str, bandwidth: float
) -> dict[str, Any]:
    """Warms up, measures, prints. Raises UserError where the shape can't run."""
    check_room(llm, shape)
    warm_up = dataclasses.replace(shape, output_len=min(shape.output_len, _WARM_UP_TOKENS))
    repeat(llm, log, warm_up, f"{seed} warm-up")
    count = arguments.repeat or shape.repetitions
    repetitions = [repeat(llm, log, shape, f"{seed} {number}") for number in range(count)]
    prefill, total = (median(getattr(each, name) for each in repetitions) for name in ("prefill", "total"))
    decodes = [seconds for each in repetitions for seconds in each.decodes]
    say("Prefill. latency", prefill, "throughput", shape.batch_size * shape.input_len / prefill)
    for number, seconds in enumerate(repetitions[0].decodes):
        if number % arguments.log_decode_step == 0 if arguments.log_decode_step > 0 else number == 0:
            say("Decode.  latency", seconds, "throughput", shape.batch_size / seconds)
    found: dict[str, Any] = {
        "repetitions": count, "decode_steps": len(decodes), "prefill_latency": prefill,
        "prefill_throughput": shape.batch_size * shape.input_len / prefill,
        "median_decode_latency": None, "p99_decode_latency": None, "median_decode_throughput": None,
        "achieved_bandwidth": None, "read_bandwidth": bandwidth, "bandwidth_fraction": None,
    }  # fmt: skip
    if decodes:
        middle = median(decodes)
        found |= {
            "median_decode_latency": middle, "p99_decode_latency": percentile(decodes, 99),
            "median_decode_throughput": shape.batch_size / middle,
            "achieved_bandwidth": sum(streamed_bytes(llm)) / middle,
        }  # fmt: skip
        found["bandwidth_fraction"] = found["achieved_bandwidth"] / bandwidth
        say("Decode.  median latency", middle, "median throughput", shape.batch_size / middle)
    overall = shape.batch_size * (shape.input_len + shape.output_len) / total
    say("Total. latency", total, "throughput", overall, digits=3)
    if decodes:
        print(f"Weights. {found['achieved_bandwidth'] / 1e9:.2f} GB/s, {found['bandwidth_fraction']:.1%} of the "
              f"{bandwidth / 1e9:.2f} GB/s that this machine reads", flush=True)  # fmt: skip
    return {**found, "total_latency": total, "overall_throughput": overall,
            "peak_memory_bytes_per_rank": llm.peak_memory_bytes()}  # fmt: skip


def say(what: str, latency: float, rate: str, throughput: float, digits: int = 5) -> None:
    print(f"{what}: {latency:6.{digits}f} s, {rate}: {throughput:9.2f} token/s")


def percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation between the values, the extremes included."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def check_room(llm: LLM, shape: Shape) -> None:
    """Raises UserError where not all texts can run at once: what was measured would be something else."""
    engine = llm.engine
    longest = shape.input_len + shape.output_len
    if longest > engine.limits.context_length:
        raise UserError(
            f"found {shape.input_len} + {shape.output_len} tokens, expected at most {engine.limits.context_length} "
            f"together, lower --input-len or --output-len"
        )
    room = engine.pool.size // -(-longest // engine.pool.block_size)
    places = min(room, engine.scheduler.policy.max_batch_size)
    if shape.batch_size > places:
        raise UserError(
            f"found a batch of {shape.batch_size}, expected at most {places} texts of {longest} tokens, as many as the "
            f"cache and --max-batch-size take, raise --kv-cache-memory or lower --batch-size"
        )


def repeat(llm: LLM, log: StepLog, shape: Shape, seed: str) -> Repetition:
    """Runs the shape once, on prompts of its own."""
    prompts = random_prompts(llm, shape, seed)
    params = SamplingParams(max_new_tokens=shape.output_len, ignore_eos=True)
    log.clear()
    llm.generate(prompts, params)
    periods = [step.period for step in log.steps]
    computing = [number for number, step in enumerate(log.steps) if step.computed]
    last = computing[-1] + 1 if computing else 0
    is_full = [step.new == shape.batch_size for step in log.steps]
    decodes = [period for period, full in itertools.islice(zip(periods, is_full, strict=True), last, None) if full]
    return Repetition(sum(periods[:last]), decodes, sum(periods))


def random_prompts(llm: LLM, shape: Shape, seed: str) -> list[list[int]]:
    draw, ids = random.Random(seed), range(llm.blueprint.config.vocab_size)
    return [draw.choices(ids, k=shape.input_len) for _ in range(shape.batch_size)]


def streamed_bytes(llm: LLM) -> list[int]:
    """Packed weights that each rank reads in a decode step: all but an embedding table that isn't the head too."""
    blueprint = llm.blueprint
    rows = {row["name"]: row for row in blueprint.layer_rows()}
    table, head = rows["model.embed_tokens"], rows["lm_head"]
    is_shared = blueprint.config.tie_word_embeddings and head["action"] != "quantized"
    tables = [0 if is_shared else rows * columns * blueprint.dtype.itemsize for rows, columns in table["local_shapes"]]
    return [whole - own for whole, own in zip(blueprint.bytes_per_rank(), tables, strict=True)]


def measured_bandwidth(llm: LLM) -> float:
    """Bytes a second that all ranks together read, each from a set as large as its weights."""
    from machine import read_bandwidth

    tp = llm.blueprint.tp
    return read_bandwidth(max(streamed_bytes(llm)), tp, threads_per_rank(tp, os.environ))


def describe(arguments: argparse.Namespace, recipe: str, llm: LLM) -> dict[str, Any]:
    """What was measured, on what."""
    blueprint = llm.blueprint
    return {
        "bench": "latency", "run_name": arguments.run_name, "model": arguments.shape or arguments.model,
        "device": blueprint.device, "dtype": arguments.dtype, "tp": blueprint.tp, "torchao_config": recipe,
        "quantize_lm_head": blueprint.engine.quantize_lm_head, "compile": arguments.compile, "seed": arguments.seed,
        "threads_per_rank": threads_per_rank(blueprint.tp, os.environ), "kv_cache_dtype": arguments.kv_cache_dtype,
        "weight_bytes_per_rank": blueprint.bytes_per_rank(), "load_seconds": round(llm.load_seconds, 3),
        **surroundings(),
    }  # fmt: skip


def record(arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
    if arguments.result_filename:
        append(arguments.result_filename, fields)


if __name__ == "__main__":
    run("latency", parser(), work)
