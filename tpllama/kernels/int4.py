"""Int4 weights for our own kernels (small_m.cpp): int4wo and 8da4w of models in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels import amx, small_m
from tpllama.kernels.linear import AgreeMax, Form, as_rows, int4_parts, like_rows, quantize_dequantize_tokens

_BLOCK = 128  # columns in 64 bytes: the first half of them in the low halves of the bytes


class OwnInt4Linear(nn.Module):
    """Int4 weights, two a byte, a scale and a zero per group."""

    packed: Tensor
    scale: Tensor
    zero: Tensor
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
        rows = as_rows(x)
        parts = (self.packed, self.out_features, self.scale, self.zero, self.group_size)
        is_many = amx.fits(self.kind, rows)
        if is_many or small_m.fits(self.kind, rows):
            agreed = None if self.agree_max is None else self.agree_max(small_m.extremes(rows))
            linear = amx.linear if is_many else small_m.linear
            y = linear(self.kind, rows, *parts, agreed)
        else:
            rows = quantize_dequantize_tokens(rows, self.agree_max) if self.dynamic else rows
            y = small_m.many_rows(self.kind, rows, *parts)
        return like_rows(y if self.bias is None else y + self.bias, x)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * (-(-columns // _BLOCK) * _BLOCK) // 2 + rows * (columns // form.group_size) * 2 * dtype.itemsize


def pack_int4(q: Tensor) -> Tensor:
    """q int8 [rows, columns] in -8..7, as uint8 [rows, columns / 2]; columns filled up to whole blocks by zeros."""
    padded = F.pad(q, (0, -q.shape[1] % _BLOCK)) + 8
    low, high = padded.view(q.shape[0], -1, 2, _BLOCK // 2).view(torch.uint8).unbind(2)
    return (low | high << 4).flatten(1)
