"""What a config may say, and the one line that each impossible value gets."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpllama.config import EngineConfig, UserError
from tpllama.llama_config import LlamaConfig, merge, token_ids

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "truncate": False},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def read(**changes: Any) -> LlamaConfig:
    return LlamaConfig.from_hf(PLAIN | changes)


def error(**changes: Any) -> str:
    """The one line that `changes` give."""
    with pytest.raises(UserError) as caught:
        read(**changes)
    message = str(caught.value)
    assert message.startswith("found ")
    assert "\n" not in message
    return message


def test_a_plain_config_has_transformers_defaults() -> None:
    config = read(num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_dim, config.hidden_act, config.norm_eps) == (4, 16, "silu", 1e-6)
    assert (config.rope.rope_type, config.rope.theta, config.rope.original_max_position) == ("default", 10000.0, 256)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)


def test_every_field_that_transformers_writes_is_known() -> None:
    from transformers import LlamaConfig as TransformersConfig

    fields = json.loads(TransformersConfig(**PLAIN).to_json_string(use_diff=False))
    assert LlamaConfig.from_hf(fields).hidden_size == 64


# Values that can't be.


def test_another_model_type_is_named() -> None:
    assert "'mistral'" in error(model_type="mistral")


def test_an_unknown_activation_is_named_with_those_known() -> None:
    message = error(hidden_act="swiglu")
    assert "'swiglu'" in message
    assert "gelu_pytorch_tanh" in message


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.0, "64", True, [64]])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    assert f"{name} = {value!r}" in error(**{name: value})


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "64", True])
def test_optional_sizes_are_positive_integers(name: str, value: Any) -> None:
    assert f"{name} = {value!r}" in error(**{name: value})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(UserError, match="vocab_size = None"):
        LlamaConfig.from_hf({name: value for name, value in PLAIN.items() if name != "vocab_size"})


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 8), (6, 4)])
def test_heads_are_a_multiple_of_kv_heads(heads: int, kv_heads: int) -> None:
    message = error(num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert f"{heads} attention heads and {kv_heads} key-value heads" in message


def test_an_odd_head_dim_is_refused() -> None:
    assert "head_dim 15" in error(head_dim=15)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", ["false", 1, []])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    assert f"{name} = {value!r}" in error(**{name: value})


@pytest.mark.parametrize("value", ["1e-5", 0, -1e-5, float("nan"), float("inf"), True])
def test_the_norms_epsilon_is_a_positive_number(value: Any) -> None:
    assert f"rms_norm_eps = {value!r}" in error(rms_norm_eps=value)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), ([], ())], ids=["none", "one", "many", "empty"]
)
def test_eos_is_one_id_or_many_or_none(value: Any, expected: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == token_ids(value) == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, None], [[2]], {"id": 2}, -1, 1 << 31, [2, 10**30]])
def test_other_forms_of_eos_are_refused(value: Any) -> None:
    assert "eos_token_id" in error(eos_token_id=value)


# Fields that may change the computation.

STRANGE: dict[str, Any] = {
    "sliding_window": 4096,
    "use_sliding_window": True,
    "attention_multiplier": 0.5,
    "final_logit_softcapping": 30.0,
    "layer_types": ["full_attention"],
    "partial_rotary_factor": 0.5,
    "rope_interleaved": True,
}


@pytest.mark.parametrize(("name", "value"), STRANGE.items())
def test_a_field_that_may_change_the_computation_is_refused_and_its_remedy_works(name: str, value: Any) -> None:
    message = error(**{name: value})
    assert f"{name!r} = {json.dumps(value)}" in message
    remedy = re.search(r"--json-model-override-args '(.*)'$", message)
    assert remedy
    assert LlamaConfig.from_hf(merge(PLAIN | {name: value}, json.loads(remedy[1]))) == read()


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": None},
        {"use_sliding_window": False},
        {"partial_rotary_factor": 1.0},
        {"some_new_switch": False},
        {"_attn_implementation_autoset": True},
        {"unsloth_version": "2025.1"},
        {"dtype": "bfloat16", "use_cache": True, "pretraining_tp": 2, "architectures": ["LlamaForCausalLM"]},
    ],
    ids=str,
)
def test_fields_without_effect_are_ignored(harmless: dict[str, Any]) -> None:
    assert read(**harmless) == read()


# RoPE.


@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_spellings_of_rope_mean_the_same(rope_type: str, type_key: str) -> None:
    old = read(rope_theta=5e5, rope_scaling={type_key: rope_type, **SCALINGS[rope_type]})
    new = read(rope_parameters={"rope_type": rope_type, "rope_theta": 5e5, **SCALINGS[rope_type]})
    assert old == new
    assert (old.rope.rope_type, old.rope.theta) == (rope_type, 5e5)
    assert set(old.rope.parameters) == SCALINGS[rope_type].keys() - {"original_max_position_embeddings"}


def test_both_spellings_at_once_are_fine_when_they_agree() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    both = read(rope_theta=5e5, rope_scaling=linear, rope_parameters=linear | {"rope_theta": 5e5})
    assert both == read(rope_theta=5e5, rope_scaling=linear)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"factor": 2.0}},
    ],
    ids=["theta", "type", "factor"],
)
def test_spellings_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    assert "expected one" in error(**changes)


def test_the_older_type_key_gives_way() -> None:
    """Phi-3's configs say both `type: su` and `rope_type: longrope`."""
    assert (
        read(rope_scaling={"type": "su", "rope_type": "longrope", **SCALINGS["longrope"]}).rope.rope_type == "longrope"
    )


def test_null_rope_settings_are_none() -> None:
    assert read(rope_scaling=None, rope_parameters=None, rope_theta=None) == read()
    assert read(rope_parameters={"rope_type": None, "factor": None}) == read()


def test_an_unknown_rope_type_is_named_with_those_known() -> None:
    message = error(rope_scaling={"rope_type": "mrope", "factor": 2.0})
    assert "'mrope'" in message
    assert "longrope" in message


@pytest.mark.parametrize(
    ("rope_type", "name"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_a_missing_rope_parameter_is_named(rope_type: str, name: str) -> None:
    given = {key: value for key, value in SCALINGS[rope_type].items() if key != name}
    assert f"{rope_type!r} without {name}" in error(rope_scaling={"rope_type": rope_type, **given})


def test_a_rope_parameter_of_another_type_is_named() -> None:
    assert "beta_fast" in error(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 32})


@pytest.mark.parametrize("value", ["4", 0, -2.0, True, [2.0], float("inf")])
def test_rope_factors_are_positive_numbers(value: Any) -> None:
    assert f"factor = {value!r}" in error(rope_scaling={"rope_type": "linear", "factor": value})


@pytest.mark.parametrize("name", ["rope_theta", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["10000", -1, 0])
def test_rope_numbers_outside_the_rope_object_are_positive(name: str, value: Any) -> None:
    assert f"{name} = {value!r}" in error(**{name: value})


@pytest.mark.parametrize("value", [2.0, [1.0] * 7, [1.0] * 7 + ["1"], [1.0] * 7 + [0]], ids=repr)
def test_longrope_factors_are_one_number_per_pair(value: Any) -> None:
    assert "short_factor" in error(
        rope_scaling={"rope_type": "longrope", **SCALINGS["longrope"], "short_factor": value}
    )


@pytest.mark.parametrize("value", ["linear", [4.0], {"full_attention": {"rope_type": "default"}}], ids=repr)
def test_rope_settings_are_one_flat_object(value: Any) -> None:
    assert "expected one flat object" in error(rope_parameters=value)


def test_partial_rotation_is_refused() -> None:
    assert "partial_rotary_factor" in error(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


def test_the_trained_length_outside_the_rope_object_has_priority() -> None:
    config = read(rope_scaling={"rope_type": "llama3", **SCALINGS["llama3"]}, original_max_position_embeddings=32)
    assert config.rope.original_max_position == 32


# Overrides.


def test_nested_overrides_merge_and_others_replace() -> None:
    fields = {"a": 1, "rope": {"x": 1, "deep": {"y": 2}}, "list": [1, 2]}
    overrides = {"rope": {"deep": {"z": 3}, "x": None}, "list": [3], "new": {"w": 4}}
    expected = {"a": 1, "rope": {"x": None, "deep": {"y": 2, "z": 3}}, "list": [3], "new": {"w": 4}}
    assert merge(fields, overrides) == expected


JSON_OBJECTS = st.recursive(
    st.integers() | st.none(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(JSON_OBJECTS, JSON_OBJECTS)
@settings(max_examples=100, deadline=None)
def test_merging_keeps_its_arguments_and_every_value_of_the_overrides(fields: Any, overrides: Any) -> None:
    before = json.dumps([fields, overrides])
    merged = merge(fields, overrides)
    assert json.dumps([fields, overrides]) == before
    assert merge(merged, overrides) == merged
    assert merge(fields, {}) == fields
    assert {*merged} == {*fields, *overrides}
    assert all(merged[key] == value for key, value in overrides.items() if not isinstance(value, dict))


# The engine's options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float64"),
        ("device", "tpu"),
        ("compile", "yes"),
        ("load_format", "gguf"),
        ("tp", 0),
        ("max_batch_size", 0),
        ("max_seq_len", 1),
        ("model", None),
        ("torchao_config", None),
        ("torchao_config", 5),
        ("llama_model", 5),
        ("json_model_override_args", "x"),
        ("json_model_override_args", 1),
    ],
)
def test_impossible_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"found {name} .*{value}.*, expected"):
        EngineConfig(**{name: value})
