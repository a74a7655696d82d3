"""What a cache of keys and values in one byte a value costs in quality: --kv-cache-dtype int8 and fp8 against auto.

    python bench/kv_cache_quality.py [--model M] [--tp 1] [--tokens 1536] [--texts 6] [--new-tokens 64]
        [--result-filename F]

Texts are chapters of Python's own documentation (pydoc_data.topics), cut to --tokens. Each is scored token by token
through the paged cache, as `prompt_logprobs=100` gives it: every token attends to keys and values as they are stored,
its own included. The first line below `auto` is `auto` once more in steps of another size: what rounding alone does.
Each kind of cache is an LLM of its own, so not under torchrun, where a process has one in its life.

    perplexity  exp of the mean negative log-probability of the texts' own tokens
    KL          from auto, in nats a token, estimated on the 100 likeliest tokens of both: of the distributions in which
                all tokens that aren't in both lists are one. This is a lower bound of the whole one (data processing
                inequality); `covered` is how much of auto's probability is in the common tokens
    top-1       how often the likeliest token is the same
    parts at    the new token, counted from 0, at which each greedy text differs from auto's first; - where none does
"""

from __future__ import annotations

import argparse
import math
import sys
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from record import append, cpu_model, versions
from texts import chapters

from tpllama import LLM, SamplingParams
from tpllama.config import UserError
from tpllama.engine.request import Output, TokenLogprobs
from tpllama.quiet import quiet_libraries

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To bake a loaf of bread, you first",
    "The three laws of thermodynamics say that",
    "Here is a Python function that reverses a linked list:\n",
)
_COMMON = 100
# Name, --kv-cache-dtype, tokens and texts in a step. The first is what the others are compared with.
_WAYS = (
    ("auto", "auto", 512, 8),
    ("auto, other steps", "auto", 192, 2),
    ("int8", "int8", 512, 8),
    ("fp8", "fp8", 512, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        measure_all(arguments)
    except UserError as error:
        sys.exit(f"kv_cache_quality: error: {error}")


def measure_all(arguments: argparse.Namespace) -> None:
    facts = {
        "date": date.today().isoformat(), "model": arguments.model, "tp": arguments.tp, "texts": arguments.texts,
        "tokens": arguments.tokens, "new_tokens": arguments.new_tokens, "cpu": cpu_model(), "versions": versions(),
    }  # fmt: skip
    print(f"{'cache':<18} {'bytes/token':>11} {'perplexity':>10} {'KL':>9} {'covered':>8} {'top-1':>7}  parts at")
    reference: list[Output] = []
    for name, dtype, tokens, texts in _WAYS:
        try:
            bytes_per_token, outputs = run(arguments, dtype, max_batch_tokens=tokens, max_batch_size=texts)
        except RuntimeError as error:
            print(f"{name:<18} can't run: {error}")
            write(arguments, {**facts, "cache": name, "error": str(error)})
            continue
        reference = reference or outputs
        found = {
            "cache": name,
            "max_batch_tokens": tokens,
            "max_batch_size": texts,
            "bytes_per_token": bytes_per_token,
            **against(reference, outputs),
        }
        parts = " ".join("-" if at is None else str(at) for at in found["parts_at"])
        print(
            f"{name:<18} {bytes_per_token:>11} {found['perplexity']:>10.4f} {found['kl']:>9.6f} "
            f"{found['covered']:>8.3%} {found['top1']:>7.2%}  {parts}",
            flush=True,
        )
        write(arguments, {**facts, **found})


def write(arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
    if arguments.result_filename:
        append(Path(arguments.result_filename), {"bench": "kv_cache_quality", **fields})


def run(arguments: argparse.Namespace, dtype: str, **steps: int) -> tuple[int, list[Output]]:
    """Bytes that a token takes on the first rank; the scored texts, then the greedy ones."""
    with LLM(arguments.model, arguments.tp, kv_cache_dtype=dtype, **steps) as llm:
        texts = [llm.tokenizer.encode(text)[: arguments.tokens] for text in chapters(arguments.texts)]
        score = SamplingParams(max_new_tokens=1, prompt_logprobs=_COMMON, ignore_eos=True)
        greedy = SamplingParams(max_new_tokens=arguments.new_tokens)
        outputs = llm.generate(texts, score) + llm.generate(list(PROMPTS), greedy)
        return llm.engine.executor.cache_shape.bytes_per_token, outputs


def against(reference: list[Output], outputs: list[Output]) -> dict[str, Any]:
    """Figures of one way of storing, from what it gave and what the reference did."""
    own = [score for output in outputs for score in output.prompt_logprobs or ()]
    right = [score for output in reference for score in output.prompt_logprobs or ()]
    pairs = list(zip(right, own, strict=True))
    divergences, covered = zip(*(divergence(*pair) for pair in pairs), strict=True)
    greedy = [
        parting(one.token_ids, other.token_ids)
        for one, other in zip(reference, outputs, strict=True)
        if one.prompt_logprobs is None
    ]
    return {
        "scored_tokens": len(own), "perplexity": math.exp(-fmean(score.logprob for score in own)),
        "kl": fmean(divergences), "covered": fmean(covered),
        "top1": fmean(one.top[0][0] == other.top[0][0] for one, other in pairs), "parts_at": greedy,
    }  # fmt: skip


def divergence(right: TokenLogprobs, own: TokenLogprobs) -> tuple[float, float]:
    """Kullback-Leibler divergence, with the tokens that aren't in both lists as one; the others' probability."""
    likeliest = dict(own.top)
    common = [(logprob, likeliest[token]) for token, logprob in right.top if token in likeliest]
    rest, own_rest = (max(1 - math.fsum(math.exp(pair[side]) for pair in common), 1e-12) for side in (0, 1))
    inside = math.fsum(math.exp(p) * (p - q) for p, q in common)
    return inside + rest * math.log(rest / own_rest), 1 - rest


def parting(one: list[int], other: list[int]) -> int | None:
    """The first place at which two texts differ; the end of the shorter counts."""
    if one == other:
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
