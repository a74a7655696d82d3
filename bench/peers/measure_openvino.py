"""OpenVINO GenAI's LLMPipeline on the CPU, on what optimum-intel exports: its defaults for each weight format.

int8 keeps table and head in int8 too; int4 is the default mix of optimum-intel, whose head is int8. Activations are
quantized on the fly where the plugin's default says so.
"""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_frame import Job, Recipe, facts, made_whole, measure, one_line, parse, say

RECIPES = {
    "bf16": Recipe("weights fp16, computed in bf16", head="float16", options={"format": "fp16", "hint": "bf16"}),
    "int8": Recipe("int8", head="int8", options={"format": "int8"}),
    "int4": Recipe("int4, optimum-intel's default mix", head="int8", options={"format": "int4"}),
}


def prepare(job: Job, recipe: Recipe) -> None:
    folder = job.converted(recipe.options["format"])
    if (folder / "openvino_model.xml").exists():
        return
    command = [str(job.home / "venv/bin/optimum-cli"), "export", "openvino", "--model", str(job.model)]
    form = ["--task", "text-generation-with-past", "--weight-format", recipe.options["format"]]
    with made_whole(folder) as partial:
        done = subprocess.run(
            [*command, *form, str(partial)], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:]
            raise ValueError(f"optimum-cli export ended with {done.returncode}: {' '.join(said)}")


def load(job: Job, recipe: Recipe) -> Any:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
    if hint := recipe.options.get("hint"):
        options["INFERENCE_PRECISION_HINT"] = hint
    return openvino_genai.LLMPipeline(str(job.converted(recipe.options["format"])), "CPU", **options)


def main() -> None:
    job = parse("openvino")
    recipe, version = RECIPES[job.precision], openvino_genai.__version__
    try:
        prepare(job, recipe)
        pipeline = None if job.prepare else load(job, recipe)
    except Exception as error:  # noqa: BLE001 said as this peer's failure
        say(**facts(job, version, recipe), error=one_line(error))
        return
    if pipeline is None:
        return

    def run(prompts: list[list[int]], new_tokens: int) -> list[float]:
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        metrics = pipeline.generate(inputs, config).perf_metrics
        steps = np.diff(metrics.raw_metrics.m_new_token_times) / 1e3  # of the whole batch; milliseconds
        return [metrics.get_ttft().mean / 1e3, *steps.tolist()]

    measure(job, version, recipe, run)


if __name__ == "__main__":
    main()
