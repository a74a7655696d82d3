"""Which sums go through symmetric memory, and what its kernel is given: without GPUs, on tensors without values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpllama.parallel.symmetric import SymmetricMemoryRanks, takes


class Others:
    """What NCCL would be asked."""

    rank, size, group = 1, 2, SimpleNamespace(group_name="group")

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def sum(self, x: Tensor) -> Tensor:
        self.asked.append(x)
        return x


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((1, 4096), torch.bfloat16, True),
        ((32, 4096), torch.bfloat16, True),  # 256 KiB
        ((33, 4096), torch.bfloat16, False),
        ((3, 8), torch.float32, True),
        ((3, 5), torch.float32, False),  # 60 bytes are no whole vectors
        ((1, 4096), torch.float16, False),
        ((2, 4096), torch.int64, False),
        ((0, 4096), torch.bfloat16, False),
    ],
)
def test_small_sums_of_whole_vectors_take_it(shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    others: Any = Others()
    buffers = {each: torch.empty((256 << 10) // each.itemsize, dtype=each, device="meta")
               for each in (torch.bfloat16, torch.float32)}  # fmt: skip
    ranks, x = SymmetricMemoryRanks(others, buffers), torch.empty(shape, dtype=dtype, device="meta")
    assert takes(x) == expected
    result = ranks.sum(x)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert [each is x for each in others.asked] == [True] * (not expected)
    assert (result is x) == (not expected)


def test_where_a_tensor_begins_counts() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert takes(x[1:])
    assert not takes(x.view(-1)[4:132])
    assert takes(x[:, 4:12])  # is copied first
