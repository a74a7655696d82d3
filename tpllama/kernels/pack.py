"""From neutral weights to the packed linear that a device runs fastest.

`pack` is the last step of loading and is never saved. It looks at the neutral tensor's class alone, so a new
recipe works at once through `DequantizingLinear`, and gains a kernel when a row of `choose` names one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpllama.kernels.cpu import Int4Linear, Int8DynamicLinear, RowScaledLinear
from tpllama.kernels.int4 import OwnInt4Linear
from tpllama.kernels.linear import AgreeMax, DequantizingLinear, Form, PlainLinear

PackedLinear = PlainLinear | DequantizingLinear | RowScaledLinear | Int8DynamicLinear | Int4Linear | OwnInt4Linear


def choose(form: Form, rows: int, columns: int, device: str, dtype: torch.dtype) -> type[PackedLinear]:
    """The packed linear for a local weight [rows, columns] of a model in `dtype`."""
    if form.kind == "plain":
        return PlainLinear
    if device == "cpu":
        if form.kind in ("int8", "float8") and not form.dynamic:
            return RowScaledLinear
        if form.kind == "int8":
            return Int8DynamicLinear
        if form.kind == "int4" and OwnInt4Linear.fits(form.group_size, columns, dtype):
            return OwnInt4Linear
        if form.kind == "int4" and Int4Linear.fits(rows, columns, form.group_size):
            return Int4Linear
    return DequantizingLinear


def pack(weight: Tensor, bias: Tensor | None, device: str, agree_max: AgreeMax | None = None) -> nn.Module:
    """The packed form of a plain or neutral weight on `device`.

    agree_max: for a weight split by columns, the maximum over its ranks; dynamic activations take their range
    from the whole token then, as they would on one rank.
    """
    form, (rows, columns) = form_of(weight), weight.shape
    chosen = choose(form, rows, columns, device, weight.dtype)
    return chosen.from_neutral(weight, bias, agree_max if form.dynamic else None)


def form_of(weight: Tensor) -> Form:
    """The form of a plain tensor or a torchao one."""
    match type(weight).__name__:
        case "Int8Tensor":
            return Form("int8", dynamic=weight.act_quant_kwargs is not None)  # type: ignore[attr-defined]
        case "Int4Tensor":
            return Form("int4", weight.block_size[1])  # type: ignore[attr-defined]
        case "IntxUnpackedToInt8Tensor":
            return Form("int4", weight.block_size[1], weight.activation_quantization is not None)  # type: ignore[attr-defined]
        case "Float8Tensor":
            return Form("float8", dynamic=weight.act_quant_kwargs is not None)  # type: ignore[attr-defined]
        case "Tensor" | "Parameter":
            return Form()
        case _:
            return Form("other")


def packed_bytes(form: Form, rows: int, columns: int, dtype: torch.dtype, device: str) -> int:
    """Bytes that a packed weight [rows, columns] holds."""
    return choose(form, rows, columns, device, dtype).packed_bytes(form, rows, columns, dtype)
