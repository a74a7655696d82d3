"""What the workers of all peers share: their command line, prompts, timing and the lines they print.

A worker, measure_NAME.py, runs in the peer's own environment and imports nothing of tpllama. It is called as

    python measure_NAME.py --model DIR --home HOME --precision P --threads T [--prefill 128 512] [--decode 1 8 32]
        [--prompt-len 32] [--new-tokens 32] [--prepare]

where DIR is a checkpoint in Hugging Face form and HOME the folder that its set-up made; converted checkpoints lie in
HOME/models and are made with --prepare, which measures nothing. It prints a JSON line for each measurement:

    peer, version, precision, recipe (the peer's own words), head (what the output head is kept in), head_quantized,
    kind ("prefill" or "decode"), batch, length (tokens of a prompt), tokens_per_s (summed over the batch), median_s,
    steps (how many times median_s is the median of)

or, where something could not be measured, the same without the last three and with "error". Prompts are random token
ids, new for each use; texts are greedy and go on past any end of sequence. A warm-up of each shape comes before it;
one that takes very long is itself what is measured. A prefill is repeated REPETITIONS times; of decode, one run of all
new tokens gives the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

REPETITIONS = 3  # of a prefill
WARM_UP_TOKENS = 4
SLOW_S = 15.0  # a warm-up that takes longer than this is the measurement
Run = Callable[[list[list[int]], int], list[float]]


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do."""

    peer: str
    model: Path
    home: Path
    precision: str
    threads: int
    prefill: list[int]
    decode: list[int]
    prompt_len: int
    new_tokens: int
    prepare: bool

    @property
    def vocab_size(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        decode = self.prompt_len + self.new_tokens if self.decode else 0
        return max([decode, *(length + 1 for length in self.prefill)])

    def converted(self, recipe: str) -> Path:
        """Where the checkpoint lies that was made for a recipe."""
        return self.home / "models" / f"{self.model.name}-{recipe}"

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        draw = random.Random(time.perf_counter_ns())
        return [draw.choices(range(self.vocab_size), k=length) for _ in range(batch)]


@dataclass(frozen=True)
class Recipe:
    """A way in which a peer keeps weights: its own word, the head's type, and the options that only it reads."""

    name: str
    head: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def head_quantized(self) -> bool:
        return self.head not in ("bfloat16", "float16", "float32")


def parse(peer: str) -> Job:
    parser = argparse.ArgumentParser(prog=f"measure_{peer}", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--precision", choices=("bf16", "int8", "int4"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--decode", type=int, nargs="*", default=[])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prepare", action="store_true")
    return Job(peer=peer, **vars(parser.parse_args()))


def facts(job: Job, version: str, recipe: Recipe) -> dict[str, Any]:
    return {
        "peer": job.peer, "version": version, "precision": job.precision, "recipe": recipe.name, "head": recipe.head,
        "head_quantized": recipe.head_quantized,
    }  # fmt: skip


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def timed(shape: dict[str, Any], seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """The fields of a measurement: of these seconds each gave so many tokens."""
    middle = median(seconds)
    return {**shape, "tokens_per_s": tokens / middle, "median_s": middle, "steps": len(seconds)}


def measure(job: Job, version: str, recipe: Recipe, run: Run) -> None:
    """Measures all shapes of a job with a peer that runs in this process.

    run(prompts, new_tokens) gives the seconds to the first new token of all prompts, and of each step after it.
    """
    known = facts(job, version, recipe)
    shapes = [("prefill", 1, length) for length in job.prefill]
    shapes += [("decode", batch, job.prompt_len) for batch in job.decode]
    for kind, batch, length in shapes:
        shape = {"kind": kind, "batch": batch, "length": length}
        try:
            seconds = measured(job, kind, batch, length, run)
        except Exception as error:  # noqa: BLE001 a peer may raise anything; the other shapes are still wanted
            say(**known, **shape, error=one_line(error))
            continue
        say(**known, **timed(shape, seconds, batch * length if kind == "prefill" else batch))


def measured(job: Job, kind: str, batch: int, length: int, run: Run) -> list[float]:
    """Seconds of each prefill, or of each decode step, after a warm-up that doesn't count unless it was very slow."""
    new_tokens = 1 if kind == "prefill" else job.new_tokens
    seconds = run(job.prompts(batch, length), min(new_tokens, WARM_UP_TOKENS))
    if sum(seconds) < SLOW_S:
        times = REPETITIONS if kind == "prefill" else 1
        runs = [run(job.prompts(batch, length), new_tokens) for _ in range(times)]
        return [each[0] for each in runs] if kind == "prefill" else runs[0][1:]
    return seconds if kind == "prefill" else seconds[1:]


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Where to write a folder that is to be there whole or not at all; what an interrupted process left is removed."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
