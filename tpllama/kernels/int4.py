"""Int4 weights for our own kernels (small_m.cpp): int4wo and 8da4w of models in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels import own, small_m
from tpllama.kernels.linear import AgreeMax, Form, as_rows, int4_parts, like_rows, quantize_dequantize_tokens

_BLOCK = 128  # columns in 64 bytes: the first half of them in the low halves of the bytes


class OwnInt4Linear(nn.Module):
    """Int4 weights, two a byte, a scale and a zero per group."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.group_size: int = weight.block_size[1]
        self.out_features: int = weight.shape[0]
        self.dynamic = getattr(weight, "activation_quantization", None) is not None
        self.kind: small_m.Kind = "int4_dynamic" if self.dynamic else "int4"
        self.agree_max = agree_max
        q, scale, zero = int4_parts(weight)
        self.register_buffer("packed", pack_int4(q))
        self.register_buffer("scale", scale.t().to(weight.dtype).contiguous())
        self.register_buffer("zero", zero.t().to(weight.dtype).contiguous())
        self.register_buffer("bias", bias)

    @staticmethod
    def fits(group_size: int, columns: int, dtype: torch.dtype) -> bool:
        is_group = group_size in (32, 64, 128, 256) and columns % group_size == 0
        return is_group and dtype == torch.bfloat16 and small_m.has("int4")

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> OwnInt4Linear:
        return cls(weight, bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = as_rows(x), self.own_weight()
        y = own.linear(rows, weight, self.agree_max)
        if y is None:
            rows = quantize_dequantize_tokens(rows, self.agree_max) if self.dynamic else rows
            y = small_m.many_rows(weight.kind, rows, *weight[1:])
        return like_rows(y if self.bias is None else y + self.bias, x)

    def own_weight(self) -> own.Weight:
        """For our own kernels."""
        return own.Weight(self.kind, self.packed, self.out_features, self.scale, self.zero, self.group_size)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * (-(-columns // _BLOCK) * _BLOCK) // 2 + rows * (columns // form.group_size) * 2 * dtype.itemsize


def pack_int4(q: Tensor) -> Tensor:
    """q int8 [rows, columns] in -8..7, as uint8 [rows, columns / 2]; columns filled up to whole blocks by zeros."""
    padded = F.pad(q, (0, -q.shape[1] % _BLOCK)) + 8
    low, high = padded.view(q.shape[0], -1, 2, _BLOCK // 2).view(torch.uint8).unbind(2)
    return (low | high << 4).flatten(1)
