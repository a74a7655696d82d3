"""Linears in our own C++: tiles.cpp on weights that were laid out for it; else amx.cpp where there are enough rows for
it, and small_m.cpp for few."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tpllama.kernels import amx, small_m, tiles
from tpllama.recording import in_place


class Weight(NamedTuple):
    """A weight as amx.cpp and small_m.cpp read it. scale, zero: of rows, or of groups [outputs, groups]; without zero
    it is 0."""

    kind: small_m.Kind
    data: Tensor
    outputs: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_size: int = 0


class Tiles(NamedTuple):
    """A weight as tiles.cpp reads it; see `tiles.linear`."""

    kind: tiles.Kind
    data: Tensor
    outputs: int
    scale: Tensor | None = None
    least_scale: float = 1.0


def linear(rows: Tensor, weight: Weight | Tiles, agree_max: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
    """rows [n, columns] times a weight, [n, outputs]; None where no kernel takes them.

    agree_max: for dynamic kinds split by columns, the maximum over the ranks.
    """

    def agreed() -> Tensor | None:
        return None if agree_max is None else in_place(agree_max, small_m.extremes(rows))

    if isinstance(weight, Tiles):
        return tiles.linear(weight.kind, rows, *weight[1:], agreed()) if tiles.fits(rows) else None
    if amx.fits(weight.kind, rows):
        return amx.linear(weight.kind, rows, *weight[1:], agreed())
    return small_m.linear(weight.kind, rows, *weight[1:], agreed()) if small_m.fits(weight.kind, rows) else None


def gated(rows: Tensor, weight: Weight | Tiles) -> Tensor | None:
    """silu(gate) * up, of a weight with the rows of gate and then as many of up; None where there is no kernel."""
    outputs = weight.outputs // 2
    if isinstance(weight, Tiles):
        is_cut = outputs % tiles.PANEL_OUTPUTS  # up begins within a panel
        return (
            None
            if is_cut or not tiles.fits(rows)
            else tiles.gated(weight.kind, rows, weight.data, outputs, *weight[3:])
        )
    return amx.gated(weight.kind, rows, weight.data, outputs, *weight[3:]) if amx.fits(weight.kind, rows) else None
