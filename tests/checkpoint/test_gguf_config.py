"""GGUF metadata in config.json's spelling, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tpllama.checkpoint.gguf import GgufCheckpoint
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

EMBEDDINGS = {"token_embd.weight": (np.zeros((40, 64), np.float32), "F32")}
ZEROS = (np.zeros((64,), np.float32), "F32")


@pytest.fixture
def config(write_gguf: Any, tiny_metadata: dict[str, Any]) -> Any:
    """LlamaConfig of a tiny file, with metadata and tensors added."""

    def read(added: dict[str, Any], tensors: dict[str, Any] | None = None) -> LlamaConfig:
        path = write_gguf(tiny_metadata | added, EMBEDDINGS | (tensors or {}))
        return LlamaConfig.from_hf(GgufCheckpoint(path).fields)

    return read


def test_plain_values(config: Any) -> None:
    plain = config({"llama.rope.freq_base": 500000.0})
    assert (plain.vocab_size, plain.hidden_size, plain.intermediate_size, plain.num_layers) == (40, 64, 96, 2)
    assert (plain.num_heads, plain.num_kv_heads, plain.head_dim, plain.max_position) == (4, 2, 16, 128)
    assert (plain.norm_eps, plain.rope.theta, plain.rope.rope_type) == (1e-5, 500000.0, "default")
    assert (plain.attention_bias, plain.mlp_bias, plain.tie_word_embeddings) == (False, False, True)


def test_untied_and_biased_are_seen_by_their_tensors(config: Any) -> None:
    assert not config({}, {"output.weight": EMBEDDINGS["token_embd.weight"]}).tie_word_embeddings
    assert config({}, {"blk.0.attn_q.bias": ZEROS}).attention_bias
    assert config({}, {"blk.0.ffn_up.bias": ZEROS}).mlp_bias


def test_vocabulary_is_as_large_as_the_embeddings(config: Any) -> None:
    assert config({"llama.vocab_size": 39}).vocab_size == 40


def test_head_dim_is_the_stated_one(config: Any) -> None:
    dims = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    assert config(dict.fromkeys(dims, 32)).head_dim == 32


@pytest.mark.parametrize("key", ["llama.attention.value_length", "llama.rope.dimension_count"])
def test_head_dims_that_differ(config: Any, fails: Any, key: str) -> None:
    fails(lambda: config({key: 8}), key, "16")


def test_eos_token_ids(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 9, "tokenizer.ggml.eot_token_id": 8, "tokenizer.ggml.eom_token_id": 9}
    checkpoint = GgufCheckpoint(write_gguf(tiny_metadata | ids))
    assert checkpoint.eos_token_ids == (9, 8)
    assert LlamaConfig.from_hf(checkpoint.fields).eos_token_ids == (9, 8)


@pytest.mark.parametrize(
    "scaling",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling(config: Any, scaling: dict[str, Any]) -> None:
    rope = config(scaling).rope
    assert (rope.rope_type, rope.parameters) == ("linear", {"factor": 4.0})


@pytest.mark.parametrize(
    "scaling",
    [{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scaling.type": "yarn"}],
)
def test_no_scaling(config: Any, scaling: dict[str, Any]) -> None:
    assert config(scaling).rope.rope_type == "default"


def test_yarn_scaling(config: Any) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0}
    rope = config({f"llama.rope.scaling.{key}": value for key, value in scaling.items()}).rope
    assert (rope.rope_type, rope.original_max_position) == ("yarn", 32)
    assert rope.parameters == {"factor": 4.0, "beta_fast": 16.0}


def test_unknown_scaling(config: Any, fails: Any) -> None:
    fails(lambda: config({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}), "longrope")


def test_frequency_factors_are_longrope(config: Any) -> None:
    factors = np.linspace(1, 8, 8).astype(np.float32)
    rope = config({"llama.rope.freq_base": 500000.0}, {"rope_freqs.weight": (factors, "F32")}).rope
    assert (rope.rope_type, rope.theta, rope.parameters["attention_factor"]) == ("longrope", 500000.0, 1.0)
    for name in ("short_factor", "long_factor"):
        assert np.array_equal(np.float32(rope.parameters[name]), factors)


def test_llama_3_frequencies_survive_conversion(config: Any) -> None:
    """The converter stores Llama 3.1's scaling as factors; longrope gives the same frequencies back."""
    from transformers import LlamaConfig as HfConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    hf = HfConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0} | scaling
    )
    expected = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")[0].numpy()
    plain = 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    rope = config({"llama.rope.freq_base": 500000.0}, {"rope_freqs.weight": (np.float32(plain / expected), "F32")}).rope
    assert np.allclose(plain / rope.parameters["long_factor"], expected, rtol=1e-6)


def test_two_scalings(config: Any, fails: Any) -> None:
    factors = {"rope_freqs.weight": (np.ones(8, np.float32), "F32")}
    fails(lambda: config({"llama.rope.scaling.factor": 2.0}, factors), "rope_freqs.weight")


@pytest.mark.parametrize("key", ["head_count", "head_count_kv"])
def test_heads_per_layer(config: Any, fails: Any, key: str) -> None:
    fails(lambda: config({f"llama.attention.{key}": [4, 2]}), key, "per layer")


def test_feed_forward_length_per_layer(config: Any, fails: Any) -> None:
    fails(lambda: config({"llama.feed_forward_length": [96, 64]}), "llama.feed_forward_length", "per layer")


def test_experts(config: Any, fails: Any) -> None:
    assert config({"llama.expert_count": 0}).hidden_size == 64
    fails(lambda: config({"llama.expert_count": 8}), "8 experts")


def test_split_file(config: Any, fails: Any) -> None:
    assert config({"split.count": 1}).hidden_size == 64
    fails(lambda: config({"split.count": 3}), "several files")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"])
@pytest.mark.parametrize("value", [None, 0, "many"])
def test_missing_or_impossible_value(
    write_gguf: Any, tiny_metadata: dict[str, Any], fails: Any, key: str, value: Any
) -> None:
    del tiny_metadata[f"llama.{key}"]
    added = {} if value is None else {f"llama.{key}": value}
    fails(lambda: GgufCheckpoint(write_gguf(tiny_metadata | added)), f"llama.{key}", str(value))


def test_no_embeddings(write_gguf: Any, tiny_metadata: dict[str, Any], fails: Any) -> None:
    path = write_gguf(tiny_metadata, {"output_norm.weight": ZEROS})
    fails(lambda: GgufCheckpoint(path), "token_embd.weight")


def test_another_architecture(write_gguf: Any, tiny_metadata: dict[str, Any], fails: Any) -> None:
    path = write_gguf(tiny_metadata, architecture="qwen2")
    fails(lambda: GgufCheckpoint(path), "'qwen2'", str(path))


def test_an_unknown_setting_is_refused_by_name_and_can_be_overridden(config: Any) -> None:
    with pytest.raises(UserError, match=r"llama\.attention\.sliding_window"):
        config({"llama.attention.sliding_window": 4096})
    assert config({"llama.attention.sliding_window": 0}).hidden_size == 64
