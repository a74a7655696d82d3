"""From neutral weights to the packed linear that a device runs fastest.

`pack` is the last step of loading and is never saved. It looks at the neutral tensor's class alone, so a new
recipe works at once through `DequantizingLinear`, and gains a kernel when a row of `choose` names one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tpllama.kernels import amx, cuda
from tpllama.kernels.cpu import Int4Linear, Int8DynamicLinear, RowScaledLinear, TilesEmbedding, TilesLinear
from tpllama.kernels.int4 import OwnInt4Linear
from tpllama.kernels.linear import AgreeMax, DequantizingLinear, Form, PlainLinear
from tpllama.kernels.small_m import Kind

CpuLinear = RowScaledLinear | Int8DynamicLinear | TilesLinear | Int4Linear | OwnInt4Linear
PackedLinear = PlainLinear | DequantizingLinear | CpuLinear | cuda.CudaLinear


def choose(
    form: Form, rows: int, columns: int, device: str, dtype: torch.dtype, capability: cuda.Capability | None = None
) -> type[PackedLinear]:
    """The packed linear for a local weight [rows, columns] of a model in `dtype`. capability: of a GPU not here."""
    if device == "cpu" and TilesLinear.fits(form, rows, columns, dtype):
        return TilesLinear
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
    if device == "cuda" and cuda.why_not(form, dtype, capability or cuda.capability()) is None:
        return cuda.cuda_linear(form)
    return DequantizingLinear


def why_dequantized(
    form: Form, device: str, dtype: torch.dtype, capability: cuda.Capability | None = None
) -> str | None:
    """Why a quantized weight is dequantized on each call on a GPU, for people; None where it has a kernel."""
    if device != "cuda" or form.kind == "plain":
        return None
    return cuda.why_not(form, dtype, capability or cuda.capability())


def kernel_name(form: Form, rows: int, columns: int, device: str, dtype: torch.dtype) -> str:
    """Whose kernels the linear of a local weight [rows, columns] takes, for people."""
    chosen = choose(form, rows, columns, device, dtype)
    if chosen is DequantizingLinear:
        return "torch, dequantized on each call"
    if chosen is TilesLinear:
        return "own, AMX"
    is_dynamic_int8 = chosen is Int8DynamicLinear  # in any dtype
    if device != "cpu" or chosen is Int4Linear or not (dtype == torch.bfloat16 or is_dynamic_int8):
        return "torch"
    kind = f"{form.kind}_dynamic" if form.dynamic else form.kind
    return amx.kernel_name(cast(Kind, kind), dtype)


def with_kernel(reason: str, forms: Sequence[Form], device: str, dtype: torch.dtype) -> str:
    """Why a weight becomes what it does (`reason`), and why a GPU has no kernel for some rank's form of it, if so."""
    slow = next(filter(None, (why_dequantized(form, device, dtype) for form in forms)), None)
    if slow is None:
        return reason
    return f"{'' if reason == 'as asked' else f'{reason}; '}dequantized on each call, for {slow}"


def pack(weight: Tensor, bias: Tensor | None, device: str, agree_max: AgreeMax | None = None) -> nn.Module:
    """The packed form of a plain or neutral weight on `device`.

    agree_max: for a weight split by columns, the maximum over its ranks; dynamic activations take their range
    from the whole token then, as they would on one rank.
    """
    form, (rows, columns) = form_of(weight), weight.shape
    chosen = choose(form, rows, columns, device, weight.dtype)
    return chosen.from_neutral(weight, bias, agree_max if form.dynamic else None)


def tied_embedding(head: nn.Module) -> nn.Module:
    """The embedding whose rows are those of a packed plain head, in its memory."""
    if isinstance(head, TilesLinear):
        return TilesEmbedding(head)
    assert isinstance(head, PlainLinear)
    return nn.Embedding.from_pretrained(head.weight)


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
