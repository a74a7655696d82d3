"""Many requests through the engine, offline: requests and tokens per second, and what a step costs beside the model.

    python bench/throughput.py [--model M | --shape 1b] [--tp 2] [--num-prompts 64] [--input-len 128]
        [--output-len 64] [--concurrency 1 8 32] [--shared-prefix N] [--run-name S] [--result-filename F]
        and the flags of `tpllama generate` for model, ranks, weights and cache

All requests are there from the start; at most as many run at once as --concurrency says, one measurement each, in
this order (name one twice to measure it twice). Prompts are random token ids, new for each measurement; the texts
are greedy and go on to their full length. --shape has a config of that shape and random weights. With
--shared-prefix all prompts of a measurement begin with the same N tokens, and each is made twice on the
same prompts: without prefix caching, then with it.

    input, output, total   tokens of all prompts, of all texts, and both, by the time from first to last
    decode                 new tokens a second of the median step in which every place is taken by a text, and no prompt
    step                   median time of such a step
    python                 of it, what isn't the executor's: scheduling, committing, detokenizing
    broadcast              of it, what the leader takes to tell the other ranks: pickling and sending
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from command import model_name, open_model, parser_for, run
from record import append, surroundings
from steps import Step, StepLog

from tpllama import LLM, SamplingParams
from tpllama.config import UserError

if TYPE_CHECKING:
    from tpllama.cli import Parser
    from tpllama.engine.engine import Engine
    from tpllama.engine.request import Output

HEADER = (
    "concurrency  caching  requests/s   input/s  output/s   total/s  decode/s   step ms  python ms"
    "  broadcast ms (share)"
)
_WARM_UP_TOKENS = 8


@dataclass
class Measured:
    """What one measurement gave."""

    concurrency: int
    places: int  # texts in a step
    prefix_caching: bool
    seconds: float
    outputs: list[Output]
    steps: list[Step]
    found: int
    preempted: int
    decodes: list[Step] = field(init=False)

    def __post_init__(self) -> None:
        self.decodes = [step for step in self.steps if step.new == self.places and not step.computed]

    @property
    def prompt_tokens(self) -> int:
        return sum(output.prompt_tokens for output in self.outputs)

    @property
    def completion_tokens(self) -> int:
        return sum(output.completion_tokens for output in self.outputs)

    def rates(self) -> dict[str, float]:
        """Per second, from the first request to the last token."""
        counts = {
            "requests_per_s": len(self.outputs), "input_tokens_per_s": self.prompt_tokens,
            "output_tokens_per_s": self.completion_tokens, "total_tokens_per_s": self.prompt_tokens
            + self.completion_tokens,
        }  # fmt: skip
        return {name: round(count / self.seconds, 3) for name, count in counts.items()}

    def decode(self) -> dict[str, float | None]:
        """Of the steps in which all places are taken by texts; None where there was none."""
        steps = self.decodes
        if not steps:
            names = ("decode_tokens_per_s", "median_decode_tokens_per_s", "step_ms", "python_ms", "gap_ms",
                     "broadcast_ms", "broadcast_share")  # fmt: skip
            return dict.fromkeys(names)
        told, period = (median(getattr(step, name) for step in steps) for name in ("told", "period"))
        return {
            "decode_tokens_per_s": round(sum(step.new for step in steps) / sum(step.period for step in steps), 3),
            "median_decode_tokens_per_s": round(steps[0].new / period, 3),
            "step_ms": round(median(step.whole for step in steps) * 1e3, 4),
            "python_ms": round(median(step.python for step in steps) * 1e3, 4),
            "gap_ms": round(median(step.gap for step in steps) * 1e3, 4),
            "broadcast_ms": round(told * 1e3, 4),
            "broadcast_share": round(told / median(step.whole for step in steps), 5),
        }

    def record(self) -> dict[str, Any]:
        ids = json.dumps([output.token_ids for output in self.outputs]).encode()
        return {
            "concurrency": self.concurrency, "prefix_caching": self.prefix_caching, "seconds": round(self.seconds, 4),
            **self.rates(), **self.decode(), "steps": len(self.steps), "decode_steps": len(self.decodes),
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "computed_prompt_tokens": sum(step.computed for step in self.steps), "found_prompt_tokens": self.found,
            "preempted": self.preempted, "outputs_digest": blake2b(ids, digest_size=8).hexdigest(),
        }  # fmt: skip

    def row(self) -> str:
        rates, decode = self.rates(), self.decode()
        numbers = [
            *((rates[name], 10, 2) for name in rates), (decode["median_decode_tokens_per_s"], 10, 1),
            (decode["step_ms"], 10, 2), (decode["python_ms"], 11, 3), (decode["broadcast_ms"], 9, 3),
        ]  # fmt: skip
        cells = [f"{number:{width}.{digits}f}" if number is not None else "-".rjust(width)
                 for number, width, digits in numbers]  # fmt: skip
        share = f" ({decode['broadcast_share']:.2%})" if decode["broadcast_share"] is not None else ""
        caching = "on" if self.prefix_caching else "off"
        return f"{self.concurrency:>11}  {caching:>7}  {''.join(cells)}{share}"


def parser() -> Parser:
    parser = parser_for("throughput", __doc__)
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N")
    parser.add_argument("--input-len", type=int, default=128, metavar="I", help="beside a shared prefix")
    parser.add_argument("--output-len", type=int, default=64, metavar="O")
    parser.add_argument("--concurrency", type=int, nargs="+", metavar="C", help="default: as many as may be")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="N")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what can't be measured."""
    if arguments.shared_prefix < 0:
        raise UserError(f"found --shared-prefix {arguments.shared_prefix}, expected at least 0")
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise UserError(f"found --{name.replace('_', '-')} {getattr(arguments, name)}, expected at least 1")
    most = min(arguments.max_batch_size, arguments.num_prompts)
    arguments.concurrency = arguments.concurrency or [most]
    if not 1 <= min(arguments.concurrency) <= max(arguments.concurrency) <= most:
        raise UserError(
            f"found --concurrency {arguments.concurrency}, expected 1 to {most}, the lower of --max-batch-size and "
            f"--num-prompts"
        )
    if arguments.shared_prefix and not (arguments.prefix_caching and not arguments.batch_invariant):
        raise UserError("found --shared-prefix without prefix caching, expected to measure both ways, drop the flag")


def measure_all(arguments: argparse.Namespace) -> None:
    check(arguments)
    with ExitStack() as stack:
        measure_with(open_model(arguments, stack), arguments)


def measure_with(llm: LLM, arguments: argparse.Namespace) -> None:
    log = StepLog(llm.engine)
    longest, limit = (
        arguments.shared_prefix + arguments.input_len + arguments.output_len,
        llm.engine.limits.context_length,
    )
    if longest > limit:
        raise UserError(f"found {longest} tokens of prompt and text, expected at most {limit}, lower --output-len")
    facts = describe(arguments, llm)
    print(HEADER)
    for number, concurrency in enumerate(arguments.concurrency):
        ways = (False, True) if arguments.shared_prefix else (llm.engine.scheduler.policy.prefix_caching,)
        results = []
        for prefix_caching in ways:
            with policy(llm.engine, concurrency, prefix_caching):
                warm_up(llm, arguments, concurrency)
                prompts = random_prompts(arguments, facts["vocab_size"], f"{arguments.seed} {number}")
                results.append(measure(llm, log, prompts, arguments.output_len, concurrency, prefix_caching))
            print(results[-1].row(), flush=True)
        same = compare(results) if len(results) > 1 else {}
        for result in results:
            if arguments.result_filename:
                line = {"bench": "throughput", **facts, **result.record(), **same}
                line["peak_memory_bytes_per_rank"] = llm.peak_memory_bytes()
                append(Path(arguments.result_filename), line)


@contextmanager
def policy(engine: Engine, concurrency: int, prefix_caching: bool) -> Iterator[None]:
    """Has the engine's scheduler run so many requests at once."""
    own = engine.scheduler.policy
    engine.scheduler.policy = dataclasses.replace(own, max_batch_size=concurrency, prefix_caching=prefix_caching)
    try:
        yield
    finally:
        engine.scheduler.policy = own


def warm_up(llm: LLM, arguments: argparse.Namespace, concurrency: int) -> None:
    """The same, in small: a few tokens of as many requests as run at once."""
    few = argparse.Namespace(**{**vars(arguments), "num_prompts": concurrency, "shared_prefix": 0})
    prompts = random_prompts(few, llm.blueprint.config.vocab_size, str(time.perf_counter_ns()))
    llm.generate(prompts, SamplingParams(max_new_tokens=min(_WARM_UP_TOKENS, arguments.output_len), ignore_eos=True))


def random_prompts(arguments: argparse.Namespace, vocab_size: int, seed: str) -> list[list[int]]:
    """Random ids: a prefix that is the same in all, then each prompt's own."""
    draw = random.Random(seed)
    prefix = draw.choices(range(vocab_size), k=arguments.shared_prefix)
    return [prefix + draw.choices(range(vocab_size), k=arguments.input_len) for _ in range(arguments.num_prompts)]


def measure(
    llm: LLM, log: StepLog, prompts: Sequence[list[int]], output_len: int, concurrency: int, prefix_caching: bool
) -> Measured:
    scheduler = llm.engine.scheduler
    found, preempted = scheduler.num_found, scheduler.num_preempted
    log.clear()
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=output_len, ignore_eos=True))
    seconds = time.perf_counter() - started
    places = 1 if scheduler.policy.alone else concurrency
    return Measured(
        concurrency, places, prefix_caching, seconds, outputs, list(log.steps), scheduler.num_found - found,
        scheduler.num_preempted - preempted,
    )  # fmt: skip


def compare(results: list[Measured]) -> dict[str, Any]:
    """How many texts are the same without and with prefix caching; what was computed and how long it took."""
    without, cached = results
    pairs = list(zip(without.outputs, cached.outputs, strict=True))
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    computed = [sum(step.computed for step in result.steps) for result in results]
    print(
        f"{'':>11}  {same} of {len(pairs)} texts are the same; prompts' tokens computed: {computed[0]} without, "
        f"{computed[1]} with; seconds: {without.seconds:.2f} without, {cached.seconds:.2f} with"
    )
    return {"same_outputs": same}


def describe(arguments: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """What was measured, on what."""
    from tpllama.start import resolve_device

    same = ("run_name", "shape", "dtype", "torchao_config", "quantize_lm_head", "compile", "batch_invariant",
            "kv_cache_dtype", "block_size", "max_batch_size", "max_batch_tokens", "chunked_prefill", "num_prompts",
            "input_len", "output_len", "shared_prefix", "seed")  # fmt: skip
    engine = llm.blueprint.engine
    return {
        **surroundings(), "model": model_name(arguments), "tp": engine.tp,
        "device": resolve_device(engine.device).type, **{name: getattr(arguments, name) for name in same},
        "vocab_size": llm.blueprint.config.vocab_size, "load_seconds": round(llm.load_seconds, 3),
    }  # fmt: skip


if __name__ == "__main__":
    run("throughput", parser(), measure_all)
