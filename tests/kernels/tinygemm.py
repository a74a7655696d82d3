"""tinygemm as its CUDA source describes it, for a CPU: what it packs, and what it computes of that."""

from __future__ import annotations

import torch
from torch import Tensor


def places(rows: int, columns: int) -> Tensor:
    """By row tile, column tile, thread, word and byte: the row and the pair of columns, [..., 2]."""
    found = torch.empty(rows // 8, columns // 128, 32, 4, 4, 2, dtype=torch.int64)
    for column_tile in range(columns // 128):
        for thread in range(32):
            for word in range(4):
                first = (column_tile * 8 + 2 * word) * 8  # a k-tile has 16 columns, which are 8 pairs
                pairs = [first + thread % 4 + offset for offset in (0, 4, 8, 12)]
                for row_tile in range(rows // 8):
                    row = row_tile * 8 + thread // 4
                    found[row_tile, column_tile, thread, word] = torch.tensor([[row, pair] for pair in pairs])
    return found


def tinygemm_pack(pairs: Tensor, inner_k_tiles: int) -> Tensor:
    """_convert_weight_to_int4pack: uint8 [rows, columns / 2], the even column in the high half."""
    assert pairs.dtype == torch.uint8
    assert pairs.is_contiguous()
    assert inner_k_tiles == 8
    rows, columns = pairs.shape[0], pairs.shape[1] * 2
    assert rows % 8 == 0  # the kernel fills up, but torch's fake one does not
    assert columns % 128 == 0
    row, pair = places(rows, columns).unbind(-1)
    values = pairs.long()[row, pair]  # [..., 4 bytes]
    high, low = values >> 4, values & 15
    shifts = torch.tensor([0, 4, 8, 12])
    return ((high << shifts) | (low << (shifts + 16))).sum(-1).to(torch.int32)


def tinygemm(x: Tensor, tiles: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """_weight_int4pack_mm, with its checks."""
    rows, columns = tiles.shape[0] * 8, tiles.shape[1] * 128
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert tiles.is_contiguous()
    assert group_size in (32, 64, 128, 256)
    assert x.shape[0] > 0
    assert x.shape[1] == columns
    assert columns % group_size == 0
    assert scales_and_zeros.shape == (columns // group_size, rows, 2)
    row, pair = places(rows, columns).unbind(-1)
    words = tiles.long().unsqueeze(-1)
    shifts = torch.tensor([0, 4, 8, 12])
    q = torch.empty(rows, columns)
    q[row, 2 * pair] = ((words >> shifts) & 15).float()
    q[row, 2 * pair + 1] = ((words >> (shifts + 16)) & 15).float()
    scale, zero = scales_and_zeros.float().repeat_interleave(group_size, 0).permute(2, 1, 0)
    return (x.float() @ ((q - 8) * scale + zero).bfloat16().float().t()).bfloat16()
