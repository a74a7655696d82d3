"""Packed linears on ATen's CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpllama.kernels import own, small_m
from tpllama.kernels import tiles as laid_out
from tpllama.kernels.linear import (
    AgreeMax,
    Form,
    as_rows,
    int4_parts,
    like_rows,
    quantize_dequantize_tokens,
    quantize_tokens,
)

# Up to this many rows the weight-only int8 kernel beats widening the weight first (bench/results, 2 cores).
_FEW_ROWS = 8


def widen(q: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 or float8 (e4m3fn, no NaN) values in `dtype`, exactly. ATen converts float8 one by one, 25 times slower."""
    if q.dtype != torch.float8_e4m3fn:
        return q.to(dtype)
    # Sign, exponent and mantissa at their places in bfloat16, whose exponents count from 120 lower.
    wide = q.view(torch.int8).to(torch.int16)
    return (((wide & -0x8000) | ((wide & 0x7F) << 4)).view(torch.bfloat16) * 2.0**120).to(dtype)


class RowScaledLinear(nn.Module):
    """Weights of one byte with one scale per row: int8wo and fp8wo."""

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.kind: small_m.Kind = "int8" if qdata.dtype == torch.int8 else "float8"
        # ATen's int8 kernel: in bfloat16 it reads past rows that are no multiple of 16 long; in float16 it is slow.
        self.kernel_fits = qdata.dtype == torch.int8 and qdata.shape[1] % 16 == 0 and scale.dtype != torch.float16

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> RowScaledLinear:
        return cls(weight.qdata.contiguous(), weight.scale.flatten().to(weight.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = as_rows(x), self.own_weight()
        found = None if weight is None else own.linear(rows, weight)
        if found is not None:
            y = found
        elif self.kernel_fits and rows.shape[0] <= _FEW_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.qdata, self.scale)
        elif self.scale.dtype == torch.bfloat16 and rows.is_cpu and small_m.has("float8"):
            y = small_m.many_rows(self.kind, rows, self.qdata, self.qdata.shape[0]) * self.scale
        elif x.dtype == torch.float16:  # whose range unscaled sums would leave
            y = torch.mm(rows, (widen(self.qdata, x.dtype) * self.scale[:, None]).t())
        else:
            y = torch.mm(rows, widen(self.qdata, x.dtype).t()) * self.scale
        return like_rows(y if self.bias is None else y + self.bias, x)

    def own_weight(self) -> own.Weight | None:
        """For our own kernels, where they know it."""
        if self.scale.dtype != torch.bfloat16:
            return None
        return own.Weight(self.kind, self.qdata, self.qdata.shape[0], self.scale)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns + rows * dtype.itemsize


class Int8DynamicLinear(nn.Module):
    """Int8 weights with one scale per row, and activations quantized per token, symmetrically: int8dq."""

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, qdata: Tensor, scale: Tensor, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.agree_max = agree_max

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> Int8DynamicLinear:
        return cls(weight.qdata.contiguous(), weight.scale.flatten().float(), bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        tokens = as_rows(x)
        found = own.linear(tokens, self.own_weight(), self.agree_max)
        if found is not None:
            return like_rows(found if self.bias is None else found + self.bias, x)
        quantized, token_scale = quantize_tokens(tokens, self.agree_max)
        # ATen's kernel is wrong for a single column.
        is_wide = self.qdata.shape[1] > 1
        sums = torch._int_mm(quantized, self.qdata.t()) if is_wide else quantized.int() * self.qdata.t().int()
        y = sums.float() * token_scale * self.scale
        y = y.to(x.dtype) if self.bias is None else y.to(x.dtype) + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def own_weight(self) -> own.Weight:
        """For our own kernels."""
        return own.Weight("int8_dynamic", self.qdata, self.qdata.shape[0], self.scale)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns + rows * 4


class TilesLinear(nn.Module):
    """Plain weights, or those of int8dq, laid out for Intel's AMX: bfloat16 models, any number of tokens."""

    tiles: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self, tiles: Tensor, outputs: int, scale: Tensor | None, bias: Tensor | None, agree_max: AgreeMax | None
    ) -> None:
        super().__init__()
        self.kind: laid_out.Kind = "plain_tiles" if scale is None else "int8_tiles"
        self.out_features = outputs
        self.least_scale = 1.0 if scale is None else float(scale.min())
        self.register_buffer("tiles", tiles)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.agree_max = agree_max

    @staticmethod
    def fits(form: Form, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel, and tiles are whole."""
        is_known = form.kind == "plain" or (form.kind == "int8" and form.dynamic)
        row_bytes = columns * (2 if form.kind == "plain" else 1)
        is_whole = rows % laid_out.PANEL_OUTPUTS == 0 and row_bytes % laid_out.ROW_BYTES == 0
        return is_known and is_whole and dtype == torch.bfloat16 and laid_out.is_there()

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> TilesLinear:
        outputs = weight.shape[0]
        if not hasattr(weight, "qdata"):
            return cls(laid_out.lay_out(weight), outputs, None, bias, None)
        return cls(laid_out.lay_out(weight.qdata), outputs, weight.scale.flatten().float(), bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        y = own.linear(as_rows(x), self.own_weight(), self.agree_max)
        assert y is not None, f"found tokens of {x.dtype}, expected bfloat16"
        return like_rows(y if self.bias is None else y + self.bias, x)

    def own_weight(self) -> own.Tiles:
        """For our own kernels."""
        return own.Tiles(self.kind, self.tiles, self.out_features, self.scale, self.least_scale)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns * dtype.itemsize if form.kind == "plain" else rows * columns + rows * 4


class TilesEmbedding(nn.Module):
    """Rows of a plain weight that is laid out: of the head that the embedding is tied to, in one memory."""

    tiles: Tensor

    def __init__(self, head: TilesLinear) -> None:
        super().__init__()
        self.num_embeddings = head.out_features
        self.register_buffer("tiles", head.tiles)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] to bfloat16 [..., columns]. Raises IndexError for a token beyond the vocabulary."""
        flat = tokens.reshape(-1)
        if len(flat):
            lowest, highest = map(int, flat.aminmax())
            if not 0 <= lowest <= highest < self.num_embeddings:
                found = lowest if lowest < 0 else highest
                raise IndexError(f"found token {found}, expected 0 to {self.num_embeddings - 1}")
        return laid_out.take_rows(self.tiles, flat).unflatten(0, tokens.shape)


class Int4Linear(nn.Module):
    """Int4 weights, two a byte, a scale and a zero per group: int4wo and, with int8 tokens, 8da4w."""

    packed: Tensor
    scales_and_zeros: Tensor
    bias: Tensor | None

    def __init__(self, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.group_size: int = weight.block_size[1]
        self.out_features: int = weight.shape[0]
        self.dynamic = getattr(weight, "activation_quantization", None) is not None
        self.agree_max = agree_max
        q, scale, zero = int4_parts(weight)
        # The kernel computes (p - 8) * scale + zero with p in 0..15. It packs 64 rows at a time.
        blocks = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int() + 8, 1) for rows in q.split(64 * 8)]
        self.register_buffer("packed", torch.cat(blocks))
        self.register_buffer("scales_and_zeros", torch.stack((scale, zero), dim=-1).contiguous())
        self.register_buffer("bias", bias)

    @staticmethod
    def fits(rows: int, columns: int, group_size: int) -> bool:
        return rows % 16 == 0 and group_size in (32, 64, 128, 256) and columns % group_size == 0

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> Int4Linear:
        return cls(weight, bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        if self.dynamic:
            x = quantize_dequantize_tokens(x, self.agree_max)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.scales_and_zeros)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns // 2 + rows * (columns // form.group_size) * 2 * dtype.itemsize
