"""int4 weights on tinygemm, torch's CUDA kernel for few rows; with many rows dequantized and left to cuBLAS.

Nothing here has run on a GPU yet (see cuda.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels.linear import AgreeMax, Form, as_rows, int4_parts, like_rows, quantize_dequantize_tokens

# tinygemm reads the whole weight once for each 16 rows, and dequantizing it once costs about three times that.
_FEW_ROWS = 32
_TILE_ROWS, _TILE_COLUMNS, _INNER_TILES = 8, 128, 8
# Values that are dequantized at a time, at 5 bytes each.
_PANEL = 1 << 26


class TinygemmLinear(nn.Module):
    """Int4 weights in tinygemm's tiles, a scale and a zero per group: int4wo and, with int8 tokens, 8da4w.

    The local weight is filled up to whole tiles and groups with zeros, and so are the activations: other than
    torchao's tensor, which is cut after it was packed, it may have any number of columns.
    """

    tiles: Tensor
    scales_and_zeros: Tensor
    bias: Tensor | None

    def __init__(self, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> None:
        super().__init__()
        self.group_size: int = weight.block_size[1]
        self.out_features, self.in_features = weight.shape
        self.dynamic = getattr(weight, "activation_quantization", None) is not None
        self.agree_max = agree_max
        q, scale, zero = int4_parts(weight)
        self.columns = padded_size(self.in_features, max(_TILE_COLUMNS, self.group_size))
        filled = padded((q + 8).to(torch.uint8), _TILE_ROWS, max(_TILE_COLUMNS, self.group_size))
        pairs = filled[:, ::2] << 4 | filled[:, 1::2]  # the even column in the high half
        self.register_buffer("tiles", torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES))
        rows, groups = filled.shape[0] - self.out_features, self.columns // self.group_size - len(scale)
        both = F.pad(torch.stack((scale, zero), dim=-1), (0, 0, 0, rows, 0, groups))
        self.register_buffer("scales_and_zeros", both.to(torch.bfloat16).contiguous())
        self.register_buffer("bias", bias)
        self.table = half_words(self.tiles.device)  # one for all

    @classmethod
    def from_neutral(cls, weight: Any, bias: Tensor | None, agree_max: AgreeMax | None) -> TinygemmLinear:
        return cls(weight, bias, agree_max)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        if rows.shape[0] == 0:
            return like_rows(rows.new_empty(0, self.out_features), x)
        if self.dynamic:
            rows = quantize_dequantize_tokens(rows, self.agree_max)
        rows = F.pad(rows, (0, self.columns - self.in_features)).contiguous()
        if rows.shape[0] <= _FEW_ROWS:
            y = torch.ops.aten._weight_int4pack_mm(rows, self.tiles, self.group_size, self.scales_and_zeros)
        else:
            y = self._many_rows(rows)
        y = y.narrow(1, 0, self.out_features)
        return like_rows(y if self.bias is None else y + self.bias, x)

    def _many_rows(self, rows: Tensor) -> Tensor:
        """By cuBLAS, on some rows of the dequantized weight at a time."""
        tiles = max(1, _PANEL // (self.columns * _TILE_ROWS))
        parts = zip(self.tiles.split(tiles), self.scales_and_zeros.split(tiles * _TILE_ROWS, dim=1), strict=True)
        y = [F.linear(rows, dequantize_tiles(*part, self.table)) for part in parts]
        return y[0] if len(y) == 1 else torch.cat(y, dim=1)

    @staticmethod
    def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype) -> int:
        rows, columns = padded_size(rows, _TILE_ROWS), padded_size(columns, max(_TILE_COLUMNS, form.group_size))
        return rows * columns // 2 + rows * (columns // form.group_size) * 2 * 2


def dequantize_tiles(tiles: Tensor, scales_and_zeros: Tensor, table: Tensor) -> Tensor:
    """The weight [rows, columns] of tinygemm's tiles int32 [rows / 8, columns / 128, 32, 4].

    Of a tile's 32 threads, four have a row's columns in turn, two neighbours at a time. A word holds eight values of
    32 columns: in its low half the even columns of four pairs, which lie four pairs apart, and in its high half the
    odd ones. table: see `half_words`.
    """
    row_tiles, column_tiles = tiles.shape[:2]
    rows, columns = row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS
    halves = tiles.view(torch.int16).view(row_tiles, column_tiles, _TILE_ROWS, 4, 4, 2)  # row, pair, 32 columns, odd
    values = F.embedding(halves.int() & 0xFFFF, table)  # ..., pair by four
    q = values.permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, len(scales_and_zeros), -1)
    by_row = scales_and_zeros.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # as the result will lie
    scale, zero = by_row.unsqueeze(-1).unbind(2)
    return torch.addcmul(zero, q, scale).view(rows, columns)


@functools.cache
def half_words(device: torch.device) -> Tensor:
    """The four values of each 16 bits, lowest first, bfloat16 [65536, 4]: looked up they are moved once, not unpacked.

    That is a third of the bytes that shifts and conversions move, which eager operations write one after another.
    """
    shifts = torch.arange(0, 16, 4, device=device)
    return ((torch.arange(1 << 16, device=device)[:, None] >> shifts & 15) - 8).bfloat16()


def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A weight of one byte a value, filled up with zeros to multiples of so many rows and columns."""
    extra = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    return F.pad(weight.view(torch.int8), extra).view(weight.dtype).contiguous()


def padded_size(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
