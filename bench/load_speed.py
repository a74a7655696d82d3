"""How long loading takes, against reading and quantizing the same bytes with nothing around it.

    .venv/bin/python bench/load_speed.py [--tp 2] [--torchao-config int8wo] [--rounds 5]

The checkpoint has the shape of Llama-3.2-1B in bfloat16 (2.5 GB), and lies in the page cache. The bare loop runs in as
many processes as there are ranks, with as many threads each: for every weight it takes the rank's slice (equal parts of
rows or columns, as the plan has them) with safetensors' get_slice, and calls torchao's quantize_ on it, whole or in
blocks of rows of one of two sizes, whichever is fastest. It has no plan, no ranks that agree on scales, no
packing. Both are timed from the first weight to the last, by the slower rank, in turns; the figure is the ratio of
medians. `--saved` times the checkpoint that `tpllama quantize` makes of it, against reading its bytes (a copy of every
rank's slices).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import load_memory
from load_memory import lines, say, tell
from record import cpu_model, versions
from shapes import SHAPES, write_checkpoint

# Rows and columns as the plan splits them: of these modules the columns, of all others the rows.
ROW_PARALLEL = ("o_proj", "down_proj")
BLOCK_ELEMENTS = {"large blocks": 1 << 21, "small blocks": 1 << 18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--torchao-config", default="int8wo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saved", action="store_true", help="load a checkpoint that is quantized already")
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "original"
        model.mkdir()
        write_checkpoint(model, SHAPES[arguments.shape])
        if arguments.saved:
            command = [sys.executable, "-m", "tpllama", "quantize", str(model), f"{folder}/saved"]
            subprocess.run([*command, "--torchao-config", arguments.torchao_config], check=True, env=environment())
            model = Path(folder) / "saved"
        os.sync()  # so that no write goes on meanwhile
        seconds = measure(model, arguments)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    bare = min((name for name in medians if name != "tpllama"), key=medians.__getitem__)
    ratio = medians["tpllama"] / medians[bare]
    for name, times in seconds.items():
        print(f"{name}: {medians[name]:.2f} s ({', '.join(f'{each:.2f}' for each in times)})")
    print(f"ratio of medians, tpllama to {bare}: {ratio:.2f}")
    if arguments.result_filename:
        record = {
            "bench": "load_speed", "date": date.today().isoformat(), "shape": arguments.shape, "tp": arguments.tp,
            "torchao_config": arguments.torchao_config, "saved": arguments.saved, "seconds": seconds, "against": bare,
            "ratio": round(ratio, 3), "cpu": cpu_model(), "versions": versions(),
        }  # fmt: skip
        with Path(arguments.result_filename).open("a") as file:
            file.write(json.dumps(record) + "\n")


def measure(model: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way to load, by round; each rank's pages are in the cache by the first, which isn't counted."""
    kinds = ["read"] if arguments.saved else ["whole", *BLOCK_ELEMENTS]
    seconds: dict[str, list[float]] = {name: [] for name in ("tpllama", *kinds)}
    for number in range(arguments.rounds + 1):
        taken = {"tpllama": tpllama_seconds(model, arguments)}
        taken |= {kind: bare_seconds(model, arguments, kind) for kind in kinds}
        if number:
            for name, each in taken.items():
                seconds[name].append(round(each, 3))
    return seconds


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


def tpllama_seconds(model: Path, arguments: argparse.Namespace) -> float:
    config = "none" if arguments.saved else arguments.torchao_config
    engine = {"model": str(model), "tp": arguments.tp, "torchao_config": config, "device": "cpu"}
    return max(rank.seconds for rank in load_memory.measure(engine))


def bare_seconds(model: Path, arguments: argparse.Namespace, kind: str) -> float:
    with bare_ranks(model, arguments, kind) as ranks:
        for process in ranks:
            assert lines(process) == ["ready"]
        for process in ranks:
            say(process, "load")
        return max(float(lines(process)[0]) for process in ranks)


@contextmanager
def bare_ranks(model: Path, arguments: argparse.Namespace, kind: str) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, __file__, "--as-bare", str(model), arguments.torchao_config, kind, str(arguments.tp)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        for rank in range(arguments.tp)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def as_bare(model: str, recipe: str, kind: str, tp: int, rank: int) -> None:
    """The bare loop of one rank."""
    import torch
    from safetensors import safe_open
    from torchao.quantization import quantize_

    from tpllama.parallel.place import threads_per_rank
    from tpllama.quantization.recipes import RECIPES

    torch.set_num_threads(threads_per_rank(tp, os.environ))
    config = RECIPES[recipe].config()  # type: ignore[union-attr]

    def quantized(weight: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(linear, config)
        return linear.weight

    quantized(torch.zeros(16, 256, dtype=torch.bfloat16))  # imports, threads
    tell("ready")
    sys.stdin.readline()
    started = time.perf_counter()
    kept: list[Any] = []
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                index = own_slices(name, part.get_shape(), tp, rank)
                if kind == "read" or "_proj" not in name:
                    kept.append(part[index].clone())
                elif kind == "whole":
                    kept.append(quantized(part[index].clone()))
                else:
                    rows = index[0]
                    step = max(BLOCK_ELEMENTS[kind] // part.get_shape()[1], 1)
                    borders = [*range(rows.start, rows.stop, step), rows.stop]
                    for start, stop in itertools.pairwise(borders):
                        kept.append(quantized(part[slice(start, stop), index[1]].clone()))
    tell(time.perf_counter() - started)
    sys.stdin.readline()


def own_slices(name: str, shape: list[int], tp: int, rank: int) -> tuple[slice, ...]:
    """The part of a tensor that a rank keeps: an equal share of its rows, of row-parallel linears of its columns."""
    whole = [slice(0, size) for size in shape]
    if len(shape) == 2 and shape[0] > 1 and shape[1] > 1:
        dim = 1 if any(module in name for module in ROW_PARALLEL) else 0
        whole[dim] = slice(shape[dim] * rank // tp, shape[dim] * (rank + 1) // tp)
    return tuple(whole)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-bare"]:
        as_bare(sys.argv[2], sys.argv[3], sys.argv[4], *map(int, sys.argv[5:]))
    else:
        main()
