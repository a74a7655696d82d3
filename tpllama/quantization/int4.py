"""int4 weight-only as torchao's tinygemm kernels define it, in a form that can be sliced and saved.

torchao offers these integers only packed for one device, or, as `Int4Tensor`, through a package that isn't
everywhere. This config makes the same `Int4Tensor` from torchao's own arithmetic: per group of columns,
w = q * scale + zero with q in -8..7, scale = (max - min) / 15 and zero = min + 8 * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import Int4Tensor, MappingType
from torchao.quantization.quant_primitives import _choose_qparams_affine_tinygemm, _quantize_affine_tinygemm
from torchao.quantization.transform_module import register_quantize_module_handler


@dataclass
class Int4PlainConfig(AOBaseConfig):  # type: ignore[misc]
    """A config for torchao's `quantize_`: int4 weights with a float scale and zero per `group_size` columns."""

    group_size: int


@register_quantize_module_handler(Int4PlainConfig)  # type: ignore[untyped-decorator]
def _quantize_module(module: nn.Module, config: Int4PlainConfig) -> nn.Module:
    weight = module.get_parameter("weight")
    module.register_parameter("weight", nn.Parameter(_quantize(weight, config.group_size), requires_grad=False))
    return module


def _quantize(weight: Tensor, group_size: int) -> Tensor:
    block, limits = (1, group_size), (torch.int32, 0, 15)
    scale, zero = _choose_qparams_affine_tinygemm(
        weight, MappingType.ASYMMETRIC, block, *limits, 1e-6, None, weight.dtype
    )
    q = _quantize_affine_tinygemm(weight, block, scale, zero, *limits).to(torch.int8) - 8
    shape = (weight.shape[0], -1)
    return int4_tensor(q, scale.reshape(shape).t(), zero.reshape(shape).t(), group_size)


def int4_tensor(q: Tensor, scale: Tensor, zero: Tensor, group_size: int) -> Tensor:
    """An Int4Tensor of q int8 [rows, columns] in -8..7 and scale, zero [columns / group_size, rows].

    Two values a byte, the even column in the low half, as torchao packs them.
    """
    packed = (q[:, 1::2] << 4) | (q[:, ::2] & 0xF)
    return Int4Tensor(packed, scale.contiguous(), zero.contiguous(), [1, group_size], q.shape)


def cut_int4(weight: Tensor, own: slice, group_size: int) -> Tensor:
    """Columns `own` (even borders) of an Int4Tensor, in groups of `group_size`, which divides its own and cuts none."""
    assert isinstance(weight, Int4Tensor)
    assert own.start % 2 == own.stop % 2 == 0
    repeat = weight.block_size[1] // group_size
    groups = slice(own.start // group_size, own.stop // group_size)
    scale, zero = (x.repeat_interleave(repeat, dim=0)[groups].contiguous() for x in (weight.scale, weight.zero_point))
    packed = weight.qdata[:, own.start // 2 : own.stop // 2].contiguous()
    return Int4Tensor(packed, scale, zero, [1, group_size], torch.Size((weight.shape[0], own.stop - own.start)))
