"""llama.cpp: its own llama-bench for prefill and llama-batched-bench for decode, on a GGUF file.

Their tokens are random and nothing is sampled. llama-batched-bench times all decode steps together, so there the
"median" is a mean. llama-quantize keeps the head of Q8_0 in Q8_0 and that of Q4_0 in Q6_K (the table is the head).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
from peer_frame import REPETITIONS, WARM_UP_TOKENS, Job, Recipe, facts, one_line, parse, say, timed
from safetensors import safe_open

RECIPES = {"bf16": Recipe("BF16"), "int8": Recipe("Q8_0", head="Q8_0"), "int4": Recipe("Q4_0", head="Q6_K")}
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    job = parse("llamacpp")
    recipe = RECIPES[job.precision]
    try:
        file = prepared(job, recipe.name)
        if not job.prepare:
            version = (job.home / "ready").read_text().split(",")[0]
            measure(job, facts(job, version, recipe), file)
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", "") or ""
        reason = f"{one_line(error)} {said.strip().splitlines()[-1][:200] if said.strip() else ''}".strip()
        say(**facts(job, "unknown", recipe), error=reason)


def prepared(job: Job, name: str) -> Path:
    """The GGUF file of a type, made on first use from the one in bfloat16."""
    whole, file = (job.converted(each).with_suffix(".gguf") for each in ("BF16", name))
    if not whole.exists():
        whole.parent.mkdir(exist_ok=True)
        write_gguf(job.model, whole)
    if not file.exists():
        run(job, "llama-quantize", str(whole), f"{file}.partial", name, str(job.threads))
        Path(f"{file}.partial").rename(file)
    return file


def write_gguf(model: Path, file: Path) -> None:
    """A checkpoint as a GGUF file in bfloat16, without a vocabulary.

    The rows of q and k stay in Hugging Face's order: with random weights only the speed is of interest.
    """
    config = json.loads((model / "config.json").read_text())
    partial = f"{file}.partial"
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config.get("max_position_embeddings", 8192))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 not a dictionary
                weight = tensors.get_tensor(name).float().numpy()
                kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.BF16
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(partial).rename(file)


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in NAMES:
        return f"{NAMES[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def run(job: Job, program: str, *arguments: str) -> list[str]:
    """The lines that one of its programs prints. Raises CalledProcessError where it fails."""
    command = [str(job.home / "build/bin" / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def measure(job: Job, known: dict[str, Any], file: Path) -> None:
    common = ["-m", str(file), "-t", str(job.threads)]
    if job.prefill:
        lengths = ",".join(map(str, job.prefill))
        for line in run(job, "llama-bench", *common, "-p", lengths, "-n", "0", "-r", str(REPETITIONS), "-o", "jsonl"):
            found = json.loads(line)
            length, seconds = found["n_prompt"], [nanoseconds / 1e9 for nanoseconds in found["samples_ns"]]
            say(**known, **timed({"kind": "prefill", "batch": 1, "length": length}, seconds, length))
    if job.decode:
        context = max(job.decode) * (job.prompt_len + job.new_tokens)
        sizes = ["-npp", str(job.prompt_len), "-ntg", f"{WARM_UP_TOKENS},{job.new_tokens}", "-c", str(context)]
        batches = ["-npl", ",".join(map(str, job.decode)), "--output-format", "jsonl"]
        lines = run(job, "llama-batched-bench", *common, "-tb", str(job.threads), *sizes, *batches)
        for found in (json.loads(line) for line in lines if line.startswith("{")):
            if found["tg"] == job.new_tokens:
                shape = {"kind": "decode", "batch": found["pl"], "length": job.prompt_len}
                say(**known, **timed(shape, [found["t_tg"] / found["tg"]], found["pl"]))


if __name__ == "__main__":
    main()
