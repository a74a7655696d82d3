"""What a Llama is: `LlamaConfig`, frozen and validated once, here. No torch.

Every checkpoint format is first translated to Hugging Face's config spelling by its reader, so the
rules below, and the user's overrides, hold for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpllama.architectures import architecture_of
from tpllama.config import UserError

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

# Parameters each RoPE type needs, and those it may have besides `rope_theta` and `rope_type`.
ROPE_TYPES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (frozenset({"short_factor", "long_factor"}), frozenset({"factor", "attention_factor"})),
    "llama3": (frozenset({"factor", "low_freq_factor", "high_freq_factor"}), frozenset()),
}

# Fields of config.json that this program reads.
_READ = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "model_type",
        "eos_token_id",
        "quantization_config",
    ]
)

# Fields that don't change the logits: descriptions, training and generation settings, and the
# names that transformers writes into every config.
_INERT = frozenset(
    (
        *("architectures", "auto_map", "name_or_path", "dtype", "torch_dtype", "use_cache", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "dropout", "pretraining_tp", "bos_token_id", "pad_token_id"),
        *("sep_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("is_llama_config", "is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"),
        *("cross_attention_hidden_size", "task_specific_params", "tokenizer_class", "prefix", "problem_type"),
        *("id2label", "label2id", "num_labels", "return_dict", "output_hidden_states", "output_attentions"),
        *("torchscript", "use_bfloat16", "pruned_heads", "chunk_size_feed_forward", "finetuning_task"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "tf_legacy_loss"),
        *("transformers_version", "transformers.js_config", "gradient_checkpointing", "attn_implementation"),
    )
)
# Fields that are harmless at one value and change the computation at any other.
_HARMLESS_AT: dict[str, Any] = {"rope_interleaved": False, "partial_rotary_factor": 1.0, "use_sliding_window": False}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its type, base period and the parameters of that type."""

    rope_type: str
    theta: float
    original_max_position: int
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that define a Llama's computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    max_position: int
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_hf(fields: Mapping[str, Any]) -> LlamaConfig:
        """Reads Hugging Face's config.json, in its old and new spelling of RoPE.

        Raises UserError for a missing or impossible value, and for a field that may change the
        computation and is not understood.
        """
        model_type = fields.get("model_type", "llama")
        if model_type != "llama":
            raise UserError(f"found model_type {model_type!r}, expected 'llama', use a Llama checkpoint")
        architecture_of(fields)
        _refuse_unknown(fields)
        num_heads = _positive(fields, "num_attention_heads")
        hidden_size = _positive(fields, "hidden_size")
        config = LlamaConfig(
            vocab_size=_positive(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(fields, "intermediate_size"),
            num_layers=_positive(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(fields, "num_key_value_heads", num_heads),
            head_dim=_positive(fields, "head_dim", hidden_size // num_heads),
            hidden_act=str(fields.get("hidden_act") or "silu"),
            norm_eps=float(_number("rms_norm_eps", _given(fields, "rms_norm_eps", 1e-6))),
            max_position=_positive(fields, "max_position_embeddings", 2048),
            rope=_rope(fields),
            attention_bias=_flag(fields, "attention_bias"),
            mlp_bias=_flag(fields, "mlp_bias"),
            tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
            eos_token_ids=token_ids(fields.get("eos_token_id")),
        )
        config._validate()
        return config

    def _validate(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"found {self.num_heads} attention heads and {self.num_kv_heads} key-value heads, "
                f"expected a multiple, correct num_key_value_heads in the model's config"
            )
        if self.head_dim % 2:
            raise UserError(f"found head_dim {self.head_dim}, expected an even number, RoPE rotates pairs")
        if self.head_dim < 4 and self.rope.rope_type == "dynamic":
            raise UserError(f"found head_dim {self.head_dim} with dynamic RoPE, expected at least 4")
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(f"found hidden_act {self.hidden_act!r}, expected one of {', '.join(ACTIVATIONS)}")
        for name in ("short_factor", "long_factor"):
            factors = self.rope.parameters.get(name)
            if factors is not None and len(factors) != self.head_dim // 2:
                raise UserError(f"found {len(factors)} values in {name}, expected head_dim / 2 = {self.head_dim // 2}")


def merge(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `overrides` laid over them; nested objects merge, they do not replace."""
    merged = dict(fields)
    for key, value in overrides.items():
        old = merged.get(key)
        both_objects = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both_objects else value  # type: ignore[arg-type]
    return merged


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, a list of ids or none, as configs spell eos, as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 31 for each in ids):
        raise UserError(f"found eos_token_id {value!r}, expected a token id or a list of them")
    return tuple(ids)


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _READ or name in _INERT or name.startswith(("_", "unsloth_")) or value in (None, False):
            continue
        if name in _HARMLESS_AT and value == _HARMLESS_AT[name]:
            continue
        raise UserError(
            f"found field {name!r} = {json.dumps(value, default=str)[:60]} in the model's config, which may change the "
            f"computation and is not supported, expected a plain Llama, to ignore the field add "
            f"--json-model-override-args '{{\"{name}\": null}}'"
        )


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


# Far above any Llama: what is larger is a damaged config, and would only exhaust memory.
_LARGEST = {"num_hidden_layers": 4096, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16}
_LARGEST |= {"head_dim": 1 << 16, "max_position_embeddings": 1 << 30}


def _positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _given(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UserError(f"found {name} = {value!r} in the model's config, expected a positive integer")
    limit = _LARGEST.get(name, 1 << 24)
    if value > limit:
        raise UserError(f"found {name} = {value} in the model's config, expected at most {limit}, correct it")
    return value


def _number(name: str, value: Any) -> Any:
    """`value`, which must be a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"found {name} = {value!r} in the model's config, expected a positive number")
    return value


def _numbers(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise UserError(f"found {name} = {value!r} in the model's config, expected a list of positive numbers")
    return tuple(_number(name, each) for each in value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = _given(fields, name, False)
    if not isinstance(value, bool):
        raise UserError(f"found {name} = {value!r} in the model's config, expected true or false")
    return value


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    """RoPE settings from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    given = _rope_fields(fields)
    rope_type = given.pop("rope_type", "default")
    if not isinstance(rope_type, str):
        raise UserError(f"found RoPE type {rope_type!r}, expected one of {', '.join(ROPE_TYPES)}")
    theta = _number("rope_theta", given.pop("rope_theta", 10000.0))
    # Phi-3's spelling, outside the RoPE object, has priority, as in transformers.
    inner = given.pop("original_max_position_embeddings", None) or _positive(fields, "max_position_embeddings", 2048)
    original = _number("original_max_position_embeddings", _given(fields, "original_max_position_embeddings", inner))
    if given.pop("partial_rotary_factor", 1) != 1:
        raise UserError("found partial_rotary_factor in the RoPE settings, expected 1.0, partial rotation is no Llama")
    if rope_type not in ROPE_TYPES:
        raise UserError(f"found RoPE type {rope_type!r}, expected one of {', '.join(ROPE_TYPES)}")
    required, optional = ROPE_TYPES[rope_type]
    missing = sorted(required - given.keys())
    if missing:
        raise UserError(f"found RoPE type {rope_type!r} without {', '.join(missing)}, expected it in the config")
    unknown = sorted(given.keys() - required - optional)
    if unknown and rope_type != "default":
        known = ", ".join(sorted(required | optional))
        raise UserError(
            f"found {', '.join(unknown)} in the RoPE settings, expected {known} alone for RoPE type {rope_type!r}, "
            f"remove the others"
        )
    parameters = {name: _rope_parameter(name, value) for name, value in given.items() if name not in unknown}
    return RopeConfig(rope_type, float(theta), int(original), parameters)


def _rope_parameter(name: str, value: Any) -> Any:
    if name in ("short_factor", "long_factor"):
        return _numbers(name, value)
    return _flag({name: value}, name) if name == "truncate" else _number(name, value)


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings in one. Raises UserError where they contradict each other: one of them would go unheard."""
    merged: dict[str, Any] = {}
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        given = fields.get(name)
        given = {"rope_theta": given} if name == "rope_theta" and given is not None else given or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise UserError(f"found {name} = {json.dumps(given)[:60]}, expected one flat object for all layers")
        given = {"rope_type": given.get("type"), **given}
        for key, value in given.items():
            if value is not None and key != "type" and merged.setdefault(key, value) != value:
                raise UserError(
                    f"found {key} = {merged[key]!r} and {key} = {value!r} among rope_theta, rope_scaling and "
                    f"rope_parameters, expected one, change it where the config has it, or set the other to null"
                )
    return merged
