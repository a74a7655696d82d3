"""Linears for any device: plain weights, and quantized ones that are dequantized as they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels import own

AgreeMax = Callable[[Tensor], Tensor]
Kind = Literal["plain", "int8", "int4", "float8", "other"]


@dataclass(frozen=True)
class Form:
    """A neutral weight's form: what it holds, the group size of its scales (0: one a row), dynamic activations."""

    kind: Kind = "plain"
    group_size: int = 0
    dynamic: bool = False


class PlainLinear(nn.Linear):
    """A linear in the model's dtype."""

    @classmethod
    def from_neutral(cls, weight: Tensor, bias: Tensor | None, agree_max: AgreeMax | None) -> PlainLinear:
        with torch.device("meta"):
            linear = cls(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.own_weight(), self.bias
        y = None if weight is None else own.linear(as_rows(x), weight)
        if y is None:
            return F.linear(x, self.weight, bias)
        return like_rows(y if bias is None else y + bias, x)

    def own_weight(self) -> own.Weight | None:
        """For our own kernels, where they know it."""
        fits = self.weight.dtype == torch.bfloat16 and self.weight.is_contiguous()
        return own.Weight("plain", self.weight, self.out_features) if fits else None

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns * dtype.itemsize


class DequantizingLinear(nn.Module):
    """A linear on a torchao weight, dequantized on each call: always right, never fast."""

    def __init__(self, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.agree_max = agree_max

    @classmethod
    def from_neutral(cls, weight: Tensor, bias: Tensor | None, agree_max: AgreeMax | None) -> DequantizingLinear:
        return cls(weight, bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        dynamic = getattr(weight, "act_quant_kwargs", None)
        if dynamic is not None and weight.qdata.dtype == torch.int8:
            q, scale = quantize_tokens(x.reshape(-1, x.shape[-1]), self.agree_max)
            x = (q * scale).to(x.dtype).reshape(x.shape)
        elif dynamic is not None:
            x = round_to_float8(x, self.agree_max, per_tensor=type(dynamic.granularity).__name__ == "PerTensor")
        elif getattr(weight, "activation_quantization", None) is not None:
            x = quantize_dequantize_tokens(x, self.agree_max)
        return F.linear(x, dequantize(weight), self.bias)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        if not form.group_size:
            return rows * columns + rows * 4
        groups = rows * (columns // form.group_size)
        if form.dynamic:  # IntxUnpackedToInt8Tensor: a byte a value, a scale and an integer zero point
            return rows * columns + groups * (dtype.itemsize + 1)
        return rows * columns // 2 + groups * 2 * dtype.itemsize


def as_rows(x: Tensor) -> Tensor:
    """x [..., features] as [n, features]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def like_rows(y: Tensor, x: Tensor) -> Tensor:
    """y [n, features] with the leading dimensions of the x that its rows came from."""
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def dequantize(weight: Any) -> Tensor:
    """A torchao weight's values, in its dtype."""
    if type(weight).__name__ != "Int4Tensor":
        return weight.dequantize()
    q, scale, zero = int4_parts(weight)
    group_size = weight.block_size[1]
    scale, zero = (x.t().repeat_interleave(group_size, dim=1) for x in (scale, zero))
    return q.to(weight.dtype) * scale + zero


def int4_parts(weight: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q int8 [rows, columns] in -8..7 and scale, zero [groups, rows]: the weight is q * scale + zero."""
    if type(weight).__name__ == "Int4Tensor":
        packed = weight.qdata.view(torch.int8)
        low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts keep the sign
        return torch.stack((low, high), dim=-1).flatten(1), weight.scale, weight.zero_point
    scale = weight.scale.t()
    return weight.qdata, scale, -weight.zero_point.t().to(scale.dtype) * scale


def token_range(x: Tensor, agree_max: AgreeMax | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each token of x [tokens, features], over all ranks that hold a part of it: [tokens, 1]."""
    extremes = torch.stack((x.amax(-1), -x.amin(-1)))
    if agree_max is not None:
        extremes = agree_max(extremes)
    high, low = extremes.unsqueeze(-1)
    return -low, high


def quantize_tokens(tokens: Tensor, agree_max: AgreeMax | None) -> tuple[Tensor, Tensor]:
    """Tokens [n, features] as int8, and their scales, float32 [n, 1], as torchao quantizes them for int8dq.

    Its symmetric mapping: the larger side of a token's range fills half of the 256 integers. It divides in x's dtype.
    """
    low, high = token_range(tokens, agree_max)
    largest = torch.maximum(-low, high).clamp(min=0)
    scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()
    return (tokens * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8), scale


def quantize_float8(tokens: Tensor, agree_max: AgreeMax | None, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """Tokens [n, features], n > 0, as float8 (e4m3fn), as torchao quantizes them, and their scale, float32.

    One scale per token, [n, 1], or one for all, [1, 1].
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    low, high = token_range(tokens, agree_max)
    largest = torch.maximum(-low, high)
    scale = ((largest.amax().view(1, 1) if per_tensor else largest) / limit).float().clamp(min=1e-12)
    return (tokens.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn), scale


def round_to_float8(x: Tensor, agree_max: AgreeMax | None, per_tensor: bool) -> Tensor:
    """x as it is after torchao's dynamic quantization to float8 (e4m3fn), with one scale per token or one for all."""
    if x.numel() == 0:
        return x
    rounded, scale = quantize_float8(x.reshape(-1, x.shape[-1]), agree_max, per_tensor)
    return (rounded.float() * scale).to(x.dtype).reshape(x.shape)


def quantize_dequantize_tokens(x: Tensor, agree_max: AgreeMax | None) -> Tensor:
    """x as it is after torchao's dynamic int8 quantization, asymmetric, one scale per token (8da4w)."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    if x.numel() == 0:
        return x
    tokens = x.reshape(-1, x.shape[-1])
    extremes = torch.cat(token_range(tokens, agree_max), dim=1)
    limits = {"quant_min": -128, "quant_max": 127}
    scale, zero = choose_qparams_affine(
        extremes, MappingType.ASYMMETRIC, (1, 2), torch.int8, zero_point_dtype=torch.int8, **limits
    )
    block = (1, tokens.shape[1])
    quantized = quantize_affine(tokens, block, scale, zero, torch.int8, **limits)
    return dequantize_affine(quantized, block, scale, zero, torch.int8, output_dtype=x.dtype, **limits).reshape(x.shape)
