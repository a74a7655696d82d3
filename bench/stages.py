"""Where a step's time goes, on the leader: `bench/latency.py --profile [DIR]`.

A table of the mean step of a prefill and of a decode, from timers around what the step consists of, and one trace of
torch's profiler for each of the two (Chrome's format, gzip), made in runs of their own: the profiler itself costs
time. What is inside another part is taken off it: a sum over ranks isn't the linear's.

    weights      linears, with what quantizes their inputs; on AMX gate and up with the activation between them
    attention    keys and values to the cache and attention over it, with its planning; of fused layers, RoPE too
    collectives  sums, maxima and messages between ranks, with the waiting for slower ones
    sampling     from logits to tokens
    scheduler    requests, batches, texts: the engine's own Python
    rest         embedding, norms, RoPE, activation functions, residuals; with --compile on, all of the layers
    idle         between two steps
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from steps import StepLog
from torch.profiler import ProfilerActivity, record_function

from tpllama import LLM, SamplingParams
from tpllama.engine.text import Prompt
from tpllama.kernels import own
from tpllama.kernels.layer import RecordedLayers
from tpllama.recording import Call, Recording

PARTS = ("weights", "attention", "collectives", "sampling", "scheduler", "rest", "idle")
_COLLECTIVES = ("sum", "max", "gather", "broadcast")
# Of our C functions, as steps are recorded in them.
_OF_FUNCTION = {"linear": "weights", "extremes": "weights", "attend": "attention", "reduce": "collectives"}
_TRACED_DECODES = 8


class Stopwatch:
    """Seconds of each part of the steps that it sees, without what of them is another part."""

    def __init__(self, is_cuda: bool) -> None:
        self._now = _now_on_gpu if is_cuda else time.perf_counter
        self._inside: list[str] = ["idle"]
        self._since = self._now()
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time counted as `part`."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._switch()
            self._inside.append(part)
            try:
                with record_function(f"tpllama: {part}"):
                    return function(*arguments, **options)
            finally:
                self._switch()
                self._inside.pop()

        return wrapped

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        self._switch()
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken

    def _switch(self) -> None:
        now = self._now()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def _now_on_gpu() -> float:
    torch.cuda.synchronize()  # what was launched belongs to who launched it
    return time.perf_counter()


def instrument(llm: LLM) -> Stopwatch:
    """Has a stopwatch count what this process's engine does; for good, so this LLM is for nothing else any more."""
    engine: Any = llm.engine
    runner = getattr(engine.executor, "runner", engine.executor)
    watch = Stopwatch(runner.device.type == "cuda")
    _wrap(watch, engine, "step", "scheduler")
    _wrap(watch, runner, "run", "rest")
    _wrap(watch, runner.cache, "begin", "attention")
    for name in ("sample", "score"):
        _wrap(watch, runner.sampler, name, "sampling")
    is_compiled = llm.blueprint.engine.compile == "on"
    if not is_compiled:
        for layer in runner.cache.layers:
            _wrap(watch, layer, "attend", "attention")
            _wrap(watch, layer, "rotate_and_attend", "attention")
    if runner.ranks.size > 1:
        for name in _COLLECTIVES:
            _wrap(watch, runner.ranks, name, "collectives")
    for layers in runner.model.modules():
        if isinstance(layers, RecordedLayers):
            layers.forget()
    _time_recordings(watch)
    _wrap(watch, own, "gated", "weights")
    joint = [f"{name}.joint" for name, each in runner.model.named_modules() if getattr(each, "joint", None)]
    for name in (*llm.blueprint.decisions, *joint):
        linear = runner.model.get_submodule(name)
        if is_compiled and ".layers." in name:
            continue  # a graph has it
        _wrap(watch, linear, "forward", "weights")
        if getattr(linear, "agree_max", None):
            _wrap(watch, linear, "agree_max", "collectives")
    return watch


def _time_recordings(watch: Stopwatch) -> None:
    def replay(self: Recording) -> None:
        for call in self.calls:
            part = _OF_FUNCTION.get(call.function.__name__) if isinstance(call, Call) else "collectives"
            (watch.timed(part, call) if part else call)()

    Recording.replay = replay  # type: ignore[method-assign]


def _wrap(watch: Stopwatch, owner: Any, name: str, part: str) -> None:
    setattr(owner, name, watch.timed(part, getattr(owner, name)))


class Profiler:
    """Tables and traces of one LLM, whose steps `log` sees already."""

    def __init__(self, llm: LLM, log: StepLog) -> None:
        self._llm, self._log = llm, log
        self._watch = instrument(llm)
        self._steps: list[dict[str, float]] = []
        self._step = llm.engine.step
        llm.engine.step = self._counted_step  # type: ignore[method-assign]

    def _counted_step(self) -> bool:
        has_run = self._step()
        self._steps.append(self._watch.take())
        return has_run

    def profile(self, prompts: Sequence[list[int]], output_len: int, folder: str, name: str) -> None:
        """Prints the table and writes the traces `folder`/`name`-prefill.json.gz and -decode.json.gz."""
        self._log.clear()
        self._steps.clear()
        self._watch.take()
        self._llm.generate(list(prompts), SamplingParams(max_new_tokens=output_len, ignore_eos=True))
        pairs = list(zip(self._steps, self._log.steps, strict=True))
        stages = {
            "prefill": [parts for parts, seen in pairs if seen.computed],
            "decode": [parts for parts, seen in pairs if seen.new == len(prompts)],
        }
        print(table(name, stages), flush=True)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for stage in ("prefill", "decode"):
            path = Path(folder) / f"{name}-{stage}.json.gz"
            self._trace([ids[1:] + ids[:1] for ids in prompts], path, stage == "decode")
            if path.exists():
                print(f"wrote {path}", flush=True)

    def _trace(self, prompts: Sequence[list[int]], path: Path, is_decode: bool) -> None:
        """A trace of the prompts' steps, or of the first few that follow them."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        params = SamplingParams(max_new_tokens=_TRACED_DECODES + 1 if is_decode else 1, ignore_eos=True)
        self._log.clear()
        pieces = self._llm.pieces([Prompt(ids) for ids in prompts], [params] * len(prompts))
        while is_decode and not any(step.new == len(prompts) for step in self._log.steps):
            if next(pieces, None) is None:
                return  # there is no such step
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in pieces:
                pass
        profiler.export_chrome_trace(str(path))


def table(title: str, stages: dict[str, list[dict[str, float]]]) -> str:
    """Mean milliseconds of each part, and its share."""
    means = {
        stage: {part: fmean(step.get(part, 0.0) for step in steps) * 1e3 for part in PARTS}
        for stage, steps in stages.items()
        if steps
    }
    lines = [f"Where a step's time goes ({title}), milliseconds", " " * 12 + "".join(f"{stage:>18}" for stage in means)]
    for part in (*PARTS, "whole"):
        cells = []
        for parts in means.values():
            whole = sum(parts.values())
            own = whole if part == "whole" else parts[part]
            cells.append(f"{own:10.3f} {own / whole:7.1%}")
        lines.append(f"{part:<12}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
