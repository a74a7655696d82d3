"""Rotary embeddings against transformers' own functions, at run time, over their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tpllama.llama_config import LlamaConfig
from tpllama.model.rope import RotaryEmbedding, inverse_frequencies, rotate

TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
Fields = dict[str, Any]


@st.composite
def fields(draw: st.DrawFn, rope_type: str) -> Fields:
    """A config in the new spelling."""
    head_dim = 2 * draw(st.integers(2, 64))
    theta = draw(st.sampled_from([1e4, 5e5, 1e6]) | st.floats(100, 1e7))
    rope = {"rope_type": rope_type, "rope_theta": theta, **draw(parameters(rope_type, head_dim // 2))}
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "head_dim": head_dim, "max_position_embeddings": 8192}
    return shape | heads | {"rope_parameters": rope}


@st.composite
def parameters(draw: st.DrawFn, rope_type: str, pairs: int) -> Fields:
    factor, trained = draw(st.floats(1, 64)), draw(st.integers(16, 8192))
    match rope_type:
        case "linear" | "dynamic":
            return {"factor": factor}
        case "yarn":
            return {"factor": factor, "original_max_position_embeddings": trained, **draw(yarn_options())}
        case "longrope":
            factors = st.lists(st.floats(1, 50), min_size=pairs, max_size=pairs)
            given = {"short_factor": draw(factors), "long_factor": draw(factors)}
            options = draw(st.sampled_from([{}, {"factor": factor}, {"attention_factor": 1.25}]))
            return given | {"original_max_position_embeddings": trained} | options
        case "llama3":
            low = draw(st.floats(0.5, 2))
            given = {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(1, 6))}
            return given | {"factor": factor, "original_max_position_embeddings": trained}
        case _:
            return {}


@st.composite
def yarn_options(draw: st.DrawFn) -> Fields:
    scales = st.floats(0.1, 2)
    ends = {"beta_fast": draw(st.floats(8, 64)), "beta_slow": draw(st.floats(0.5, 4))}
    attention = [
        {},
        {"attention_factor": draw(scales)},
        {"mscale": draw(scales)},
        {"mscale": draw(scales), "mscale_all_dim": draw(scales)},
    ]
    return (
        draw(st.sampled_from(attention))
        | draw(st.sampled_from([{}, {"truncate": False}]))
        | draw(st.sampled_from([{}, ends]))
    )


def theirs(given: Fields, length: int | None = None) -> tuple[Tensor, float]:
    config = transformers.LlamaConfig(**given)
    rope_type = given["rope_parameters"]["rope_type"]
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length and torch.tensor(length))


def assert_same_frequencies(found: Tensor, expected: Tensor, rtol: float = 2e-6) -> None:
    """To a few units in the last place: some sums are written in another order.

    llama3 mixes a frequency with a small part of itself by a difference that may cancel: there more.
    """
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("rope_type", TYPES)
def test_frequencies_and_attention_factor_are_transformers(rope_type: str) -> None:
    @given(fields(rope_type))
    @settings(max_examples=60, deadline=None)
    def check(given: Fields) -> None:
        found, factor = inverse_frequencies(LlamaConfig.from_hf(given))
        expected, expected_factor = theirs(given)
        assert_same_frequencies(found, expected, 1e-4 if rope_type == "llama3" else 2e-6)
        assert factor == expected_factor

    check()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_of_a_given_length_are_transformers(rope_type: str) -> None:
    @given(fields(rope_type), st.integers(1, 100_000))
    @settings(max_examples=60, deadline=None)
    def check(given: Fields, length: int) -> None:
        rotary = RotaryEmbedding(LlamaConfig.from_hf(given))
        cos, sin = rotary(torch.tensor([[1]]), torch.tensor([[length]]), torch.float64)
        frequencies, factor = theirs(given, length)
        angles = torch.cat((frequencies, frequencies))
        torch.testing.assert_close(cos.flatten().float(), angles.cos() * factor, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin.flatten().float(), angles.sin() * factor, rtol=0, atol=1e-6)

    check()


@pytest.mark.parametrize("rope_type", TYPES)
def test_the_trained_length_outside_the_rope_object_is_transformers(rope_type: str) -> None:
    @given(fields(rope_type), st.integers(16, 8192))
    @settings(max_examples=20, deadline=None)
    def check(given: Fields, trained: int) -> None:
        given = given | {"original_max_position_embeddings": trained}
        found, factor = inverse_frequencies(LlamaConfig.from_hf(given))
        expected, expected_factor = theirs(given)
        assert_same_frequencies(found, expected)
        assert factor == expected_factor

    check()


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_and_sines_are_transformers(rope_type: str, dtype: torch.dtype) -> None:
    @given(fields(rope_type), st.integers(1, 40))
    @settings(max_examples=15, deadline=None)
    def check(given: Fields, length: int) -> None:
        given = given | {"max_position_embeddings": 16}
        positions = torch.arange(length)[None]
        hidden = torch.zeros((), dtype=dtype)
        theirs_now = LlamaRotaryEmbedding(transformers.LlamaConfig(**given))(hidden, positions)
        ours = RotaryEmbedding(LlamaConfig.from_hf(given))(positions, torch.tensor([[length]]), dtype)
        # A cosine that lies between two bfloat16 numbers may be rounded to either.
        tolerance = 1e-5 if dtype == torch.float32 else 1 / 128
        for found, expected in zip(ours, theirs_now, strict=True):
            assert found.dtype == expected.dtype == dtype
            torch.testing.assert_close(found[:, :, 0], expected, rtol=0, atol=tolerance)

    check()


def test_each_token_has_the_frequencies_of_its_own_sequences_length() -> None:
    """Tokens of a short and a long sequence in one step, as the engine mixes them."""
    given = {"rope_type": "dynamic", "factor": 4.0}
    config = LlamaConfig.from_hf(
        {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
        | {"max_position_embeddings": 16, "rope_parameters": given}
    )
    rotary = RotaryEmbedding(config)
    positions, lengths = torch.tensor([3, 3, 30]), torch.tensor([4, 40, 40])
    together, _ = rotary(positions, lengths, torch.float32)
    alone = [rotary(positions[i : i + 1], lengths[i : i + 1], torch.float32)[0] for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together[0], together[1])


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 32), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_rotation_is_that_of_complex_numbers(tokens: int, heads: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, 2 * pairs, generator=generator, dtype=torch.float64)
    angles = torch.randn(tokens, 1, pairs, generator=generator, dtype=torch.float64)
    doubled = torch.cat((angles, angles), dim=-1)
    found = rotate(x, (doubled.cos(), doubled.sin()))
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(found, torch.cat((expected.real, expected.imag), dim=-1))
