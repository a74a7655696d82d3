"""What people see: texts in order, the summary line, the plan's table. Only errors are written elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tpllama.engine.request import Output, TokenLogprobs

if TYPE_CHECKING:
    from tpllama.engine.text import Piece

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def write(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about the run, to standard error."""
    sys.stderr.write(f"tpllama: {text}\n")
    sys.stderr.flush()


def text_of(line: str) -> str | None:
    """A line read from a stream without its white space, None at the stream's end."""
    return line.strip() if line else None


def progress_bar(what: str) -> Callable[[list[Any]], Iterable[Any]]:
    """A bar on standard error over what it is given, on a terminal; elsewhere nothing is shown."""

    def over(steps: list[Any]) -> Iterable[Any]:
        if not sys.stderr.isatty():
            return steps
        from tqdm import tqdm

        return tqdm(steps, desc=f"tpllama: {what}", unit="weight", leave=False, file=sys.stderr)

    return over


class InOrder:
    """Texts in the order of their prompts and samples: the first unfinished one streams, those after it wait.

    As JSON, one object a line, each when its text and all before it are finished.
    """

    def __init__(self, prompts: int, samples: int, as_json: bool) -> None:
        self._order = [(index, sample) for index in range(prompts) for sample in range(samples)]
        self._pending: dict[tuple[int, int], str] = dict.fromkeys(self._order, "")
        self._outputs: dict[tuple[int, int], Output] = {}
        self._as_json = as_json

    def add(self, piece: Piece) -> None:
        """Takes a piece, writes what is next in order."""
        key = (piece.index, piece.sample)
        self._pending[key] += piece.text
        if piece.output:
            self._outputs[key] = piece.output
        while self._order:
            head = self._order[0]
            if not self._as_json:
                write(self._pending[head])
                self._pending[head] = ""
            if head not in self._outputs:
                return
            write(json.dumps(_record(self._outputs[head]), ensure_ascii=False) + "\n" if self._as_json else "\n")
            self._order.pop(0)


def _record(output: Output) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": output.index,
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "sample": output.sample,
    }
    if output.logprobs is not None:
        record["logprobs"] = [_logprobs(each) for each in output.logprobs]
    return record


def _logprobs(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in logprobs.top]
    return {"token_id": logprobs.token_id, "logprob": logprobs.logprob, "top_logprobs": top}


class Summary:
    """Counts and times of one run, from its construction."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._started = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    def add(self, piece: Piece) -> None:
        """Counts a piece, which is one token at the most."""
        self._tokens += piece.token >= 0
        if self._first is None:
            self._first = time.perf_counter()

    def line(self, peak_memory_bytes: list[int]) -> str:
        """The summary, in words."""
        now = time.perf_counter()
        first = self._first or now
        rate = (self._tokens - 1) / (now - first) if self._tokens > 1 else 0.0
        counts = f"{self._prompt_tokens} prompt tokens, {self._tokens} new tokens"
        times = f"time to first token {first - self._started:.3f} s, {rate:.1f} tokens/s"
        return f"{counts}, {times}, peak memory {human_bytes(max(peak_memory_bytes))} per rank"


def plan_table(report: dict[str, Any]) -> str:
    """The plan for people; layers that differ only in their number share a row."""
    groups: dict[tuple[str, ...], int] = {}
    for layer in report["layers"]:
        name = ".".join("*" if part.isdigit() else part for part in layer["name"].split("."))
        local = _per_rank(list(map(_shape, layer["local_shapes"])))
        becomes = layer["recipe"] if layer["action"] == "quantized" else "kept"
        why = "" if layer["reason"] == "as asked" else layer["reason"]
        key = (name, layer["plan"], _shape(layer["global_shape"]), local, becomes, why)
        groups[key] = groups.get(key, 0) + 1
    rows: list[tuple[str, ...]] = [("LAYER", "COUNT", "PLAN", "SHAPE", "PER RANK", "BECOMES", "WHY")]
    rows += [(key[0], str(count), *key[1:]) for key, count in groups.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in _plan_facts(report) + lines) + "\n"


def _plan_facts(report: dict[str, Any]) -> list[str]:
    legal, cache = report["legal_tp"], report["kv_cache_bytes_per_rank"]
    caches = ", ".join(map(human_bytes, cache)) if cache else "of the memory that is left (or --kv-cache-memory)"
    return [
        f"model {report['model']}, tp {report['tp']} (legal: {legal[0]} to {legal[-1]}), recipe {report['recipe']}",
        f"weights per rank: {', '.join(map(human_bytes, report['bytes_per_rank']))}",
        f"KV cache per token and rank: {', '.join(map(human_bytes, report['kv_bytes_per_token_per_rank']))}",
        f"KV cache per rank: {caches}",
        *_kernels(report),
    ]


def _kernels(report: dict[str, Any]) -> list[str]:
    """For each kernel, what takes it."""
    becoming: dict[str, list[str]] = {}
    for layer in report["layers"]:
        if layer["kernel"]:
            becoming.setdefault(layer["kernel"], []).append(layer["recipe"])
    return [f"kernels of {', '.join(dict.fromkeys(recipes))}: {kernel}" for kernel, recipes in becoming.items()]


def _per_rank(shapes: list[str]) -> str:
    """One shape where all ranks have the same, otherwise each, with how many ranks have it where some are alike."""
    counts = Counter(shapes)
    if len(counts) == 1:
        return shapes[0]
    if len(counts) == len(shapes):
        return " ".join(shapes)
    return ", ".join(f"{shape} ({count})" for shape, count in counts.items())


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def human_bytes(count: float) -> str:
    """A count of bytes for people."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
