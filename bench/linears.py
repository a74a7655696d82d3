"""All linears of a shape, as a step of decoding runs them: our own kernels against the library's, in turns.

    .venv/bin/python bench/linears.py [--shape 1b] [--recipes none int8dq ...] [--rows 1 2 4 8 16 32 128] [--ranks 1]
        [--threads 1] [--repeats N] [--result-filename F]

The projections of every layer and the head (with `none`, in bfloat16), of random weights, one after another, so that
weights come from memory. With several ranks each is a process that has its share of every matrix, as tensor parallelism
splits them, and all run each pass at the same time. Figures are medians of what the ranks do together: GB of weights a
second, and their fraction of what a plain read of the same memory reaches in the same turns (with several threads, of
what bench/machine.py reads). Ranks of one thread are pinned, and a single one's time is its own: what other processes
take is not in it. `library` is what runs where there is no compiler.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from machine import read_bandwidth
from machine_worker import compile_reader
from record import append, surroundings
from shapes import SHAPES
from torch import nn

from tpllama.build import weight_bytes
from tpllama.kernels import amx, small_m
from tpllama.kernels.cpu import Int4Linear, Int8DynamicLinear
from tpllama.kernels.linear import PlainLinear
from tpllama.kernels.pack import pack
from tpllama.kernels.pages import WeightMemory
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import RECIPES

ON_CPU = ["none"] + [name for name, each in RECIPES.items() if each is not None and "cpu" in each.family.devices]


# The library's linears of families for which ours lay weights differently.
LIBRARY: dict[str, Any] = {
    "none": PlainLinear, "int8dq": Int8DynamicLinear, "int4wo": Int4Linear, "8da4w": Int4Linear
}  # fmt: skip
# Seconds at the start and the end of each pass of each way, on one rank.
Passes = dict[str, list[tuple[float, float]]]


def shapes_of(fields: dict[str, Any], ranks: int) -> list[tuple[int, int]]:
    """Out- and in-features of all linears of one rank, in the order in which they run."""
    hidden, inner, size = fields["hidden_size"], fields["intermediate_size"] // ranks, fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * size // ranks, fields["num_key_value_heads"] * size // ranks
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return layer * fields["num_hidden_layers"] + [(fields["vocab_size"] // ranks, hidden)]


def linears(recipe_name: str, shapes: list[tuple[int, int]]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Ours, and the library's; the same modules where it works on the same memory."""
    recipe, made = RECIPES[recipe_name], {}
    own: list[nn.Module] = []
    library: list[nn.Module] = []
    memory = WeightMemory()
    for rows, columns in shapes:
        if (rows, columns) not in made:
            weight: Any = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)
            weight = weight if recipe is None else quantize(weight, recipe, slice(0, columns))
            packed = pack(weight, None, "cpu")
            kind = LIBRARY.get("none" if recipe is None else recipe.family.name)
            made[rows, columns] = packed, packed if kind is None else kind.from_neutral(weight, None, None)
        ours, theirs = made[rows, columns]
        own.append(memory.place(copy.deepcopy(ours)))
        library.append(own[-1] if theirs is ours else memory.place(copy.deepcopy(theirs)))
    return own, library


def reader(modules: list[nn.Module]) -> Callable[[], object]:
    """Reads all weights once."""
    compiled = compile_reader()
    if compiled is None:
        raise SystemExit("linears: error: found no C compiler, expected one")
    parts = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if tensor.dim() > 1]
    return lambda: [compiled.read_all(tensor.data_ptr(), tensor.nbytes // 256 * 4, 1) for tensor in parts]


@dataclasses.dataclass
class Order:
    """What a rank is to do."""

    arguments: argparse.Namespace
    rank: int
    ranks: int
    threads: int
    shapes: list[tuple[int, int]]
    wait: Callable[[], object]  # for the others


def passes(own: list[nn.Module], library: list[nn.Module], rows: int, repeats: int, order: Order) -> Passes:
    """Times of all ways, in turns, all ranks at the same time."""
    xs = {columns: torch.randn(rows, columns, dtype=torch.bfloat16) for _, columns in order.shapes}
    clock = time.thread_time if order.ranks == order.threads == 1 else time.perf_counter

    def run(modules: list[nn.Module]) -> None:
        for module, (_, columns) in zip(modules, order.shapes, strict=True):
            module(xs[columns])

    def run_library() -> None:
        with patch.object(small_m, "_level", lambda: -1), patch.object(amx, "_native", lambda: "left out"):
            run(library)

    ways: dict[str, Callable[[], object]] = {"own": lambda: run(own), "library": run_library}
    if order.threads == 1:
        ways["read"] = reader(own)
    times: Passes = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            order.wait()
            start = clock()
            way()
            times[name].append((start, clock()))
    return times


@torch.inference_mode()
def run_rank(order: Order, say: Callable[[tuple[str, int, int, Passes]], None]) -> None:
    """Says the recipe, the rows, the bytes of weights and the times of each measurement."""
    cores = sorted(os.sched_getaffinity(0))
    if order.threads == 1 and len(cores) >= order.ranks:
        os.sched_setaffinity(0, {cores[-1 - order.rank]})
    torch.set_num_threads(order.threads)
    for recipe in order.arguments.recipes:
        own, library = linears(recipe, order.shapes)
        size = sum(weight_bytes(module) for module in own)
        for rows in order.arguments.rows:
            repeats = order.arguments.repeats if rows < 32 else max(1, order.arguments.repeats // 2)
            say((recipe, rows, size, passes(own, library, rows, repeats, order)))


def all_ranks(arguments: argparse.Namespace) -> Iterator[list[tuple[str, int, int, Passes]]]:
    """What every rank says of one measurement after another."""
    ranks, threads, count = arguments.ranks, arguments.threads, len(arguments.recipes) * len(arguments.rows)
    shapes = shapes_of(SHAPES[arguments.shape], ranks)
    context = multiprocessing.get_context("spawn")
    barrier, queues = context.Barrier(ranks), [context.SimpleQueue() for _ in range(ranks)]
    for rank, queue in enumerate(queues):
        order = Order(arguments, rank, ranks, threads, shapes, barrier.wait)
        context.Process(target=run_rank, args=(order, queue.put), daemon=True).start()
    for _ in range(count):
        yield [queue.get() for queue in queues]


def record_of(said: list[tuple[str, int, int, Passes]], threads: int) -> dict[str, Any]:
    (recipe, rows, _, first), ranks, size = said[0], len(said), sum(size for _, _, size, _ in said)
    rates = {}
    for name in first:
        spans = [
            max(end for _, end in turn) - min(start for start, _ in turn)
            for turn in zip(*(times[name] for _, _, _, times in said), strict=True)
        ]
        rates[name] = size / statistics.median(spans) / 1e9
    if threads > 1:
        rates["read"] = read_bandwidth(size // ranks, ranks, threads) / 1e9
    return {
        "bench": "linears", **surroundings(), "recipe": recipe, "rows": rows, "ranks": ranks, "threads": threads,
        "bytes": size, "kernel": small_m.kernel_name(),
        **{f"{name}_gb_s": round(rate, 2) for name, rate in rates.items()},
        "of_read": round(rates["own"] / rates["read"], 3), "speedup": round(rates["own"] / rates["library"], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument(
        "--recipes", nargs="+", choices=ON_CPU, default=["none", "int8dq", "int8wo", "int4wo-128", "8da4w-32"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--result-filename", metavar="F", help="JSON lines are appended to it")
    arguments = parser.parse_args()
    print(f"{'recipe':<12}{'rows':>5}{'own GB/s':>10}{'library':>10}{'read':>8}{'of read':>9}{'speedup':>9}")
    for said in all_ranks(arguments):
        record = record_of(said, arguments.threads)
        own, library, read = (record[f"{name}_gb_s"] for name in ("own", "library", "read"))
        print(
            f"{record['recipe']:<12}{record['rows']:>5}{own:>10.1f}{library:>10.1f}{read:>8.1f}"
            f"{record['of_read']:>9.2f}{record['speedup']:>9.2f}", flush=True,
        )  # fmt: skip
        if arguments.result_filename:
            append(arguments.result_filename, record)


if __name__ == "__main__":
    main()
