"""On a CUDA device: the same weights and, within the noise of its kernels, the same logits as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import making, tinygemm
from torch import Tensor

from tpllama import LLM, SamplingParams
from tpllama.engine.runner import Runner
from tpllama.kernels.linear import DequantizingLinear
from tpllama.kernels.pack import pack
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


QUANTIZED = [name for name, recipe in RECIPES.items() if recipe]
# Each at shapes that fit its kernel, and at ones that must be filled up.
SHAPES = [(256, 1024), (50, 288)]


def needs(recipe: str) -> None:
    family = RECIPES[recipe].family if RECIPES[recipe] else None  # type: ignore[union-attr]
    least = family.capability if family else (0, 0)
    if torch.cuda.get_device_capability() < least:
        pytest.skip(f"needs compute capability {least[0]}.{least[1]}")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_packed_linear_is_the_cpus(recipe: str, shape: tuple[int, int]) -> None:
    """With few rows and many: other kernels, or other ways to use one."""
    needs(recipe)
    if shape[1] % (RECIPES[recipe].group_size or 1):  # type: ignore[union-attr]
        pytest.skip("no such group")
    plain, bias = making.make("none", shape, torch.bfloat16)
    weight = making.neutral_of_any(recipe, plain)
    linear = pack(weight.to("cuda"), bias.to("cuda"), "cuda")
    assert not isinstance(linear, DequantizingLinear)
    reference = DequantizingLinear(weight, bias, None)
    for count in (1, 2, 16, 17, 32, 33, 200):
        x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count)).bfloat16()
        assert relative_error(linear(x.to("cuda")), reference(x)) < 0.02, count
    few, many = (linear(x.to("cuda")[:rows])[:32] for rows in (32, 200))
    assert relative_error(few, many) < 0.01
    assert linear(x[:0].to("cuda")).shape == (0, shape[0])


def test_tinygemms_tiles_are_as_tests_on_a_cpu_have_them() -> None:
    pairs = torch.randint(0, 256, (24, 192), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.to("cuda"), 8)
    assert torch.equal(packed.cpu(), tinygemm.tinygemm_pack(pairs, 8))


PROMPTS = [[(7 * place + step) % 211 for step in range(1 + 13 * place % 60)] for place in range(9)]
PARAMS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0),
]


@pytest.mark.parametrize("options", [
    {"dtype": "float32"}, {"dtype": "float32", "kv_cache_dtype": "int8"}, {"dtype": "float32", "compile": "on"},
], ids=["float32", "int8 cache", "compiled"])  # fmt: skip
def test_recorded_steps_give_the_same_texts(make_checkpoint: Callable[..., Path], options: dict[str, Any]) -> None:
    """Graphs on and off, twice, so that each is used again; other kernels may sum in another order."""
    model = str(make_checkpoint())
    with LLM(model, device="cuda", **options) as llm:
        runner = llm.engine.executor
        assert isinstance(runner, Runner)
        assert runner.graphs is not None
        found = [[each.token_ids for each in llm.generate(PROMPTS, params)] for params in (*PARAMS, *PARAMS)]
        recorded = len(runner.graphs._recorded)
        assert recorded >= 8
    with LLM(model, device="cuda", **{**options, "compile": "off"}) as llm:
        expected = [[each.token_ids for each in llm.generate(PROMPTS, params)] for params in (*PARAMS, *PARAMS)]
    assert found == expected


@pytest.mark.parametrize("recipe", ["none", *QUANTIZED])
def test_recorded_steps_have_the_logits_of_others(make_checkpoint: Callable[..., Path], recipe: str) -> None:
    """In bfloat16, on torch's kernel for block tables: log-probabilities of greedy texts, of every recipe."""
    needs(recipe)
    fields = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)

    def first(compile_: str) -> list[float]:
        with LLM(str(make_checkpoint(**fields)), device="cuda", torchao_config=recipe, compile=compile_) as llm:
            outputs = llm.generate([[*prompt, 1] * 6 for prompt in PROMPTS], params)
        assert all(output.logprobs for output in outputs)
        return [each.logprob for output in outputs for each in (output.logprobs or [])[:2]]  # the second is replayed

    torch.testing.assert_close(torch.tensor(first("auto")), torch.tensor(first("off")), atol=0.1, rtol=0.02)


def test_symmetric_memory_sums_as_nccl_does(make_checkpoint: Callable[..., Path]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    with LLM(str(make_checkpoint()), device="cuda", dtype="float32", tp=2) as llm:
        found = [each.token_ids for each in llm.generate(PROMPTS, PARAMS[0])]
    with LLM(str(make_checkpoint()), device="cuda", dtype="float32") as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS[0])] == found


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
