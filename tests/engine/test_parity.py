"""The embedded model's texts against transformers', at every number of ranks.

In float32 texts are the same. In bfloat16 every rank count rounds differently, so texts may part; where they do, the
float32 model must find the two tokens nearly equal, measured by what bfloat16 does to transformers' own logits there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tpllama import LLM, Output, SamplingParams
from tpllama.engine.tokenizer import Tokenizer

OutputsAt = Callable[[int], tuple[list[Output], list[Output]]]

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small fox who lived at the edge of a great forest. Every morning",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius at sea level, but",
    "Dear Sir or Madam, I am writing to",
]
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(max_new_tokens=32, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)
# How far apart, in standard deviations of bfloat16's noise on a difference of two logits, may be a near tie.
NEAR_TIE = 4


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own generation, padded on the left, through ends of text as ours."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=mask, **options)[:, longest:].tolist()


@pytest.fixture(scope="module")
def bfloat16_reference(smollm2_reference: Any) -> Any:
    """transformers' model loaded in bfloat16, not cast to it: that would round RoPE's frequencies."""
    fields = smollm2_reference.config.to_dict()
    del fields["quantization_config"]
    weights = smollm2_reference.state_dict()
    config = transformers.LlamaConfig(**fields)
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def float32_tokens(smollm2_reference: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    return greedy(smollm2_reference, prompt_ids)


@pytest.fixture(scope="module")
def bfloat16_tokens(bfloat16_reference: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    return greedy(bfloat16_reference, prompt_ids)


@pytest.fixture(scope="module")
def float32_outputs() -> OutputsAt:
    """Greedy and random outputs at a number of ranks. A process leads one group of ranks at a time: each is closed."""

    @functools.cache
    def outputs(tp: int) -> tuple[list[Output], list[Output]]:
        with LLM(tp=tp, dtype="float32") as llm:
            return llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, RANDOM)

    return outputs


@pytest.mark.parametrize("tp", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_float32_texts_are_transformers(
    float32_outputs: OutputsAt, tokenizer: Tokenizer, float32_tokens: list[list[int]], tp: int
) -> None:
    outputs, _ = float32_outputs(tp)
    assert ids(outputs) == float32_tokens
    assert [output.text for output in outputs] == [tokenizer.decode(tokens) for tokens in float32_tokens]


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_seed_gives_the_same_text_on_any_number_of_ranks(float32_outputs: OutputsAt, tp: int) -> None:
    (_, expected), (_, found) = float32_outputs(1), float32_outputs(tp)
    assert ids(found) == ids(expected)
    assert [output.text for output in found] == [output.text for output in expected]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bfloat16_texts_part_from_transformers_only_at_near_ties(
    tp: int,
    smollm2_reference: Any,
    bfloat16_reference: Any,
    prompt_ids: list[list[int]],
    float32_tokens: list[list[int]],
    bfloat16_tokens: list[list[int]],
) -> None:
    models = smollm2_reference, bfloat16_reference
    with LLM(tp=tp, dtype="bfloat16") as llm:
        found = ids(llm.generate(PROMPTS, GREEDY))
    worst = max(float(gaps(*models, *texts).max()) for texts in zip(prompt_ids, found, strict=True))
    print(f"tp {tp}: a token's largest distance from the likeliest, in standard deviations of the noise: {worst:.2f}")
    assert worst <= NEAR_TIE
    for name, expected in {"float32": float32_tokens, "bfloat16": bfloat16_tokens}.items():
        partings = [parting(*models, *texts) for texts in zip(prompt_ids, found, expected, strict=True)]
        print(f"tp {tp} against {name}: first differences (place, distance) {partings}")
        assert all(each is None or each[1] <= NEAR_TIE for each in partings)


@torch.inference_mode()
def gaps(float32: Any, bfloat16: Any, prompt: list[int], found: list[int]) -> Tensor:
    """How far below the likeliest token's logit each token's is, in the float32 model's eyes.

    In standard deviations of what bfloat16 does to the difference of two logits at that place, in transformers itself:
    some places are four times as noisy as others.
    """
    logits, rounded = (
        model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1].float() for model in (float32, bfloat16)
    )
    noise = 2**0.5 * (rounded - logits).std(-1)
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]) / noise


def parting(
    float32: Any, bfloat16: Any, prompt: list[int], found: list[int], expected: list[int]
) -> tuple[int, float] | None:
    """Where two texts part, and how far below the likeliest token the lower one of theirs is there."""
    assert len(found) == len(expected) == NEW_TOKENS
    place = next((place for place in range(NEW_TOKENS) if found[place] != expected[place]), None)
    if place is None:
        return None
    distances = (float(gaps(float32, bfloat16, prompt, text[: place + 1])[-1]) for text in (found, expected))
    return place, max(distances)
