"""params.json: the published Llamas' settings give their config.json; what is not a plain Llama is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpllama.checkpoint.meta_config import config_fields
from tpllama.llama_config import LlamaConfig, merge

PATH = Path("params.json")
TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 40, "multiple_of": 32}
LLAMA32_1B = {
    "dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.5,
    "multiple_of": 256, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
LLAMA31_8B = LLAMA32_1B | {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
LLAMA32_3B = LLAMA32_1B | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0}
LLAMA31_405B = LLAMA31_8B | {
    "dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096
}  # fmt: skip
LLAMA3_70B = {
    "dim": 8192, "ffn_dim_multiplier": 1.3, "multiple_of": 4096, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80,
    "norm_eps": 1e-05, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA2_7B = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1}
LLAMA2_70B = LLAMA2_7B | {
    "dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80
}  # fmt: skip
LLAMA1_7B = LLAMA2_7B | {"norm_eps": 1e-06}
CODE_LLAMA = LLAMA2_7B | {"rope_theta": 1000000}


# intermediate_size, RoPE's base, context length, RoPE's factor, tied.
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (LLAMA32_1B, (8192, 500000.0, 131072, 32.0, True)),
        (LLAMA32_3B, (8192, 500000.0, 131072, 32.0, True)),
        (LLAMA31_8B, (14336, 500000.0, 131072, 8.0, False)),
        (LLAMA31_405B, (53248, 500000.0, 131072, 8.0, False)),
        (LLAMA3_70B, (28672, 500000.0, 8192, None, False)),
        (LLAMA2_7B, (11008, 10000.0, 4096, None, False)),
        (LLAMA2_70B, (28672, 10000.0, 4096, None, False)),
        (LLAMA1_7B, (11008, 10000.0, 2048, None, False)),
        (CODE_LLAMA, (11008, 1e6, 16384, None, False)),
        ({key: value for key, value in LLAMA3_70B.items() if key != "rope_theta"}, (28672, 5e5, 8192, None, False)),
    ],
)
def test_published_models(params: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = LlamaConfig.from_hf(config_fields(params, PATH, 32000))
    assert expected == (
        config.intermediate_size,
        config.rope.theta,
        config.max_position,
        config.rope.parameters.get("factor"),
        config.tie_word_embeddings,
    )
    assert config.hidden_size == params["dim"]
    assert config.num_layers == params["n_layers"]
    assert config.num_heads == params["n_heads"]
    assert config.num_kv_heads == params.get("n_kv_heads", params["n_heads"])
    assert config.head_dim == params["dim"] // params["n_heads"]
    assert config.norm_eps == params["norm_eps"]
    assert config.vocab_size == (32000 if params["vocab_size"] == -1 else 128256)
    assert config.rope.rope_type == ("llama3" if "use_scaled_rope" in params else "default")


def test_scaled_rope_is_as_in_hugging_face() -> None:
    rope = LlamaConfig.from_hf(config_fields(LLAMA31_8B, PATH)).rope
    assert rope.original_max_position == 8192
    assert rope.parameters == {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_scaling_that_the_file_states_is_taken() -> None:
    stated = {"rope_scaling_factor": 16.0, "rope_high_freq_factor": 2.0, "rope_low_freq_factor": 0.5}
    rope = LlamaConfig.from_hf(config_fields(LLAMA32_1B | stated, PATH)).rope
    assert rope.parameters == {"factor": 16.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}


def test_the_user_can_override_one_value_of_the_scaling() -> None:
    fields = merge(config_fields(LLAMA32_1B, PATH), {"rope_scaling": {"factor": 8}})
    rope = LlamaConfig.from_hf(fields).rope
    assert rope.parameters == {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_defaults_nesting_and_settings_without_effect() -> None:
    plain = config_fields(TINY, PATH)
    assert plain["rms_norm_eps"] == 1e-5
    assert plain["intermediate_size"] == 192
    assert plain["num_key_value_heads"] == 4
    assert config_fields({"model": TINY}, PATH) == plain
    inert = {"max_batch_size": 32, "dtype": "bf16", "quantization_args": None, "lora_args": {}, "n_kv_heads": None}
    inert |= {"vision_chunk_size": -1, "vision_num_cross_attention_layers": -1, "use_qk_norm": False, "moe_args": None}
    assert config_fields(TINY | inert, PATH) == plain


def test_sizes_that_the_file_states_are_taken() -> None:
    fields = config_fields(TINY | {"max_seq_len": 77, "head_dim": 24, "hidden_dim": 100}, PATH)
    assert fields["max_position_embeddings"] == 77
    assert fields["head_dim"] == 24
    assert fields["intermediate_size"] == 100


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "vocab_size"])
@pytest.mark.parametrize("value", [0, True, "64", 64.0, [64], 10**400, -2])
def test_sizes_that_are_none(fails: Any, key: str, value: Any) -> None:
    fails(lambda: config_fields(TINY | {key: value}, PATH), key, repr(value)[:80], "params.json")


@pytest.mark.parametrize("key", ["norm_eps", "rope_theta", "ffn_dim_multiplier"])
@pytest.mark.parametrize("value", [0, -1.0, True, "1", float("nan"), float("inf"), 1e308])
def test_numbers_that_are_none(fails: Any, key: str, value: Any) -> None:
    fails(lambda: config_fields(TINY | {key: value}, PATH), key, repr(value), "params.json")


@pytest.mark.parametrize("key", ["dim", "n_layers", "n_heads"])
def test_missing_sizes(fails: Any, key: str) -> None:
    fails(lambda: config_fields({name: value for name, value in TINY.items() if name != key}, PATH), key, "None")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"n_heads": 3}, ("dim 64", "n_heads 3")),
        ({"vocab_size": -1}, ("vocab_size -1", "tokenizer.model")),
        ({"use_scaled_rope": 1}, ("use_scaled_rope",)),
        ({"quantization_args": {"spinquant": True, "group_size": 32}}, ("quantization_args", "Hadamard", "8da4w-32")),
        ({"lora_args": {"rank": 16, "scale": 2.0}}, ("lora_args", "rank", "8da4w-32")),
        ({"moe_args": {"num_experts": 16}}, ("moe_args",)),
        ({"moe": {"num_experts": 8}}, ("moe",)),
        ({"vision_chunk_size": 448}, ("vision_chunk_size",)),
        ({"vision_num_cross_attention_layers": 8}, ("vision_num_cross_attention_layers",)),
        ({"use_qk_norm": True}, ("use_qk_norm",)),
        ({"sliding_window": 4096}, ("sliding_window",)),
        ({"rope_scaling": {"type": "yarn"}}, ("rope_scaling",)),
    ],
)
def test_what_is_refused(fails: Any, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    fails(lambda: config_fields(TINY | change, PATH), "params.json", *parts)
