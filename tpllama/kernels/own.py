"""Linears in our own C++: amx.cpp where there are enough rows for it, small_m.cpp for few."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tpllama.kernels import amx, small_m
from tpllama.kernels.small_m import Kind
from tpllama.recording import in_place


class Weight(NamedTuple):
    """A weight as both read it. scale, zero: of rows, or of groups [outputs, groups]; without zero it is 0."""

    kind: Kind
    data: Tensor
    outputs: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_size: int = 0


def linear(rows: Tensor, weight: Weight, agree_max: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
    """rows [n, columns] times a weight, [n, outputs]; None where neither takes them.

    agree_max: for dynamic kinds split by columns, the maximum over the ranks.
    """
    is_many = amx.fits(weight.kind, rows)
    if not (is_many or small_m.fits(weight.kind, rows)):
        return None
    agreed = None if agree_max is None else in_place(agree_max, small_m.extremes(rows))
    return (amx.linear if is_many else small_m.linear)(weight.kind, rows, *weight[1:], agreed)


def gated(rows: Tensor, weight: Weight) -> Tensor | None:
    """silu(gate) * up, of a weight with the rows of gate and then as many of up; None where there is no kernel."""
    is_cut = weight.kind == "int8_tiles" and weight.outputs % (2 * amx.TILE_OUTPUTS)  # up begins within a tile
    if is_cut or not amx.fits(weight.kind, rows):
        return None
    return amx.gated(weight.kind, rows, weight.data, weight.outputs // 2, *weight[3:])
