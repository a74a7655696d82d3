"""Placing a meta-device model on a mesh: parameters become DTensors that say which slice a rank owns.

The slices drive lazy reading. Tokens are never computed on DTensors: after loading, a module holds its
local tensor, and `connect` adds the one collective that each boundary needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tpllama.parallel.split import Ranges


class RangeShard(Shard):
    """A shard whose borders are given, one (start, stop) per rank, where `Shard` has those of torch.chunk.

    Ranges follow heads and need not be even; they overlap where ranks share a key-value head.
    """

    def __init__(self, dim: int, ranges: Ranges) -> None:
        super().__init__(dim)
        self.ranges = ranges

    def __new__(cls, dim: int, ranges: Ranges) -> RangeShard:
        return super().__new__(cls, dim)  # type: ignore[call-arg]

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        start, stop = self.ranges[int(rank)]
        return stop - start, start

    def __eq__(self, other: object) -> bool:
        """DTensor reuses what it found for equal placements, and checks its own against a plain Shard."""
        return super().__eq__(other) and (not isinstance(other, RangeShard) or self.ranges == other.ranges)

    def __hash__(self) -> int:
        return super().__hash__()

    def __repr__(self) -> str:
        return f"RangeShard({self.dim}, {self.ranges})"


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: RangeShard) -> None:
    """Replaces a meta parameter by a meta DTensor of the same global shape that owns placement's range."""
    parameter = module.get_parameter(name)
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, [placement])
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    placed = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    module.register_parameter(name, nn.Parameter(placed, requires_grad=False))


def owned_slices(parameter: Tensor) -> tuple[slice, ...]:
    """This rank's part of the global tensor, one slice per dimension; all of it for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def shard(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Places a meta model's parameters on the mesh as the plan says; what it doesn't name stays whole on each rank."""
    parallelize_module(model, mesh, dict(plan))
