"""Weights that lie in a checkpoint already quantized by torchao: as which recipe they are used, and a rank's part.

A stored weight is taken as exactly what its recipe would have made here. One that no recipe makes is refused by name.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpllama.config import UserError
from tpllama.quantization.neutral import assemble, blank, layout_of, parts_of, with_zeros
from tpllama.quantization.recipes import FAMILIES, Recipe

_REFUSED = {
    "Int4TilePackedTo4dTensor": "it is packed for one GPU kernel and can't be sliced",
    "Int4PlainInt32Tensor": "it is packed for one device",
    "Int4PreshuffledTensor": "it is packed for one GPU kernel and can't be sliced",
    "AffineQuantizedTensor": "it is the first version of torchao's tensors, which torchao itself no longer reads",
}


@dataclass(frozen=True)
class StoredForm:
    """A stored weight [rows, columns] and the recipe that makes such.

    kind: torchao's class. parts: the names of its parts, "qdata" first. one_scale: a single scale for all of it.
    """

    name: str
    kind: str
    recipe: Recipe
    shape: tuple[int, int]
    parts: tuple[str, ...]
    one_scale: bool

    def slices(self, rows: slice, columns: slice) -> dict[str, tuple[slice, ...]]:
        """Where rows x columns (see `columns_to_read`) lie in each of the weight's parts."""
        layout = layout_of(self.kind)
        slices = {part: layout.index(part, rows, columns, self.recipe.group_size) for part in self.parts}
        if self.one_scale:
            slices |= dict.fromkeys(self.parts[1:], (slice(0, 1), slice(0, 1)))
        return slices

    def assemble(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The neutral tensor of slices of the parts, which it may keep and change, for a model in `dtype`.

        Its integers and scales are those in the files; scales that follow the model's dtype are converted to it.
        """
        layout = layout_of(self.kind)
        num_rows, width = parts["qdata"].shape
        like = blank(self.recipe, num_rows, width * layout.columns_per_element, dtype)
        whole = {}
        for name, part in parts_of(like).items():
            if name not in parts:  # older files leave it out
                whole[name] = torch.zeros(part.shape, dtype=part.dtype, device=parts["qdata"].device)
                continue
            if name in layout.all_zero and parts[name].any():
                raise UserError(
                    f"found {self.name} stored as torchao's {self.kind} with a {name} that is not 0, expected "
                    f"symmetric quantization, quantize the original again"
                )
            is_byte = parts[name].element_size() == part.element_size() == 1  # its bits count
            values = parts[name].view(part.dtype) if is_byte else parts[name].to(part.dtype)
            whole[name] = values.expand(part.shape).contiguous()
        return with_zeros(assemble(like, whole, *like.shape), self.recipe)


def recognize(
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    part_shapes: Mapping[str, tuple[int, ...]],
    part_dtypes: Mapping[str, str],
) -> StoredForm:
    """What the weight `name` is, from torchao's class name, its attributes and the shapes and dtypes of its parts.

    Dtypes are in lower case, as safetensors or torch spells them. Raises UserError for what no recipe makes, and for
    parts that don't fit together.
    """
    layout = layout_of(kind)
    if not layout.parts:
        raise _refused(name, kind, _REFUSED.get(kind, "no recipe makes such a weight"))
    try:
        plain = {key: _plain(value) for key, value in attributes.items()}
    except RecursionError:
        raise _refused(name, kind, "its description is nested too deeply") from None
    rows, columns = _shape(name, kind, part_shapes)
    block = plain.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise _refused(name, kind, f"its block size is {block!r}")
    one_scale = block == [rows, columns] and rows > 1
    family = _family(name, kind, plain, one_scale)
    group_size = block[1] if layout.grouped else 0
    if group_size and (block[0] != 1 or columns % group_size or group_size % 2):
        raise _refused(name, kind, f"its block size is {block}")
    if not group_size and block not in ([1, columns], [rows, columns]):
        raise _refused(name, kind, f"its scales are of blocks of {block}, where one a row or one in all is known")
    recipe = Recipe(next(each for each in FAMILIES if each.name == family), group_size)
    expected = {part: layout.shape(part, rows, columns, block) for part in layout.parts}
    _check_parts(name, kind, expected, part_shapes, part_dtypes)
    parts = ("qdata", *sorted({*part_shapes} - {"qdata"}))
    return StoredForm(name, kind, recipe, (rows, columns), parts, one_scale)


def _shape(name: str, kind: str, part_shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    layout = layout_of(kind)
    missing = [part for part in layout.parts if part not in part_shapes and part not in layout.all_zero]
    if missing or len(part_shapes["qdata"]) != 2:
        raise _refused(name, kind, f"it lacks {missing[0]}" if missing else "it is no matrix")
    rows, columns = part_shapes["qdata"]
    return rows, columns * layout.columns_per_element


def _family(name: str, kind: str, plain: Mapping[str, Any], is_of_tensor: bool) -> str:
    """The recipe family whose weights these are."""
    act: Any = plain.get("act_quant_kwargs") or {}
    if not isinstance(act, dict):
        raise _refused(name, kind, f"activations are quantized by {act!r}")
    match kind:
        case "Int8Tensor" if not act:
            return "int8wo"
        case "Int8Tensor":
            fits = act.get("granularity") in ({"dim": -1}, {"dim": 1}) and act.get("mapping_type") == "SYMMETRIC"
            if fits and not act.get("reduce_range") and not is_of_tensor:
                return "int8dq"
            raise _refused(
                name, kind, f"activations are quantized by {act}, where symmetric, one scale a token, is known"
            )
        case "Float8Tensor" if not act:
            return "fp8wo"
        case "Float8Tensor":
            if act.get("hp_value_ub") is not None or act.get("hp_value_lb") is not None:
                raise _refused(name, kind, "activations are clamped")
            fits = act.get("granularity") in ([{}] if is_of_tensor else [{"dim": -1}, {"dim": 1}])
            if fits and act.get("float8_dtype", "float8_e4m3fn") == "float8_e4m3fn":
                return "fp8dq-per_tensor" if is_of_tensor else "fp8dq-per_row"
            raise _refused(
                name, kind, f"activations are quantized by {act}, where float8_e4m3fn, as the weight is, is known"
            )
        case "Int4Tensor":
            if plain.get("activation_dtype") in (None, "bfloat16", "float16", "float32"):
                return "int4wo"
            raise _refused(name, kind, f"activations are quantized to {plain['activation_dtype']}")
        case "IntxUnpackedToInt8Tensor":
            if plain.get("target_dtype") == "int4" and plain.get("activation_quantization") == "int8_asym_per_token":
                return "8da4w"
            what = f"{plain.get('target_dtype')} with activations {plain.get('activation_quantization')!r}"
            raise _refused(name, kind, f"it is {what}, where int4 with int8_asym_per_token is known")
    raise _refused(name, kind, "no recipe makes such a weight")


def _check_parts(
    name: str,
    kind: str,
    expected: Mapping[str, tuple[int, ...]],
    part_shapes: Mapping[str, tuple[int, ...]],
    part_dtypes: Mapping[str, str],
) -> None:
    for part, shape in part_shapes.items():
        if part not in expected:
            raise _refused(name, kind, f"it has a part {part}")
        if shape != expected[part]:
            raise _refused(
                name, kind, f"its {part} has the shape {list(shape)}, where {list(expected[part])} is expected"
            )
        known = layout_of(kind).parts[part]
        dtype = _torch_dtype(part_dtypes[part])
        if dtype not in known:
            raise _refused(name, kind, f"it has a {part} of dtype torch.{dtype}, where {' or '.join(known)} is known")


def _torch_dtype(dtype: str) -> str:
    """torch's name of a dtype that safetensors may have spelled: i8, bf16, f8_e4m3."""
    match = re.fullmatch(r"(bf|f|i|u)(\d.*)", dtype)
    if match is None:
        return dtype
    name = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}[match[1]] + match[2]
    return "float8_e4m3fn" if name == "float8_e4m3" else name


def _plain(value: Any) -> Any:
    """An attribute as plain JSON values: from torchao's JSON ({"_type", "_data"}) and from its objects alike."""
    if isinstance(value, Mapping):
        return _plain(value["_data"]) if "_data" in value else {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if isinstance(value, str | int | float | None) else str(value).removeprefix("torch.")


def _refused(name: str, kind: str, reason: str) -> UserError:
    return UserError(
        f"found {name} stored as torchao's {kind}: {reason}, expected the neutral form of a recipe, quantize the "
        f"original model with tpllama quantize or --torchao-config"
    )
