"""Logits against transformers', through the real loader: the reference that everything else is held to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tpllama import LLM, UserError
from tpllama.llama_config import LlamaConfig

MakeCheckpoint = Callable[..., Path]

# As a part of the largest logit. What summing in another order costs in float32 stays below.
TOLERANCE = 1e-4
TRAINED = 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.05 * pair for pair in range(16)],
    "long_factor": [1 + 0.7 * pair for pair in range(16)],
    "original_max_position_embeddings": TRAINED,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}

# Changes to the TINY checkpoint: 6 query heads on 3 key-value heads of 32, biases everywhere, untied.
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mqa": {"num_key_value_heads": 1} | NO_BIAS,
    "mha": {"num_key_value_heads": 6, "head_dim": 16} | NO_BIAS,
    "wide heads": {"head_dim": 48, "mlp_bias": False},
    "narrow heads": {"head_dim": 6, "attention_bias": False},
    "no head_dim": {"head_dim": None},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
    "tied": {"tie_word_embeddings": True},
    "tied without biases": {"tie_word_embeddings": True, "num_hidden_layers": 3} | NO_BIAS,
    "large epsilon": {"rms_norm_eps": 0.1},
    "gelu": {"hidden_act": "gelu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn with attention_factor": YARN | {"attention_factor": 1.4, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    "longrope": LONGROPE,
    "longrope with factor": LONGROPE | {"factor": 3.0},
    "longrope with attention_factor": LONGROPE | {"attention_factor": 0.8},
    "llama3": LLAMA3,
}
LENGTH_DEPENDENT = {name for name, rope in ROPES.items() if rope["rope_type"] in ("dynamic", "longrope")}


def rope_changes(name: str) -> dict[str, Any]:
    """Dynamic RoPE stretches the model's own length, the others that of the training before."""
    length = {"max_position_embeddings": TRAINED} if ROPES[name]["rope_type"] == "dynamic" else {}
    return {"rope_parameters": {"rope_theta": 10000.0} | ROPES[name]} | length


def random_prompts(lengths: list[int], vocab: int = 211) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def reference_logits(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Of each prompt alone, shortest first: transformers' dynamic RoPE remembers the longest so far."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = {index: model(torch.tensor([prompts[index]])).logits[0].float() for index in by_length}
    return [found[index] for index in range(len(prompts))]


def padded_logits(llm: LLM, prompts: list[list[int]]) -> list[Tensor]:
    """All in one batch, filled up on the right, each cut to its own tokens."""
    longest = max(map(len, prompts))
    logits = llm.logits([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    return [row[: len(prompt)] for row, prompt in zip(logits, prompts, strict=True)]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a part of the largest logit."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def check_logits(found: list[Tensor], expected: list[Tensor]) -> None:
    worst = max(difference(*pair) for pair in zip(found, expected, strict=True))
    print(f"largest relative difference {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_are_transformers_for_every_shape(make_checkpoint: MakeCheckpoint, changes: dict[str, Any]) -> None:
    path, prompts = make_checkpoint(**changes), random_prompts([23, 5, 40])
    with LLM(str(path), dtype="float32") as llm:
        check_logits(padded_logits(llm, prompts), reference_logits(load_reference(path), prompts))


@pytest.mark.parametrize("name", ROPES)
def test_logits_are_transformers_for_every_rope(make_checkpoint: MakeCheckpoint, name: str) -> None:
    """Prompts below, at and beyond the trained length."""
    path, prompts = make_checkpoint(**rope_changes(name)), random_prompts([9, TRAINED, TRAINED + 1, 60])
    expected = reference_logits(load_reference(path), prompts)
    with LLM(str(path), dtype="float32") as llm:
        alone = [llm.logits(prompt)[0] for prompt in prompts]
        check_logits(alone, expected)
        if name not in LENGTH_DEPENDENT:
            check_logits(padded_logits(llm, prompts), expected)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_changes_the_logits(make_checkpoint: MakeCheckpoint, name: str) -> None:
    """So that the comparison above can fail: with default RoPE the logits are far from the tolerance."""
    prompt = random_prompts([60])[0]
    path = make_checkpoint(**rope_changes(name))
    plain = {"rope_parameters": None, "max_position_embeddings": 128}
    with (
        LLM(str(path), dtype="float32") as llm,
        LLM(str(path), dtype="float32", json_model_override_args=plain) as default,
    ):
        assert difference(llm.logits(prompt)[0], default.logits(prompt)[0]) > 20 * TOLERANCE


@pytest.mark.parametrize("name", ROPES)
def test_the_old_spelling_of_rope_is_the_same_model(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    new, old = make_checkpoint(**rope_changes(name)), tmp_path / "old"
    shutil.copytree(new, old)
    fields = json.loads((new / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    if name == "theta":
        del fields["rope_scaling"]
    (old / "config.json").write_text(json.dumps(fields))
    both = [LlamaConfig.from_hf(json.loads((path / "config.json").read_text())) for path in (new, old)]
    assert both[0] == both[1]
    prompts = random_prompts([9, 60])
    with LLM(str(old), dtype="float32") as llm:
        check_logits([llm.logits(prompt)[0] for prompt in prompts], reference_logits(load_reference(old), prompts))


def test_logits_of_many_rows_are_those_of_each(make_checkpoint: MakeCheckpoint) -> None:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        rows = random_prompts([12, 12, 12])
        together = llm.logits(rows)
        assert together.shape == (3, 12, 211)
        for row, logits in zip(rows, together, strict=True):
            assert difference(logits, llm.logits(row)[0]) <= 1e-6


def test_logits_refuse_what_does_not_fit(make_checkpoint: MakeCheckpoint) -> None:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        assert llm.logits([[1] * 128]).shape == (1, 128, 211)
        for rows, reason in (
            ([[1] * 129], "129 tokens"),
            ([[1, 2], [1]], "different lengths"),
            ([[]], "empty"),
            ([], "empty"),
            ([[1, 211]], "outside the vocabulary"),
            ([[1, -1]], "outside the vocabulary"),
        ):
            with pytest.raises(UserError, match=reason):
                llm.logits(rows)


# The embedded model.

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time there was a small fox who lived at the edge of a great forest. Every morning it",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain",
    "In 1969 two astronauts walked on the Moon while a third stayed in orbit; their journey took",
]


@pytest.fixture(scope="module")
def token_rows(smollm2_float32: LLM) -> list[list[int]]:
    return [smollm2_float32.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def smollm2_float32() -> Iterator[LLM]:
    with LLM(dtype="float32") as llm:
        yield llm


def test_the_embedded_models_logits_are_transformers(
    smollm2_float32: LLM, smollm2_reference: Any, token_rows: list[list[int]]
) -> None:
    check_logits(padded_logits(smollm2_float32, token_rows), reference_logits(smollm2_reference, token_rows))


@pytest.fixture(scope="module")
def bfloat16_reference(smollm2_reference: Any) -> Any:
    """transformers' model loaded in bfloat16, not cast to it: that would round RoPE's frequencies."""
    fields = smollm2_reference.config.to_dict()
    del fields["quantization_config"]
    weights = smollm2_reference.state_dict()
    config = transformers.LlamaConfig(**fields)
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16)


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_in_bfloat16_we_are_as_near_to_float32_as_transformers(
    smollm2_reference: Any, bfloat16_reference: Any, token_rows: list[list[int]]
) -> None:
    """bfloat16 rounds every layer's output, so right programs may differ; none may be further from the truth."""
    truth = torch.cat(reference_logits(smollm2_reference, token_rows))
    theirs = torch.cat(reference_logits(bfloat16_reference, token_rows))
    with LLM(dtype="bfloat16") as llm:
        ours = torch.cat([llm.logits(row)[0] for row in token_rows])
    noise = root_mean_square(theirs - truth)
    assert root_mean_square(ours - truth) <= 1.1 * noise
    assert root_mean_square(ours - theirs) <= noise
    assert difference(ours, truth) <= 1.5 * difference(theirs, truth)
    for name, pair in {"float32": (ours, truth), "transformers": (ours, theirs)}.items():
        agreement = float((pair[0].argmax(-1) == pair[1].argmax(-1)).float().mean())
        rms, largest = root_mean_square(pair[0] - pair[1]), difference(*pair)
        print(f"from {name}: rms {rms:.3f}, largest relative {largest:.4f}, top-1 agreement {agreement:.3f}")
        assert agreement >= 0.94
