"""transformers, eager, with dynamic cache and `generate`: bfloat16, and quantized by its torchao integration.

The head stays in bfloat16: the integration leaves it out by default, and it is the embedding table here.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import transformers
from peer_frame import Job, Recipe, facts, measure, one_line, parse, say
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

RECIPES = {
    "bf16": {"eager": None},
    "int8": {
        "eager, torchao Int8DynamicActivationInt8Weight": Int8DynamicActivationInt8WeightConfig,
        "eager, torchao Int8WeightOnly": Int8WeightOnlyConfig,
    },
    "int4": {
        "eager, torchao Int4WeightOnly group 128, opaque": lambda: Int4WeightOnlyConfig(
            group_size=128, int4_packing_format="opaque"
        ),
        "eager, torchao Int8DynamicActivationIntxWeight int4 group 32": lambda: Int8DynamicActivationIntxWeightConfig(
            torch.int4, PerGroup(32)
        ),
    },
}


class Stamps:
    """A streamer that notes when each step's tokens came; its first call is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


def load(job: Job, config: Any) -> Any:
    quantization = {"quantization_config": TorchAoConfig(config())} if config else {}
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, **quantization).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def main() -> None:
    job = parse("transformers")
    torch.set_num_threads(job.threads)
    if job.prepare:
        return
    for name, config in RECIPES[job.precision].items():
        recipe = Recipe(name)
        try:
            model = load(job, config)
        except Exception as error:  # noqa: BLE001 said as this recipe's failure
            say(**facts(job, transformers.__version__, recipe), error=one_line(error))
            continue

        def run(prompts: list[list[int]], new_tokens: int, model: Any = model) -> list[float]:
            ids = torch.tensor(prompts)
            stamps = Stamps()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, streamer=stamps
            )
            return stamps.seconds()

        measure(job, transformers.__version__, recipe, run)
        del model


if __name__ == "__main__":
    with torch.inference_mode():
        main()
