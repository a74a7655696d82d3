"""vLLM on the CPU: bfloat16, and compressed-tensors checkpoints of our own making; its engine stepped in this process.

The head stays in bfloat16, as vLLM leaves out tied tables. int8 is W8A8 (a scale a row, activations quantized per
token); int4 has a scale per 128 weights and bfloat16 activations, or int8 ones where the processor has AMX: that is
vLLM's own choice.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peer_frame import Job, Recipe, facts, made_whole, measure, one_line, parse, say
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128
RECIPES = {
    "bf16": Recipe("bfloat16"),
    "int8": Recipe("compressed-tensors W8A8", options={"bits": 8}),
    "int4": Recipe("compressed-tensors W4A16 group 128", options={"bits": 4}),
}


def prepared(job: Job, recipe: Recipe) -> Path:
    """The checkpoint of a recipe, made on first use."""
    bits = recipe.options.get("bits")
    if not bits:
        return job.model
    folder = job.converted(f"int{bits}")
    if (folder / "config.json").exists():
        return folder
    with made_whole(folder) as partial:
        for shard in sorted(job.model.glob("*.safetensors")):
            with safe_open(shard, "pt") as tensors:
                pairs = ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 not a dictionary
                save_file(dict(item for pair in pairs for item in quantized(*pair, bits)), partial / shard.name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (partial / file).write_text((job.model / file).read_text())
        config = json.loads((job.model / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps({**config, "quantization_config": scheme(bits)}))
    return folder


def quantized(name: str, weight: torch.Tensor, bits: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A linear's tensors in compressed-tensors' form, symmetric; any other tensor as it is."""
    if not name.endswith("_proj.weight"):
        yield name, weight
        return
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, columns if bits == 8 else GROUP)
    top = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / top
    integers = (groups / scale).round().clamp(-top - 1, top).view(rows, columns).to(torch.int32)
    yield f"{name}_scale", scale.squeeze(-1).to(torch.bfloat16)
    if bits == 8:
        yield name, integers.to(torch.int8)
        return
    nibbles = (integers + 8).view(rows, columns // 8, 8)
    packed = sum(nibbles[..., place].long() << 4 * place for place in range(8))
    yield f"{name}_packed", torch.as_tensor(packed).where(packed < 2**31, packed - 2**32).to(torch.int32)
    yield f"{name}_shape", torch.tensor([rows, columns])


def scheme(bits: int) -> dict[str, Any]:
    common = {"num_bits": bits, "type": "int", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False}}
    if bits == 8:
        group["input_activations"] = {**common, "strategy": "token", "dynamic": True}
    else:
        group["weights"] |= {"strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def measure_recipe(job: Job, recipe: Recipe, folder: Path) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt, __version__

    most = max([1, *job.decode])
    llm = LLM(
        str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=max(job.longest, 128),
        max_num_seqs=most, max_num_batched_tokens=max(512, most * job.prompt_len, *job.prefill),
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    engine = llm.llm_engine
    number = 0

    def run(prompts: list[list[int]], new_tokens: int) -> list[float]:
        nonlocal number
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        times = [time.perf_counter()]
        for prompt in prompts:
            engine.add_request(str(number := number + 1), TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        if len(times) != new_tokens + 1:
            raise ValueError(f"found {len(times) - 1} steps with tokens, expected {new_tokens}")
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    measure(job, __version__, recipe, run)


def main() -> None:
    job = parse("vllm")
    recipe = RECIPES[job.precision]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job.threads - 1}", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    try:
        folder = prepared(job, recipe)
        if not job.prepare:
            measure_recipe(job, recipe, folder)
    except Exception as error:  # noqa: BLE001 said as this recipe's failure
        say(**facts(job, "unknown", recipe), error=one_line(error))


if __name__ == "__main__":
    main()
