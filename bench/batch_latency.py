"""One shape of bench/latency.py: warmed up, repeated, and put into figures."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from command import given
from steps import StepLog

from tpllama import LLM, SamplingParams
from tpllama.config import UserError
from tpllama.parallel.place import threads_per_rank

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
    """Seconds of one repetition, and how many steps its prompts took."""

    prefill_steps: int
    prefill: float
    decodes: list[float]
    total: float


def measure_shape(
    llm: LLM, log: StepLog, shape: Shape, arguments: argparse.Namespace, seed: str, bandwidth: float
) -> dict[str, Any]:
    """Warms up, measures, prints. Raises UserError where the shape can't run."""
    check_room(llm, shape)
    warm_up = dataclasses.replace(shape, output_len=min(shape.output_len, _WARM_UP_TOKENS))
    repeat(llm, log, warm_up, f"{seed} warm-up")
    times = given(arguments.repeat, shape.repetitions)
    repetitions = [repeat(llm, log, shape, f"{seed} {number}") for number in range(times)]
    prefill, total = (median(getattr(each, name) for each in repetitions) for name in ("prefill", "total"))
    decodes = [seconds for each in repetitions for seconds in each.decodes]
    say("Prefill. latency", prefill, "throughput", shape.batch_size * shape.input_len / prefill)
    for number, seconds in enumerate(repetitions[0].decodes):
        if number % (arguments.log_decode_step or len(decodes)) == 0:
            say("Decode.  latency", seconds, "throughput", shape.batch_size / seconds)
    found: dict[str, Any] = {
        "repetitions": times, "prefill_steps": repetitions[0].prefill_steps, "decode_steps": len(decodes),
        "prefill_latency": prefill,
        "prefill_throughput": shape.batch_size * shape.input_len / prefill,
        "median_decode_latency": None, "p99_decode_latency": None, "median_decode_throughput": None,
        "achieved_bandwidth": None, "read_bandwidth": bandwidth, "bandwidth_fraction": None,
    }  # fmt: skip
    if not decodes and shape.output_len > 1:
        found["note"] = "no step gave every text a token: prompts took several, raise --max-batch-tokens"
        print(f"Decode.  none: {found['note']}")
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
    if engine.scheduler.policy.alone and shape.batch_size > 1:
        raise UserError(f"found a batch of {shape.batch_size} with --batch-invariant, expected 1: texts have own steps")
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
    return Repetition(last, sum(periods[:last]), decodes, sum(periods))


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
    return read_bandwidth(max(streamed_bytes(llm)), tp, threads_per_rank(tp, os.environ), llm.blueprint.device)
