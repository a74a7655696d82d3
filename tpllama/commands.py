"""What each command does: prepares, runs, and writes to the terminal. The only module that does the last."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.config import UserError
from tpllama.engine.llm import LLM, Preparation
from tpllama.engine.request import Output, SamplingParams, TokenLogprobs
from tpllama.parallel.launch import Death
from tpllama.parallel.place import resolve_tp, torchrun_place

if TYPE_CHECKING:
    from tpllama.blueprint import Blueprint
    from tpllama.engine.engine import Piece, Prompt

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def generate(arguments: argparse.Namespace) -> None:
    """Completes prompts: text to standard output as it comes, a summary line to standard error."""
    params = _sampling(arguments, n=arguments.n, logprobs=arguments.logprobs)
    preparation = _prepare(arguments)
    if preparation.place.rank > 0:
        LLM.prepared(preparation)
        return
    texts = _prompt_texts(arguments)
    use_template = preparation.tokenizer.has_chat_template and not arguments.raw
    prompts = [_prompt(preparation, text, use_template) for text in texts]
    with LLM.prepared(preparation) as llm:
        _say_quantized(llm.blueprint)
        printer = _JsonPrinter() if arguments.json else _TextPrinter(len(prompts), params.n)
        summary = _Summary()
        for piece in llm.pieces(prompts, [params] * len(prompts)):
            summary.add(piece)
            printer.add(piece)
        _note(summary.line(prompts, llm.peak_memory_bytes()))


def chat(arguments: argparse.Namespace) -> None:
    """A conversation: a line of the user, then the assistant's answer, until /exit or the end of input."""
    params = _sampling(arguments)
    preparation = _prepare(arguments)
    if preparation.place.rank == 0 and not preparation.tokenizer.has_chat_template:
        preparation.close()
        raise UserError("found no chat template in the model's tokenizer, expected one, use tpllama generate")
    messages: list[dict[str, Any]] = []
    with LLM.prepared(preparation) as llm:
        _say_quantized(llm.blueprint)
        while (line := _read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                messages.clear()
            elif line.startswith("/"):
                _note(f"found command {line.split()[0]}, expected /reset or /exit")
            elif line:
                _answer(llm, messages, line, params)


def _answer(llm: LLM, messages: list[dict[str, Any]], line: str, params: SamplingParams) -> None:
    messages.append({"role": "user", "content": line})
    text = ""
    try:
        for piece in llm.stream(messages, params):
            text += piece.text
            _write(piece.text)
    except UserError as error:
        messages.pop()  # the conversation goes on without what didn't fit
        _note(f"error: {error}")
        return
    _write("\n")
    messages.append({"role": "assistant", "content": text})


def plan(arguments: argparse.Namespace) -> None:
    """What each layer will become, from config and headers alone."""
    from tpllama.checkpoint.open import open_checkpoint
    from tpllama.config import EngineConfig
    from tpllama.start import draw_blueprint

    place = torchrun_place(os.environ)
    engine = EngineConfig(tp=resolve_tp(arguments.tp, place), **_engine_options(arguments))
    blueprint = draw_blueprint(engine, open_checkpoint(engine.model, weights=engine.load_format != "dummy"))
    if place is not None and place.rank > 0:
        return
    report = blueprint.report()
    _write(json.dumps(report) + "\n" if arguments.json else _plan_table(report))


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    same: tuple[str, ...] = (
        "model",
        "torchao_config",
        "quantize_lm_head",
        "dtype",
        "device",
        "max_seq_len",
        "seed",
        "compile",
    )
    same += ("load_format", "batch_invariant", "strict")
    options = {name: getattr(arguments, name) for name in same}
    return options | {"model_overrides": arguments.json_model_override_args}


def _prepare(arguments: argparse.Namespace) -> Preparation:
    return Preparation(tp=arguments.tp, debug=arguments.debug, on_rank_death=_end_run, **_engine_options(arguments))


def _end_run(death: Death) -> None:
    """The last resort, from a thread, where the main one hangs on a dead rank."""
    sys.stderr.write(f"tpllama: error: {death.describe()}\n")
    sys.stderr.flush()
    os._exit(2 if death.user_error else 1)


def _sampling(arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    same = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
    return SamplingParams(**{name: getattr(arguments, name) for name in same}, stop=tuple(arguments.stop), **more)


def _prompt_texts(arguments: argparse.Namespace) -> list[str]:
    texts = list(arguments.prompts)
    if arguments.prompts_file:
        texts += _lines(arguments.prompts_file)
    elif not texts and not sys.stdin.isatty():
        texts = [text] if (text := sys.stdin.read().strip("\n")) else []
    if not texts:
        raise UserError("found no prompt, expected one as an argument, in --prompts-file or on standard input")
    return texts


def _lines(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"found no readable prompts file {path} ({error}), give a text file") from None
    return [line for line in text.splitlines() if line.strip()]


def _prompt(preparation: Preparation, text: str, use_template: bool) -> Prompt:
    return preparation.chat_prompt([{"role": "user", "content": text}]) if use_template else preparation.prompt(text)


class _TextPrinter:
    """Texts in the order of their prompts: the first unfinished one streams, those after it wait."""

    def __init__(self, prompts: int, samples: int) -> None:
        self._order = [(index, sample) for index in range(prompts) for sample in range(samples)]
        self._waiting: dict[tuple[int, int], str] = dict.fromkeys(self._order, "")
        self._finished: set[tuple[int, int]] = set()

    def add(self, piece: Piece) -> None:
        key = (piece.index, piece.sample)
        self._waiting[key] += piece.text
        if piece.output:
            self._finished.add(key)
        while self._order:
            head = self._order[0]
            _write(self._waiting[head])
            self._waiting[head] = ""
            if head not in self._finished:
                return
            _write("\n")
            self._order.pop(0)


class _JsonPrinter:
    """One JSON object a line, each as soon as its text and all before it are finished."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], Output] = {}

    def add(self, piece: Piece) -> None:
        if piece.output:
            _write(json.dumps(_output_record(piece.output), ensure_ascii=False) + "\n")


def _output_record(output: Output) -> dict[str, Any]:
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
        record["logprobs"] = [_logprobs_record(each) for each in output.logprobs]
    return record


def _logprobs_record(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in logprobs.top]
    return {"token_id": logprobs.token_id, "logprob": logprobs.logprob, "top_logprobs": top}


class _Summary:
    """Counts and times of one run."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    def add(self, piece: Piece) -> None:
        self._tokens += 1
        if self._first is None:
            self._first = time.perf_counter()

    def line(self, prompts: list[Prompt], peak_memory_bytes: list[int]) -> str:
        now = time.perf_counter()
        first = self._first or now
        rate = (self._tokens - 1) / (now - first) if self._tokens > 1 else 0.0
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        counts = f"{prompt_tokens} prompt tokens, {self._tokens} new tokens"
        times = f"time to first token {first - self._started:.3f} s, {rate:.1f} tokens/s"
        return f"{counts}, {times}, peak memory {_human_bytes(max(peak_memory_bytes))} per rank"


def _say_quantized(blueprint: Blueprint) -> None:
    from tpllama.quantization.report import summarize

    for line in summarize(blueprint.decisions):
        _note(line)


def _plan_table(report: dict[str, Any]) -> str:
    """The plan for people; layers that differ only in their number share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in report["layers"]:
        parts = layer["name"].split(".")
        pattern = ".".join("*" if part.isdigit() else part for part in parts)
        local = " ".join(_shape(shape) for shape in _runs(layer["local_shapes"]))
        becomes = layer["recipe"] if layer["action"] == "quantized" else "kept"
        why = "" if layer["reason"] == "as asked" else layer["reason"]
        groups.setdefault((pattern, layer["plan"], _shape(layer["global_shape"]), local, becomes, why), []).append(
            pattern
        )
    header = ("LAYER", "COUNT", "PLAN", "SHAPE", "PER RANK", "BECOMES", "WHY")
    rows = [header] + [(key[0], str(len(names)), *key[1:]) for key, names in groups.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    lines = [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    legal = report["legal_tp"]
    weights = ", ".join(map(_human_bytes, report["bytes_per_rank"]))
    kv_cache = ", ".join(map(_human_bytes, report["kv_bytes_per_token_per_rank"]))
    facts = [
        f"model {report['model']}, tp {report['tp']} (legal: {legal[0]} to {legal[-1]}), recipe {report['recipe']}",
        f"weights per rank: {weights}",
        f"KV cache per token and rank: {kv_cache}",
    ]
    return "\n".join(line.rstrip() for line in facts + lines) + "\n"


def _runs(shapes: list[list[int]]) -> list[list[int]]:
    """One shape where all ranks have the same, all of them otherwise."""
    return shapes[:1] if all(shape == shapes[0] for shape in shapes) else shapes


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def _human_bytes(count: float) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _read_line() -> str | None:
    if sys.stdin.isatty():
        _write("> ")
    line = sys.stdin.readline()
    return line.strip() if line else None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(f"tpllama: {text}\n")
    sys.stderr.flush()
