"""Meta's params.json, in the spelling of Hugging Face's config.json.

Owns the translation, and what Meta's code knows without the file: the feed-forward size's formula, RoPE's scaling and
the context length. Which of the resulting values are possible is LlamaConfig's concern.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpllama.config import UserError

_LLAMA3_VOCABULARY = 128256
# (dim, n_layers) of Llama 3.2 1B and 3B, which differ from the other Llamas in what params.json does not say.
_LLAMA32 = ((2048, 16), (3072, 28))
# Where these have a value other than 0 or -1, the computation is that of another architecture.
_FOREIGN = frozenset(
    (
        *("moe", "moe_args", "use_qk_norm", "nope_layer_interval", "attention_chunk_size", "attn_temperature_tuning"),
        *("vision_args", "vision_chunk_size", "vision_num_cross_attention_layers", "sliding_window"),
    )
)
_ROPE = ("rope_theta", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor")
# Far above any Llama, and small enough for exact arithmetic on floats.
_LARGEST = 1 << 30


def config_fields(params: Mapping[str, Any], path: Path, stored_vocab_size: int | None = None) -> dict[str, Any]:
    """The fields of config.json.

    `path` is the file, for errors. `stored_vocab_size` is what the weights or the tokenizer say: Llama 1 and 2 leave
    the number open. Hidden size: multiple_of * ceil(int(ffn_dim_multiplier * int(2 * 4 * dim / 3)) / multiple_of),
    from FeedForward in Meta's llama-models. Raises UserError for a missing or impossible value, for quantized or
    adapted weights, and for other architectures.
    """
    given = params["model"] if isinstance(params.get("model"), Mapping) else params
    given = {key: value for key, value in given.items() if value is not None}
    _refuse_foreign(given, path)
    dim, num_layers, num_heads = (_integer(given, key, path) for key in ("dim", "n_layers", "n_heads"))
    if "head_dim" not in given and dim % num_heads:
        raise UserError(f"found dim {dim} and n_heads {num_heads} in {path}, expected a multiple, correct them")
    vocab_size = _vocab_size(given, path, stored_vocab_size)
    is_llama3 = vocab_size == _LLAMA3_VOCABULARY or given.get("use_scaled_rope") is True
    theta = _number(given, "rope_theta", path, 500000.0 if is_llama3 else 10000.0)
    norm_eps = _number(given, "norm_eps", path, 1e-5)
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": _intermediate_size(given, path, dim),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(given, "n_kv_heads", path, num_heads),
        "head_dim": _integer(given, "head_dim", path, dim // num_heads),
        "rms_norm_eps": norm_eps,
        "max_position_embeddings": _integer(
            given, "max_seq_len", path, _context_length(given, vocab_size, theta, norm_eps)
        ),
        "rope_theta": theta,
        # A guess, which the weights overrule: they hold the output head or they don't.
        "tie_word_embeddings": vocab_size == _LLAMA3_VOCABULARY and (dim, num_layers) in _LLAMA32,
    }
    # The old spelling, so that a user's override of one value of rope_scaling is merged into the others.
    if _scales_rope(given, path):
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": _number(given, "rope_scaling_factor", path, 32.0 if (dim, num_layers) in _LLAMA32 else 8.0),
            "low_freq_factor": _number(given, "rope_low_freq_factor", path, 1.0),
            "high_freq_factor": _number(given, "rope_high_freq_factor", path, 4.0),
            "original_max_position_embeddings": 8192,
        }
    return fields


def _refuse_foreign(given: Mapping[str, Any], path: Path) -> None:
    if given.get("quantization_args") or given.get("lora_args"):
        key = "quantization_args" if given.get("quantization_args") else "lora_args"
        raise UserError(
            f"found {key} {_short(given[key])} in {path}, expected bfloat16 weights (SpinQuant's Hadamard transform "
            f"before down_proj, QLoRA's branches beside int4 weights and int8 embeddings are no plain linears), use "
            f"the bfloat16 checkpoint with --torchao-config 8da4w-32"
        )
    for key, value in given.items():
        # The other settings that Meta's code doesn't know it ignores; most are of training and generation.
        is_foreign = key in _FOREIGN or (key.startswith("rope_") and key not in _ROPE)
        if is_foreign and value and value != -1:
            raise UserError(
                f"found {key} = {_short(value)} in {path}, which changes the computation, expected a plain text Llama "
                f"(1 to 3), use another model"
            )


def _vocab_size(given: Mapping[str, Any], path: Path, stored: int | None) -> int:
    if given.get("vocab_size", -1) != -1:
        return _integer(given, "vocab_size", path)
    if stored is None:
        raise UserError(
            f"found vocab_size -1 in {path}, and neither weights nor tokenizer.model beside it that tell the number, "
            f"expected one of them, write the number into the file"
        )
    return stored


def _intermediate_size(given: Mapping[str, Any], path: Path, dim: int) -> int:
    if "hidden_dim" in given:  # Mistral's files name the number itself.
        return _integer(given, "hidden_dim", path)
    size = int(2 * (4 * dim) / 3)
    if "ffn_dim_multiplier" in given:
        size = int(_number(given, "ffn_dim_multiplier", path) * size)
    multiple = _integer(given, "multiple_of", path, 256)
    return multiple * -(-size // multiple)


def _scales_rope(given: Mapping[str, Any], path: Path) -> bool:
    value = given.get("use_scaled_rope", False)
    if not isinstance(value, bool):
        raise UserError(f"found use_scaled_rope = {_short(value)} in {path}, expected true or false, correct it")
    return value


def _context_length(given: Mapping[str, Any], vocab_size: int, theta: float, norm_eps: float) -> int:
    """The published context length of the Llama that these settings are of; params.json does not say it."""
    if given.get("use_scaled_rope"):  # Llama 3.1 and later.
        return 131072
    if theta == 500000 or vocab_size == _LLAMA3_VOCABULARY:
        return 8192
    if theta >= 1e6:  # Code Llama.
        return 16384
    return 2048 if norm_eps == 1e-6 else 4096  # Llama 1, but for its largest; Llama 2.


def _integer(given: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
        raise UserError(
            f"found {key} = {_short(value)} in {path}, expected a whole number from 1 to {_LARGEST}, correct it"
        )
    return value


def _number(given: Mapping[str, Any], key: str, path: Path, default: float | None = None) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise UserError(f"found {key} = {_short(value)} in {path}, expected a number above 0, correct it")
    return float(value)


def _short(value: Any) -> str:
    return repr(value)[:80]
