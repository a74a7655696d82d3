"""Neutral weights of every recipe, and what they and the tokens that they see are worth in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Int8Tensor, PerRow
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)

from tpllama.kernels.linear import dequantize
from tpllama.kernels.pack import form_of
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import RECIPES

ON_CPU = ["none"] + [name for name, each in RECIPES.items() if each is not None and "cpu" in each.family.devices]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Relative RMS: a few roundings of outputs, in float32 those of sums.
ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 3e-6}


def neutral(name: str, weight: Tensor) -> Any:
    """The weight under a recipe; plain under `none`, and where its groups don't fit."""
    recipe = RECIPES[name]
    if recipe is None or (recipe.group_size and weight.shape[1] % recipe.group_size):
        return weight
    return quantize(weight, recipe, slice(0, weight.shape[1]))


def neutral_of_any(name: str, weight: Tensor) -> Any:
    """The same, also of recipes that torchao makes on GPUs alone."""
    if not name.startswith("fp8dq"):
        return neutral(name, weight)
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    granularity = PerRow() if name.endswith("row") else PerTensor()
    kwargs = QuantizeTensorToFloat8Kwargs(
        torch.float8_e4m3fn, granularity=granularity, mm_config=Float8MMConfig(use_fast_accum=True)
    )
    return Float8Tensor.from_hp(weight, granularity=granularity, act_quant_kwargs=kwargs)


def make(name: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Any, Tensor]:
    """A neutral weight and a bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator) * (0.2 + torch.rand(shape[0], 1, generator=generator))
    return neutral(name, weight.to(dtype)), torch.randn(shape[0], generator=generator).to(dtype)


def tokens_as_seen(x: Tensor, weight: Any) -> Tensor:
    """x as the recipe's torchao activation quantization leaves it, in float64."""
    form = form_of(weight)
    if not form.dynamic:
        return x.double()
    if form.kind == "int8":
        quantized = Int8Tensor.from_hp(x, PerRow())
        return quantized.qdata.double() * quantized.scale.double()
    return _apply_int8_act_asym_per_token_quant_dequant(x).double()


def values(weight: Any) -> Tensor:
    """The weight's values in float64, from its own integers and scales."""
    match form_of(weight).kind:
        case "plain":
            return weight.double()
        case "int8" | "float8":
            return weight.qdata.double() * weight.scale.double()
        case _:
            return dequantize(weight.to(torch.float32) if hasattr(weight, "target_dtype") else weight).double()


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1) -> None:
    assert found.shape == expected.shape
    error, size = (found.double() - expected).abs(), expected.abs()
    assert error.pow(2).mean().sqrt() <= times * ROUNDING[dtype] * size.pow(2).mean().sqrt()
    assert error.max() <= 8 * times * ROUNDING[dtype] * size.max()
