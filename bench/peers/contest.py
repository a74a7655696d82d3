"""Contestants: tpllama's candidates and the peers. Runs processes; knows no peer by name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peers.peer_frame import REPETITIONS
from peers.ratios import OURS, Measurement, Sizes, Workload


class Contestant(Protocol):
    """Somebody who can be measured at a precision, in processes that end with the measurement."""

    @property
    def name(self) -> str: ...

    def prepare(self, precision: str) -> str | None:
        """Converts the model where that is needed; why it can't take part, or None."""

    def run(self, precision: str, sizes: Sizes, number: int) -> Iterator[Measurement]: ...


@dataclass(frozen=True)
class Peer:
    """A worker of peers/, in the environment that its set-up made."""

    name: str
    script: Path
    home: Path
    model: Path
    threads: int
    timeout_s: float

    def missing(self) -> str | None:
        if (self.home / "ready").exists():
            return None
        return f"not set up, run bench/peers/setup_{self.name}.sh"

    def command(self, precision: str, *more: str) -> list[str]:
        python = str(self.home / "venv/bin/python")
        common = ["--model", str(self.model), "--home", str(self.home), "--threads", str(self.threads)]
        return [python, str(self.script), *common, "--precision", precision, *more]

    def prepare(self, precision: str) -> str | None:
        lines, reason = run_process(self.command(precision, "--prepare"), self.threads, self.timeout_s)
        return next((line["error"] for line in records(lines) if "error" in line), reason)

    def run(self, precision: str, sizes: Sizes, number: int) -> Iterator[Measurement]:
        shapes = ["--prefill", *map(str, sizes.prefill), "--decode", *map(str, sizes.decode)]
        texts = ["--prompt-len", str(sizes.prompt_len), "--new-tokens", str(sizes.new_tokens)]
        lines, reason = run_process(self.command(precision, *shapes, *texts), self.threads, self.timeout_s)
        for line in records(lines):
            workload = Workload(line["kind"], line["batch"], line["length"]) if "kind" in line else None
            yield Measurement(
                number, self.name, precision, line["recipe"], line.get("head_quantized", False), workload,
                line.get("tokens_per_s"), line,
            )  # fmt: skip
        if reason:
            yield Measurement(number, self.name, precision, "", False, None, None, {"error": reason})


@dataclass(frozen=True)
class Ours:
    """tpllama with one recipe and placement, through bench/latency.py."""

    script: Path
    model: Path
    recipe: str
    quantize_head: bool
    tp: int
    threads: int
    timeout_s: float

    @property
    def name(self) -> str:
        head = " + head" if self.quantize_head else ""
        return f"{OURS} {self.recipe}{head}, TP {self.tp} x {self.threads_per_rank}"

    @property
    def threads_per_rank(self) -> int:
        return self.threads // self.tp

    def prepare(self, precision: str) -> str | None:
        return None

    def run(self, precision: str, sizes: Sizes, number: int) -> Iterator[Measurement]:
        """Prefill and decode in a process each: the lists of latency.py are multiplied with each other.

        Each shape as often as peer_frame.py does it: several prefills, one run of decode steps.
        """
        prefill = ("prefill", [1], sizes.prefill, 1, REPETITIONS)
        decode = ("decode", sizes.decode, [sizes.prompt_len], sizes.new_tokens, 1)
        for kind, batches, lengths, output_len, repeat in (prefill, decode):
            if not batches or not lengths:
                continue
            for line in self._latency(batches, lengths, output_len, repeat):
                shape = Workload(kind, line["batch_size"], line["input_len"]) if "batch_size" in line else None
                speed = line.get("prefill_throughput" if kind == "prefill" else "median_decode_throughput")
                yield Measurement(
                    number, OURS, precision, self.name.removeprefix(f"{OURS} "), self.quantize_head, shape, speed, line
                )

    def _latency(
        self, batches: Sequence[int], lengths: Sequence[int], output_len: int, repeat: int
    ) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.jsonl"
            command = [sys.executable, str(self.script), "--model", str(self.model), "--tp", str(self.tp)]
            command += ["--torchao-config", self.recipe, *(["--quantize-lm-head"] if self.quantize_head else [])]
            shape = ["--batch-size", *map(str, batches), "--input-len", *map(str, lengths)]
            name = ["--run-name", "compare", "--result-filename", str(result)]
            whole = [*command, *shape, "--output-len", str(output_len), "--repeat", str(repeat), *name]
            _, reason = run_process(whole, self.threads_per_rank, self.timeout_s)
            lines = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
        return [*lines, {"error": reason}] if reason else lines


def run_process(command: Sequence[str], threads: int, timeout_s: float) -> tuple[list[str], str | None]:
    """The lines that a process prints, and, in one line, why it failed; with it end all that it started."""
    root = str(Path(__file__).parents[2])
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": root if command[0] == sys.executable else ""}
    form = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
    with tempfile.TemporaryFile(**form) as out, tempfile.TemporaryFile(**form) as err:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=err, text=True, env=env, start_new_session=True)
        except OSError as error:
            return [], f"{type(error).__name__}: {error}"
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        said = [line for line in err.read().splitlines() if line.strip()]
        lines = out.read().splitlines()
    if code == 0:
        return lines, None
    why = f"no end within {timeout_s:g} s" if code is None else f"exit code {code}"
    return lines, f"{why}: {said[-1].strip()[:300]}" if said else why


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON lines of a worker among what else was printed."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "peer" in found:
            yield found
