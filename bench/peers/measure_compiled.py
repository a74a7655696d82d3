"""What gpt-fast does, from PyPI's packages alone: transformers' static cache and torch.compile of the whole forward.

Prefill and decode are compiled apart and for each shape, in full graphs with static sizes, weights frozen (inductor
then packs bfloat16 weights for oneDNN), the new token chosen inside. Quantized by torchao; the head stays in bfloat16.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
import transformers
from peer_frame import Job, Recipe, facts, measure, one_line, parse, say
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, StaticCache

RECIPES = {
    "bf16": {"bfloat16": None},
    "int8": {
        "torchao Int8DynamicActivationInt8Weight": Int8DynamicActivationInt8WeightConfig,
        "torchao Int8WeightOnly": Int8WeightOnlyConfig,
    },
    "int4": {
        "torchao Int4WeightOnly group 128, opaque": lambda: Int4WeightOnlyConfig(
            group_size=128, int4_packing_format="opaque"
        )
    },
}
Step = Callable[[torch.Tensor, torch.Tensor, StaticCache], torch.Tensor]


def load(job: Job, config: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval().requires_grad_(False)
    if config:
        quantize_(model.model, config())
    return model


def step_of(model: Any) -> Step:
    """The forward that gives the next token of each text."""

    def step(ids: torch.Tensor, positions: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        out = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    return step


def main() -> None:
    job = parse("compiled")
    if job.prepare:
        return
    torch.set_num_threads(job.threads)
    inductor.freezing = True
    for name, config in RECIPES[job.precision].items():
        recipe = Recipe(f"static cache, torch.compile, {name}")
        try:
            model = load(job, config)
        except Exception as error:  # noqa: BLE001 said as this recipe's failure
            say(**facts(job, transformers.__version__, recipe), error=one_line(error))
            continue
        measure(job, transformers.__version__, recipe, Runs(job, model))
        del model


class Runs:
    """Runs the model; of each shape only the part that is measured is compiled, and only the last shape's is kept.

    Frozen weights are packed anew for each graph, so more graphs at once than one may not fit into memory.
    """

    def __init__(self, job: Job, model: Any) -> None:
        self.job, self.model = job, model
        self.eager = step_of(model)
        self.shape: tuple[int, int, bool] | None = None

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        ids = torch.tensor(prompts)
        batch, length = ids.shape
        if self.shape != (batch, length, new_tokens == 1):
            self.shape = (batch, length, new_tokens == 1)
            torch._dynamo.reset()
            self.compiled = torch.compile(self.eager, dynamic=False, fullgraph=True)
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.job.longest)
            self.eager(ids, torch.arange(length).repeat(batch, 1), self.cache)  # makes the cache's tensors
            self._run(ids, min(new_tokens, 3))  # compiles, which is not to be timed
        return self._run(ids, new_tokens)

    def _run(self, ids: torch.Tensor, new_tokens: int) -> list[float]:
        batch, length = ids.shape
        self.cache.reset()
        first = self.compiled if new_tokens == 1 else self.eager
        times = [time.perf_counter()]
        ids = first(ids, torch.arange(length).repeat(batch, 1), self.cache)
        times.append(time.perf_counter())
        for number in range(new_tokens - 1):
            ids = self.compiled(ids, torch.full((batch, 1), length + number), self.cache)
            times.append(time.perf_counter())
        return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    with torch.inference_mode():
        main()
