"""Packed linears on ATen's CUDA kernels.

Nothing here has run on a GPU yet: on a CPU the tests check layouts, padding and arithmetic against kernels that they
write down themselves, tests/test_gpu.py does it where there is one, and bench/gpu.sh measures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels.linear import (
    AgreeMax,
    Form,
    as_rows,
    like_rows,
    quantize_float8,
    quantize_tokens,
)
from tpllama.kernels.tinygemm import TinygemmLinear, padded, padded_size

Capability = tuple[int, int]

# What plans are made for where there is no GPU to ask: the H100's and H200's.
_PLANNED = (9, 0)
# cuBLAS: rows of activations, and what both sizes of a weight must be multiples of.
_INT8_ROWS, _INT8_SIZES, _FLOAT8_SIZES = 32, 8, 16


def capability() -> Capability:
    """The compute capability of this process's GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else _PLANNED


def why_not(form: Form, dtype: torch.dtype, capability: Capability) -> str | None:
    """Why no kernel here takes a weight of this form in a model of `dtype`, if so."""
    is_half_byte, is_float8_product = form.kind == "int4", form.kind == "float8" and form.dynamic
    if form.kind not in ("int8", "int4", "float8"):
        return f"no CUDA kernel for {form.kind} weights"
    if is_half_byte and form.group_size not in (32, 64, 128, 256):
        return f"tinygemm has groups of 32 to 256, not of {form.group_size}"
    needed = (8, 0) if is_half_byte else (8, 9) if is_float8_product else (7, 5) if form.dynamic else (0, 0)
    if capability < needed:
        return f"its kernel needs compute capability {as_text(needed)}, this GPU has {as_text(capability)}"
    if (is_half_byte or is_float8_product) and dtype != torch.bfloat16:
        return f"its kernel takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


def as_text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


class WideningLinear(nn.Module):
    """Weights of one byte with one scale per row: int8wo and fp8wo.

    Compiled, a product with one row reads the bytes and widens them on the way; with more rows, and eagerly, the
    widened weight is written and read again. ATen's own `_weight_int8pack_mm` is slower than that on CUDA: a thread
    walks each row alone.
    """

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> WideningLinear:
        return cls(weight.qdata.contiguous(), weight.scale.flatten().to(weight.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:  # whose range unscaled sums would leave
            y = F.linear(x, self.qdata.to(x.dtype) * self.scale[:, None])
        else:
            y = F.linear(x, self.qdata.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns + rows * dtype.itemsize


class IntMatmulLinear(nn.Module):
    """Int8 weights with one scale per row, and activations quantized per token, symmetrically: int8dq."""

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, qdata: Tensor, scale: Tensor, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.out_features = qdata.shape[0]
        self.register_buffer("qdata", padded(qdata, _INT8_SIZES, _INT8_SIZES))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.agree_max = agree_max

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> IntMatmulLinear:
        return cls(weight.qdata, weight.scale.flatten().float(), bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        quantized, token_scale = quantize_tokens(as_rows(x), self.agree_max)
        count, columns = quantized.shape
        quantized = F.pad(quantized, (0, self.qdata.shape[1] - columns, 0, -count % _INT8_ROWS))
        if count:  # which _int_mm wants to be more than 16
            sums = torch._int_mm(quantized, self.qdata.t()).narrow(0, 0, count).narrow(1, 0, self.out_features)
        else:
            sums = token_scale.new_empty(0, self.out_features)
        y = (sums.float() * token_scale * self.scale).to(x.dtype)
        return like_rows(y if self.bias is None else y + self.bias, x)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return padded_size(rows, _INT8_SIZES) * padded_size(columns, _INT8_SIZES) + rows * 4


class ScaledMatmulLinear(nn.Module):
    """Float8 weights and activations: fp8dq, per row and token or with one scale for a whole."""

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.out_features: int = weight.shape[0]
        self.per_tensor = type(weight.act_quant_kwargs.granularity).__name__ == "PerTensor"
        self.register_buffer("qdata", padded(weight.qdata, _FLOAT8_SIZES, _FLOAT8_SIZES))
        scale = weight.scale.flatten().float().expand(self.out_features)  # one a row, whatever the recipe
        self.register_buffer("scale", F.pad(scale, (0, -self.out_features % _FLOAT8_SIZES), value=1.0))
        self.register_buffer("bias", bias)
        self.agree_max = agree_max

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> ScaledMatmulLinear:
        return cls(weight, bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        if rows.shape[0] == 0:
            return like_rows(rows.new_empty(0, self.out_features), x)
        quantized, token_scale = quantize_float8(rows, self.agree_max, self.per_tensor)
        quantized = F.pad(quantized.view(torch.int8), (0, self.qdata.shape[1] - rows.shape[1])).view(quantized.dtype)
        scale = self.scale.view(1, -1).narrow(1, 0, 1 if self.per_tensor else len(self.scale))
        y = torch._scaled_mm(
            quantized, self.qdata.t(), scale_a=token_scale, scale_b=scale, out_dtype=x.dtype, use_fast_accum=True
        ).narrow(1, 0, self.out_features)
        return like_rows(y if self.bias is None else y + self.bias, x)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        padded_rows = padded_size(rows, _FLOAT8_SIZES)
        return padded_rows * padded_size(columns, _FLOAT8_SIZES) + padded_rows * 4


CudaLinear = WideningLinear | IntMatmulLinear | ScaledMatmulLinear | TinygemmLinear


def cuda_linear(form: Form) -> type[CudaLinear]:
    """The linear for a form that `why_not` has nothing against."""
    if form.kind == "int4":
        return TinygemmLinear
    if not form.dynamic:
        return WideningLinear
    return IntMatmulLinear if form.kind == "int8" else ScaledMatmulLinear
