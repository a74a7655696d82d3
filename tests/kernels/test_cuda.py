"""The packed linears for CUDA as far as a CPU goes: arithmetic, padding, layouts, and shapes on tensors of a GPU.

Float8 and int8 products are torch's own on the CPU too; tinygemm is written down in tinygemm.py. tests/test_gpu.py
runs the same linears where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.making import assert_near, make, neutral_of_any, tokens_as_seen, values
from kernels.tinygemm import places
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from tpllama.build import weight_bytes
from tpllama.kernels import tinygemm
from tpllama.kernels.cuda import IntMatmulLinear, ScaledMatmulLinear, WideningLinear, why_not
from tpllama.kernels.linear import DequantizingLinear, Form, PlainLinear
from tpllama.kernels.pack import choose, form_of, pack, packed_bytes, why_dequantized
from tpllama.kernels.tinygemm import TinygemmLinear, dequantize_tiles, padded
from tpllama.quantization.quantize import cut_columns
from tpllama.quantization.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("tinygemm_on_cpu")

H100, ADA, A100, T4 = (9, 0), (8, 9), (8, 0), (7, 5)
BF16 = torch.bfloat16
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe]
LINEARS = {
    "int8wo": WideningLinear, "fp8wo": WideningLinear, "int8dq": IntMatmulLinear, "fp8dq-per_row": ScaledMatmulLinear,
    "fp8dq-per_tensor": ScaledMatmulLinear, "int4wo": TinygemmLinear, "8da4w": TinygemmLinear,
}  # fmt: skip
# Rows and columns that are multiples of what kernels want, and not.
SHAPES = [(64, 512), (50, 256), (33, 768)]
TOKENS = (1, 2, 17, 32, 33, 70)


def made(name: str, shape: tuple[int, int], dtype: torch.dtype = BF16) -> tuple[Any, Tensor]:
    plain, bias = make("none", shape, dtype)
    return neutral_of_any(name, plain), bias


def packed(name: str, weight: Any, bias: Tensor | None = None, **more: Any) -> Any:
    linear = pack(weight, bias, "cuda", **more)
    assert isinstance(linear, LINEARS[name if name in LINEARS else name.split("-")[0]])
    return linear


def tokens(count: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_packed_linear_equals_its_weights_values(name: str, shape: tuple[int, int]) -> None:
    weight, bias = made(name, shape)
    for count in TOKENS:
        x = tokens(count, shape[1])
        y = packed(name, weight, bias)(x)
        assert y.dtype == BF16
        if name.startswith("fp8dq"):
            reference = DequantizingLinear(weight, bias, None)(x).double()
        else:
            reference = F.linear(tokens_as_seen(x, weight), values(weight), bias.double())
        assert_near(y, reference, BF16, times=1.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["int8wo", "fp8wo", "int8dq"])
def test_other_dtypes_where_a_kernel_takes_them(name: str, dtype: torch.dtype) -> None:
    weight, bias = made(name, (50, 256), dtype)
    x = tokens(5, 256, dtype)
    reference = F.linear(tokens_as_seen(x, weight), values(weight), bias.double())
    assert_near(packed(name, weight, bias)(x), reference, dtype, times=1.5)


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_leading_dimensions_even_none_and_empty(name: str) -> None:
    weight, bias = made(name, (50, 256))
    linear, x = packed(name, weight, bias), tokens(6, 256)
    assert torch.equal(linear(x.view(2, 3, -1)), linear(x).view(2, 3, -1))
    assert linear(x[0]).shape == (50,)
    assert linear(x[:0]).shape == (0, 50)
    assert linear(x[:0].view(2, 0, 256)).shape == (2, 0, 50)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_tiles_become_the_weight_again(group_size: int) -> None:
    weight, _ = made(f"int4wo-{group_size}", (40, 512))
    linear = packed("int4wo", weight)
    found = dequantize_tiles(linear.tiles, linear.scales_and_zeros, linear.table)
    # tinygemm multiplies and adds in one rounding, as addcmul does.
    assert_near(found, values(weight), BF16, times=0.5)
    assert places(40, 512).flatten(0, -2).unique(dim=0).shape[0] == 40 * 256  # every pair has its place


@pytest.mark.parametrize("name", ["int4wo-128", "8da4w-64"])
def test_many_rows_equal_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the weight is cut into panels."""
    weight, bias = made(name, (50, 256))
    linear, x = packed(name, weight, bias), tokens(40, 256)
    few = torch.cat([linear(part) for part in x.split(32)])
    for panel in (1, 3 * 8 * 256, 1 << 26):
        monkeypatch.setattr(tinygemm, "_PANEL", panel)
        assert_near(linear(x), few.double(), BF16)


@pytest.mark.parametrize("name", ["int4wo-32", "int8dq", "fp8dq-per_row", "8da4w-32"])
def test_any_slice_of_columns_is_filled_up(name: str) -> None:
    """Slices that tinygemm's tiles, and torchao's of 1024 columns, don't fit."""
    weight, _ = made(name, (48, 512))
    x = tokens(3, 512)
    whole = DequantizingLinear(weight, None, lambda extremes: extremes)(x).double()
    extremes = torch.stack((x.amax(1), -x.amin(1)))
    partial = torch.zeros(3, 48, dtype=torch.float64)
    for own in (slice(0, 32), slice(32, 224), slice(224, 512)):
        linear = packed(name, cut_columns(weight, own), agree_max=lambda _: extremes.clone())
        partial += linear(x[:, own]).double()
    assert_near(partial, whole, BF16, times=2)


@pytest.mark.parametrize("name", ["int8dq", "fp8dq-per_row", "fp8dq-per_tensor", "8da4w-32"])
def test_ranks_are_asked_for_the_tokens_range(name: str) -> None:
    weight, _ = made(name, (48, 256))
    asked: list[Tensor] = []

    def agree(extremes: Tensor) -> Tensor:
        asked.append(extremes.clone())
        return extremes * 4

    x = tokens(3, 256)
    y = packed(name, weight, agree_max=agree)(x)
    assert torch.equal(asked[0], torch.stack((x.amax(1), -x.amin(1))))
    if not name.startswith("fp8"):  # whose values keep their precision
        assert not torch.equal(y, packed(name, weight)(x))


@pytest.mark.parametrize("shape", [*SHAPES, (8, 128), (1, 256)], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_bytes_are_those_held(name: str, shape: tuple[int, int]) -> None:
    weight, _ = made(name, shape)
    assert packed_bytes(form_of(weight), *shape, BF16, "cuda") == weight_bytes(pack(weight, None, "cuda"))


REASONS = [
    ("int8wo", BF16, T4, None),
    ("int8dq", BF16, T4, None),
    ("int8dq", torch.float16, T4, None),
    ("fp8wo", torch.float32, A100, None),
    ("int4wo-32", BF16, A100, None),
    ("int4wo-32", BF16, T4, "its kernel needs compute capability 8.0, this GPU has 7.5"),
    ("int4wo-32", torch.float32, H100, "its kernel takes bfloat16, not float32"),
    ("8da4w-32", torch.float16, H100, "its kernel takes bfloat16, not float16"),
    ("fp8dq-per_row", BF16, ADA, None),
    ("fp8dq-per_row", BF16, A100, "its kernel needs compute capability 8.9, this GPU has 8.0"),
    ("fp8dq-per_tensor", torch.float16, H100, "its kernel takes bfloat16, not float16"),
]


@pytest.mark.parametrize(("name", "dtype", "capability", "reason"), REASONS)
def test_a_kernel_or_the_reason_why_none(
    name: str, dtype: torch.dtype, capability: tuple[int, int], reason: str | None
) -> None:
    form = form_of(made(name, (16, 256))[0])
    assert why_dequantized(form, "cuda", dtype, capability) == reason
    expected = DequantizingLinear if reason else LINEARS[name if name in LINEARS else name.split("-")[0]]
    assert choose(form, 16, 256, "cuda", dtype, capability) is expected


def test_forms_that_no_kernel_takes() -> None:
    assert why_not(Form("int4", 16), BF16, H100) == "tinygemm has groups of 32 to 256, not of 16"
    assert why_not(Form("other"), BF16, H100) == "no CUDA kernel for other weights"
    assert choose(Form(), 16, 256, "cuda", BF16, T4) is PlainLinear
    assert why_dequantized(Form(), "cuda", BF16, T4) is why_dequantized(Form("other"), "cpu", BF16) is None


@pytest.mark.parametrize("name", ["fp8dq-per_row", "fp8dq-per_tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_has_no_kernel_is_computed_all_the_same(name: str, dtype: torch.dtype) -> None:
    weight, bias = made(name, (48, 256), dtype)
    linear = pack(weight, bias, "cuda")
    assert isinstance(linear, DequantizingLinear)
    x = tokens(5, 256, dtype)
    exact = F.linear(x.double(), values(weight), bias.double())
    found = linear(x).double()
    assert 0 < float((found - exact).norm()) < 0.05 * float(exact.norm())  # activations are rounded to three bits


@pytest.mark.parametrize("count", TOKENS)
@pytest.mark.parametrize("name", ["none", *QUANTIZED])
def test_shapes_and_dtypes_on_a_gpu(name: str, count: int) -> None:
    """On fake tensors: torch checks what its CUDA kernels are given, as far as their fake ones do."""
    shape = (50, 256)
    linear = pack(*made(name, shape), "cuda")
    with FakeTensorMode():

        def on_gpu(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

        for module in linear.modules():
            module._buffers.update(tree_map(on_gpu, {k: v for k, v in module._buffers.items() if v is not None}))
            module._parameters.update(
                {k: torch.nn.Parameter(on_gpu(v), False) for k, v in module._parameters.items() if v is not None}
            )
        if isinstance(linear, TinygemmLinear):
            linear.table = on_gpu(linear.table)
        x = torch.empty(count, shape[1], dtype=BF16, device="cuda")
        y = linear(x)
    assert (y.shape, y.dtype, y.device.type) == ((count, 50), BF16, "cuda")


def test_filling_up_keeps_bytes_and_dtype() -> None:
    weight = torch.randn(3, 5).to(torch.float8_e4m3fn)
    found = padded(weight, 8, 16)
    assert (found.shape, found.dtype) == ((8, 16), weight.dtype)
    assert torch.equal(found[:3, :5].float(), weight.float())
    assert float(found.float().abs().sum()) == float(weight.float().abs().sum())
