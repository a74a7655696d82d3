"""All linears of a shape, as a step of decoding runs them: our own kernels against the library's, in turns.

    .venv/bin/python bench/linears.py [--shape 1b] [--recipes none int8dq ...] [--rows 1 2 4 8 16 32 128] [--threads 1]
        [--repeats N] [--result-filename F]

The projections of every layer and the head (with `none`, in bfloat16), of random weights, one after another, so that
weights come from memory. Figures are medians: GB of weights a second, and their fraction of what a plain read of the
same memory reaches in the same turns (with several threads, of what bench/machine.py reads). One thread is pinned, and
time is its own: what other processes take is not in it. `library` is what runs where there is no compiler.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from machine import read_bandwidth
from machine_worker import compile_reader
from record import append, surroundings
from shapes import SHAPES
from torch import Tensor, nn

from tpllama.build import weight_bytes
from tpllama.kernels import small_m
from tpllama.kernels.cpu import Int4Linear
from tpllama.kernels.pack import pack
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import RECIPES

ON_CPU = ["none"] + [name for name, each in RECIPES.items() if each is not None and "cpu" in each.family.devices]


def shapes_of(fields: dict[str, Any]) -> list[tuple[int, int]]:
    """Out- and in-features of all linears, in the order in which they run."""
    hidden, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return layer * fields["num_hidden_layers"] + [(fields["vocab_size"], hidden)]


def linears(recipe_name: str, shapes: list[tuple[int, int]]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Ours, and the library's; the same modules where it works on the same memory."""
    recipe, made = RECIPES[recipe_name], {}
    own: list[nn.Module] = []
    library: list[nn.Module] = []
    for rows, columns in shapes:
        if (rows, columns) not in made:
            weight: Any = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)
            weight = weight if recipe is None else quantize(weight, recipe, slice(0, columns))
            packed = pack(weight, None, "cpu")
            is_int4 = recipe is not None and recipe.family.kind == "int4"
            made[rows, columns] = packed, Int4Linear.from_neutral(weight, None, None) if is_int4 else packed
        ours, theirs = made[rows, columns]
        own.append(copy.deepcopy(ours))
        library.append(own[-1] if theirs is ours else copy.deepcopy(theirs))
    return own, library


def reader(modules: list[nn.Module]) -> Callable[[], object]:
    """Reads all weights once."""
    compiled = compile_reader()
    if compiled is None:
        raise SystemExit("linears: error: found no C compiler, expected one")
    parts = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if tensor.dim() == 2]
    return lambda: [compiled.read_all(tensor.data_ptr(), tensor.nbytes // 256 * 4, 1) for tensor in parts]


def measure(
    recipe: str, rows_counts: list[int], shapes: list[tuple[int, int]], threads: int, repeats: int
) -> list[dict[str, Any]]:
    own, library = linears(recipe, shapes)
    size = sum(weight_bytes(module) for module in own)
    clock, read = time.thread_time if threads == 1 else time.perf_counter, reader(own)
    found = []
    for rows in rows_counts:
        xs = {columns: torch.randn(rows, columns, dtype=torch.bfloat16) for _, columns in shapes}

        def run(modules: list[nn.Module], xs: dict[int, Tensor] = xs) -> None:
            for module, (_, columns) in zip(modules, shapes, strict=True):
                module(xs[columns])

        def run_library() -> None:
            with patch.object(small_m, "_level", lambda: -1):
                run(library)

        ways: dict[str, Callable[[], object]] = {
            "own": lambda run=run: run(own),
            "library": run_library,
            **({"read": read} if threads == 1 else {}),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats if rows < 32 else max(1, repeats // 2)):
            for name, way in ways.items():
                start = clock()
                way()
                times[name].append(clock() - start)
        rates = {name: size / statistics.median(each) / 1e9 for name, each in times.items()}
        if threads > 1:
            rates["read"] = read_bandwidth(size, ranks=1, threads=threads) / 1e9
        found.append({
            "bench": "linears", **surroundings(), "recipe": recipe, "rows": rows, "threads": threads, "bytes": size,
            "kernel": small_m.kernel_name(),
            **{f"{name}_gb_s": round(rate, 2) for name, rate in rates.items()},
            "of_read": round(rates["own"] / rates["read"], 3), "speedup": round(rates["own"] / rates["library"], 2),
        })  # fmt: skip
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument(
        "--recipes", nargs="+", choices=ON_CPU, default=["none", "int8dq", "int8wo", "int4wo-128", "8da4w-32"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--result-filename", metavar="F", help="JSON lines are appended to it")
    arguments = parser.parse_args()
    if arguments.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(arguments.threads)
    print(f"{'recipe':<12}{'rows':>5}{'own GB/s':>10}{'library':>10}{'read':>8}{'of read':>9}{'speedup':>9}")
    for recipe in arguments.recipes:
        shapes = shapes_of(SHAPES[arguments.shape])
        for record in measure(recipe, arguments.rows, shapes, arguments.threads, arguments.repeats):
            own, library, read = (record[f"{name}_gb_s"] for name in ("own", "library", "read"))
            print(
                f"{recipe:<12}{record['rows']:>5}{own:>10.1f}{library:>10.1f}{read:>8.1f}{record['of_read']:>9.2f}"
                f"{record['speedup']:>9.2f}", flush=True,
            )  # fmt: skip
            if arguments.result_filename:
                append(arguments.result_filename, record)


if __name__ == "__main__":
    main()
