"""The layout of torchao's neutral tensors: the parts each is made of, and how a weight's rows and columns lie in them.

A recipe's tensor is described without a weight (`blank`), taken apart and put together again (`parts_of`, `assemble`).
What a new recipe's class stores otherwise than the others is a row of `_LAYOUTS`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpllama.quantization.recipes import Recipe

_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Layout:
    """How a class stores a weight [rows, columns].

    parts: the dtypes that each part may have in a file, none where files of the class aren't read. all_zero: parts
    that hold zeros alone, and that older files leave out. grouped: a scale is of a group of columns of a row, else of
    a row or the whole. columns_per_element: of qdata. scales_by_group_first: scales are [groups, rows], where others
    are [rows, groups].
    """

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    all_zero: tuple[str, ...] = ()
    grouped: bool = False
    columns_per_element: int = 1
    scales_by_group_first: bool = False

    def shape(self, part: str, rows: int, columns: int, block: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part, where `block` [rows, columns] of the weight share a scale."""
        if part == "qdata":
            return rows, columns // self.columns_per_element
        scales = rows // block[0], columns // block[1]
        return scales[::-1] if self.scales_by_group_first else scales

    def row_dim(self, part: str) -> int:
        """The dimension of a part that follows the weight's rows."""
        return int(self.scales_by_group_first and part != "qdata")

    def index(self, part: str, rows: slice, columns: slice, group_size: int) -> tuple[slice, ...]:
        """Where rows x columns of the weight lie in a part. Columns begin and end between groups (0: a scale a row)."""
        if part == "qdata":
            per = self.columns_per_element
            return rows, slice(columns.start // per, columns.stop // per)
        groups = slice(columns.start // group_size, columns.stop // group_size) if group_size else slice(0, 1)
        return (groups, rows) if self.scales_by_group_first else (rows, groups)


_LAYOUTS = {
    "Int8Tensor": Layout({"qdata": ("int8",), "scale": _FLOATS, "zero_point": ("int8",)}, all_zero=("zero_point",)),
    "Float8Tensor": Layout({"qdata": ("float8_e4m3fn",), "scale": _FLOATS}),
    "IntxUnpackedToInt8Tensor": Layout(
        {"qdata": ("int8",), "scale": _FLOATS, "zero_point": ("int8",)}, grouped=True
    ),
    "Int4Tensor": Layout(
        {"qdata": ("int8", "uint8"), "scale": _FLOATS, "zero_point": _FLOATS},
        grouped=True, columns_per_element=2, scales_by_group_first=True,
    ),
}  # fmt: skip


def layout_of(kind: str) -> Layout:
    """The layout of torchao's class `kind`."""
    return _LAYOUTS.get(kind, Layout())


def parts_of(weight: Tensor) -> dict[str, Tensor]:
    """The plain tensors of a neutral one, by name."""
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(weight, name) for name in names}


class _Carrier(nn.Linear):
    """Holds a weight while torchao quantizes it. Made for every block of rows, so it initializes nothing."""

    def reset_parameters(self) -> None:
        pass


def quantize_plain(weight: Tensor, recipe: Recipe) -> Tensor:
    """torchao's tensor of a plain weight [rows, columns], by torchao's own arithmetic."""
    from torchao.quantization import quantize_

    linear = _Carrier(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(linear, recipe.config())
    return with_zeros(linear.weight.detach(), recipe)


def with_zeros(weight: Any, recipe: Recipe) -> Tensor:
    """A recipe's tensor, its rows of zeros made zeros in place: torchao divides them by their scale, 0, to NaN."""
    if recipe.family.kind == "float8":
        weight.qdata.view(torch.uint8).masked_fill_(weight.scale == 0, 0)
    whole: Tensor = weight
    return whole


def blank(recipe: Recipe, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A recipe's tensor for a weight [rows, columns] of `dtype`, its parts on the meta device: shapes, no values."""
    few = _few_rows(recipe, columns, dtype)
    layout = layout_of(type(few).__name__)
    whole = {}
    for name, part in parts_of(few).items():
        shape = list(part.shape)
        if shape[layout.row_dim(name)] == few.shape[0]:  # else one scale for the tensor
            shape[layout.row_dim(name)] = rows
        whole[name] = torch.empty(shape, dtype=part.dtype, device="meta")
    return assemble(few, whole, rows, columns)


@functools.lru_cache(maxsize=64)
def _few_rows(recipe: Recipe, columns: int, dtype: torch.dtype) -> Tensor:
    return quantize_plain(torch.zeros(16, columns, dtype=dtype), recipe)


def assemble(like: Tensor, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
    """A neutral tensor [rows, columns] of `parts`, in all else like `like`."""
    kind: Any = type(like)
    _, attributes = like.__tensor_flatten__()  # type: ignore[attr-defined]
    block = attributes["block_size"]
    extent = [rows if block[0] == like.shape[0] > 1 else 1, columns if block[1] == like.shape[1] else block[1]]
    attributes = attributes | {"block_size": type(block)(extent)}
    if "shape" in attributes:
        attributes["shape"] = torch.Size((rows, columns))
    whole: Tensor = kind.__tensor_unflatten__(dict(parts), attributes, None, None)
    return whole


def description(weight: Tensor) -> str:
    """What torchao's safetensors support writes about a tensor into a file's metadata: JSON."""
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder

    if type(weight) is Tensor:
        return json.dumps({"_type": "Tensor"})
    return json.dumps(weight, cls=TensorSubclassAttributeJSONEncoder)
