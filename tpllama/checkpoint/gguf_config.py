"""GGUF's metadata of a Llama, in the spelling of Hugging Face's config.json.

Owns the translation. What the values mean, and which are possible, is LlamaConfig's concern.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tpllama.checkpoint.gguf_reader import MappedReader
from tpllama.config import UserError

_PLAIN = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
# Read below, or without effect on the logits.
_READ = frozenset(
    (
        *("vocab_size", "tensor_data_layout", "expert_count", "expert_used_count"),
        *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
        *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
        *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    )
)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_fields(reader: MappedReader, path: Path) -> dict[str, Any]:
    """The fields of config.json. Raises UserError where the file holds something other than a Llama."""
    architecture = reader.value("general.architecture")
    if architecture != "llama":
        raise UserError(f"found architecture {architecture!r} in {path}, expected 'llama', use a Llama checkpoint")
    if (reader.value("split.count") or 1) > 1:
        raise UserError(f"found {path}, one of several files of a model, expected one file, merge them (gguf-split)")
    given = {
        key.removeprefix("llama."): _scalar(reader, key, path) for key in reader.fields if key.startswith("llama.")
    }
    if given.get("expert_count"):
        raise UserError(f"found {given['expert_count']} experts in {path}, expected a dense Llama, use another model")
    for key in _REQUIRED:
        value = given.get(key)
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"found llama.{key} = {value} in {path}, expected a positive integer, convert the model again"
            )
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise UserError(f"found no tensor token_embd.weight in {path}, expected a whole model, download it again")
    fields: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu"}
    fields |= {name: given[key] for key, name in _PLAIN.items() if key in given}
    fields |= {
        "vocab_size": shapes["token_embd.weight"][0],
        "head_dim": _head_dim(given, path),
        "rope_parameters": _rope_parameters(reader, given, path),
        "attention_bias": any(".attn_" in name and name.endswith(".bias") for name in shapes),
        "mlp_bias": any(".ffn_" in name and name.endswith(".bias") for name in shapes),
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": list(eos_token_ids(reader)),
    }
    # A setting not known here may change the computation: under its own name LlamaConfig refuses it.
    fields |= {f"llama.{key}": value for key, value in given.items() if key not in _PLAIN and key not in _READ}
    return fields


def eos_token_ids(reader: MappedReader) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message."""
    found = [reader.value(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    return tuple(dict.fromkeys(int(value) for value in found if value is not None))


def _scalar(reader: MappedReader, key: str, path: Path) -> Any:
    value = reader.value(key)
    if isinstance(value, np.ndarray | list):
        raise UserError(f"found {key} = one value per layer in {path}, expected one for all, use another model")
    # Floats are stored in 32 bits: the shortest decimal that rounds to it is what was meant (1e-5).
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(given: dict[str, Any], path: Path) -> int:
    head_dim = given.get("attention.key_length", given["embedding_length"] // given["attention.head_count"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, head_dim) != head_dim:
            raise UserError(
                f"found llama.{key} = {given[key]} in {path}, expected the head dimension {head_dim}, use another model"
            )
    return int(head_dim)


def _rope_parameters(reader: MappedReader, given: dict[str, Any], path: Path) -> dict[str, Any]:
    theta = given.get("rope.freq_base", 10000.0)
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 1.0)) or 1.0
    kind = given.get("rope.scaling.type", "linear") if factor != 1.0 else "none"
    factors = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        if kind != "none":
            raise UserError(f"found rope_freqs.weight and llama.rope.scaling in {path}, expected one of them")
        # Llama 3.1's scaling, stored as divisors of the frequencies: longrope has exactly this form.
        values = [float(str(value)) for value in factors.data.astype(np.float32)]
        longrope = {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
        return longrope | {"rope_theta": theta}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UserError(f"found llama.rope.scaling.type {kind!r} in {path}, expected none, linear or yarn")
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if f"rope.scaling.{key}" in given:
                parameters[name] = given[f"rope.scaling.{key}"]
    return parameters
