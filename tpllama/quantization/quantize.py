"""Quantizing one rank's part of a weight to exactly the integers and scales of the whole weight's.

torchao does the arithmetic on plain local tensors. What the local part lacks is only the range of values
that shares a scale with it, so that range is brought along:

- a scale per group of columns: a rank reads on to the borders of its outermost groups, and cuts them off after;
- a scale per row, or one for the tensor, over a split weight: the ranks agree on minimum and maximum, and each
  quantizes its part together with columns that hold them ("witnesses"), which are cut off after.

This serves every recipe and uneven, overlapping splits, where arithmetic on DTensors can't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tpllama.quantization.neutral import assemble, layout_of, parts_of, quantize_plain
from tpllama.quantization.recipes import Recipe

# Minimum and maximum, repeated: as many columns as keeps sizes at the multiples that torchao's fp8 wants.
_WITNESSES = 16


def columns_to_read(recipe: Recipe, columns: slice, in_features: int) -> slice:
    """The columns a rank must read to quantize its own `columns`: these, out to the borders of their groups."""
    if recipe.family.extent != "group":
        return columns
    size = recipe.group_size
    return slice(columns.start // size * size, min(-(-columns.stop // size) * size, in_features))


def local_group_size(group_size: int, start: int, stop: int) -> int:
    """The group size of columns start..stop on their own: smaller where they cut through a group."""
    return math.gcd(group_size, start, stop)


def quantize(weight: Tensor, recipe: Recipe, own: slice, agree_max: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The neutral (torchao) form of columns `own` of `weight` [rows, columns], as if the whole weight had been there.

    weight: the columns named by `columns_to_read`. own: those of them to keep. agree_max: the elementwise maximum
    over the ranks that share this weight's scales; None where they share none.
    """
    shares = agree_max is not None and recipe.family.extent != "group"
    if not shares:
        return cut_columns(quantize_plain(weight, recipe), own)
    assert agree_max is not None
    columns = weight.shape[1]
    extremes = torch.stack((weight.amax(1), -weight.amin(1)))
    if recipe.family.extent == "tensor":
        extremes = extremes.amax(1, keepdim=True)  # of one size on all ranks, whatever rows they have
    high, low = agree_max(extremes.float()).to(weight.dtype).expand(2, weight.shape[0])
    witnesses = torch.stack((high, -low), dim=1).repeat(1, _WITNESSES // 2)
    return cut_columns(quantize_plain(torch.cat((weight, witnesses), dim=1), recipe), slice(0, columns))


def join_rows(parts: Iterable[Tensor], rows: int) -> Tensor:
    """One neutral tensor with `rows` rows, of parts that come from top to bottom and aren't kept."""
    whole: dict[str, Tensor] = {}
    top = 0
    for part in parts:
        if part.shape[0] == rows:
            return part
        layout = layout_of(type(part).__name__)
        for name, values in parts_of(part).items():
            row_dim = layout.row_dim(name)
            if name not in whole:
                shape = list(values.shape)
                shape[row_dim] = rows
                whole[name] = values.new_empty(shape)
            whole[name].narrow(row_dim, top, part.shape[0]).copy_(values)
        top += part.shape[0]
    return assemble(part, whole, rows, part.shape[1])


def cut_columns(weight: Any, own: slice) -> Tensor:
    """Columns `own` of a neutral tensor. Groups that `own` cuts through become smaller groups of equal scale."""
    if own == slice(0, weight.shape[1]):
        return weight
    match type(weight).__name__:
        case "Int4Tensor":
            from tpllama.quantization.int4 import cut_int4

            return cut_int4(weight, own, local_group_size(weight.block_size[1], own.start, own.stop))
        case "IntxUnpackedToInt8Tensor":
            weight = _regroup(weight, local_group_size(weight.block_size[1], own.start, own.stop))
    return weight[:, own].contiguous()


def _regroup(weight: Any, group_size: int) -> Tensor:
    """An equal IntxUnpackedToInt8Tensor with smaller groups: each one's scale and zero point repeated."""
    repeat = weight.block_size[1] // group_size
    return type(weight)(
        weight.qdata,
        weight.scale.repeat_interleave(repeat, dim=1),
        weight.zero_point.repeat_interleave(repeat, dim=1),
        weight.target_dtype,
        (1, group_size),
        weight.dtype,
        weight.activation_quantization,
    )
