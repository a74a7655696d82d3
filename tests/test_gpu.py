"""On a CUDA device: the same weights and, within the noise of its kernels, the same logits as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpllama import LLM, SamplingParams
from tpllama.quantization.recipes import RECIPES

pytestmark = pytest.mark.gpu
TOKENS = torch.randint(0, 211, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "recipe", [name for name, recipe in RECIPES.items() if not recipe or "cpu" in recipe.family.devices]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_agree_with_the_cpu(make_checkpoint: Callable[..., Path], recipe: str, tp: int) -> None:
    if tp > torch.cuda.device_count():
        pytest.skip(f"needs {tp} CUDA devices")
    model = str(make_checkpoint())
    with LLM(model, torchao_config=recipe, dtype="float32", device="cpu") as llm:
        expected = llm.logits(TOKENS)
    with LLM(model, tp=tp, torchao_config=recipe, dtype="float32", device="cuda") as llm:
        found = llm.logits(TOKENS).cpu()
    torch.testing.assert_close(found, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("recipe", ["fp8dq-per_row", "fp8dq-per_tensor"])
def test_float8_activations(recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    tokens = [[1, 504, 3575, 282, 4649, 314]]
    with LLM(device="cuda") as plain, LLM(device="cuda", torchao_config=recipe) as quantized:
        expected, found = plain.logits(tokens), quantized.logits(tokens)
    kl = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert float(kl.mean()) < 0.5


def test_generates_the_capital() -> None:
    with LLM(device="cuda", torchao_config="int8wo") as llm:
        [output] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams())
    assert "Paris" in output.text
