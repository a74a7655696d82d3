"""Every packed linear computes what its neutral weight says, at any shape, and holds the bytes it says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.making import DTYPES, ON_CPU, assert_near, make, neutral, tokens_as_seen, values
from torch import Tensor, nn
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow, PerTensor, quantize_
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)

from tpllama.build import weight_bytes
from tpllama.kernels.cpu import Int4Linear, Int8DynamicLinear, RowScaledLinear, widen
from tpllama.kernels.linear import (
    DequantizingLinear,
    Form,
    PlainLinear,
    quantize_dequantize_tokens,
    round_to_float8,
)
from tpllama.kernels.pack import choose, form_of, pack, packed_bytes
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import RECIPES

# Out- and in-features: for the kernels, and with rows no multiple of 16, columns none of 16 or 32.
SHAPES = [(64, 256), (48, 512), (50, 256), (1, 256), (64, 72), (33, 20), (16, 2)]
TOKENS = (1, 2, 8, 9, 64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_a_packed_linear_equals_its_weights_values(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = make(name, shape, dtype)
    for count, with_bias in itertools.product(TOKENS, (False, True)):
        x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count)).to(dtype)
        packed = pack(weight, bias if with_bias else None, "cpu")
        expected = F.linear(tokens_as_seen(x, weight), values(weight), bias.double() if with_bias else None)
        y = packed(x)
        assert y.dtype == dtype
        # Scales, and int4's dequantized weights, are rounded to the model's dtype in kernels.
        assert_near(y, expected, dtype, times=1 if form_of(weight).kind == "plain" else 1.5)


@pytest.mark.parametrize("shape", [(64, 256), (50, 256), (33, 20)], ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_any_leading_dimensions_even_none_and_empty(name: str, shape: tuple[int, int]) -> None:
    weight, bias = make(name, shape, torch.bfloat16)
    packed = pack(weight, bias, "cpu")
    x = torch.randn(2, 3, shape[1], dtype=torch.bfloat16)
    flat = packed(x.view(6, -1))
    assert torch.equal(packed(x), flat.view(2, 3, -1))
    # One token's kernel may differ from six tokens'.
    torch.testing.assert_close(packed(x[0, 0]), flat[0], rtol=0.05, atol=0.1)
    assert packed(x[:, :0]).shape == (2, 0, shape[0])
    assert packed(x[:0]).shape == (0, 3, shape[0])


def test_the_kernels_are_chosen_where_they_fit() -> None:
    def chosen(name: str, shape: tuple[int, int], device: str = "cpu") -> type[nn.Module]:
        return choose(form_of(make(name, shape, torch.bfloat16)[0]), *shape, device, torch.float32)

    assert chosen("none", (64, 256)) is PlainLinear
    assert chosen("int8wo", (33, 20)) is chosen("fp8wo", (64, 256)) is RowScaledLinear
    assert chosen("int8dq", (33, 20)) is Int8DynamicLinear
    assert chosen("int4wo-128", (64, 256)) is chosen("8da4w-64", (64, 256)) is Int4Linear
    assert chosen("int4wo-128", (50, 256)) is chosen("8da4w-64", (50, 256)) is DequantizingLinear
    assert chosen("none", (64, 256), "cuda") is PlainLinear
    assert choose(Form("int4", 16), 64, 256, "cpu", torch.bfloat16) is DequantizingLinear


@pytest.mark.parametrize("name", [name for name in ON_CPU if name.startswith(("int4wo", "8da4w"))])
def test_int4_without_a_kernel_equals_int4_with_one(name: str) -> None:
    weight, bias = make(name, (64, 256), torch.float32)
    x = torch.randn(5, 256)
    assert isinstance(pack(weight, bias, "cpu"), Int4Linear)
    assert_near(DequantizingLinear(weight, bias, None)(x), pack(weight, bias, "cpu")(x).double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_widens_exactly(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[~every.float().isnan()]
    assert torch.equal(widen(every, dtype), every.to(dtype))
    assert torch.equal(widen(torch.arange(-128, 128).to(torch.int8), dtype), torch.arange(-128, 128).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8dq_quantizes_tokens_to_torchaos_integers(dtype: torch.dtype) -> None:
    """With the identity as weight, integers are what comes out, times the token's scale."""
    x = torch.cat((torch.randn(200, 64), torch.zeros(1, 64), torch.full((1, 64), -3.0), torch.rand(9, 64))).to(dtype)
    x[5] *= 1000
    x[6] /= 1000
    expected = Int8Tensor.from_hp(x, PerRow())
    packed = Int8DynamicLinear(torch.eye(64, dtype=torch.int8), torch.ones(64), None, None)
    assert torch.equal(packed(x), (expected.qdata.float() * expected.scale).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8da4w_quantizes_tokens_as_torchao_does(dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(200, 64), torch.zeros(1, 64), torch.full((1, 64), -3.0), torch.rand(9, 64))).to(dtype)
    assert torch.equal(quantize_dequantize_tokens(x, None), _apply_int8_act_asym_per_token_quant_dequant(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=["per_row", "per_tensor"])
def test_fp8dq_quantizes_tokens_as_torchao_does(granularity: Any, dtype: torch.dtype) -> None:
    """Of split weights, whose tokens' range the ranks agree on; else torchao's own kernels do it."""
    x = torch.cat((torch.randn(200, 64), torch.full((1, 64), -3.0), 1000 * torch.rand(9, 64))).to(dtype)
    expected = Float8Tensor.from_hp(x, granularity=granularity).dequantize(dtype)
    rounded = round_to_float8(x, lambda extremes: extremes, per_tensor=isinstance(granularity, PerTensor))
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0)
    zeros = torch.zeros(2, 64, dtype=dtype)
    assert torch.equal(round_to_float8(zeros, lambda extremes: extremes, per_tensor=False), zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8dq_without_a_kernel_equals_int8dq_with_one(dtype: torch.dtype) -> None:
    weight, bias = make("int8dq", (48, 96), dtype)
    x = torch.randn(5, 96).to(dtype)
    assert_near(DequantizingLinear(weight, bias, None)(x), pack(weight, bias, "cpu")(x).double(), dtype, times=1.5)


@pytest.mark.parametrize("name", [name for name in ON_CPU if name not in ("none", "int4wo-256")])
def test_one_rank_is_torchaos_own_linear(name: str) -> None:
    """Against F.linear of torchao's tensor, where the CPU has it."""
    recipe = RECIPES[name]
    assert recipe is not None
    linear = nn.Linear(256, 64, dtype=torch.float32)
    weight = neutral(name, linear.weight.detach().clone())
    packed, x = pack(weight, linear.bias.detach(), "cpu"), torch.randn(7, 256)
    if recipe.family.name == "int4wo":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        quantize_(linear, PrototypeInt4WeightOnlyConfig(recipe.group_size))
    else:
        quantize_(linear, recipe.config())
    with torch.no_grad():
        assert_near(packed(x), linear(x).double(), torch.float32)


BORDERS = [(0, 256), (0, 128, 256), (0, 96, 256), (0, 32, 80, 256), (0, 2, 256), (0, 1, 256)]


@pytest.mark.parametrize("borders", BORDERS, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_partial_sums_of_split_columns_add_up(name: str, borders: tuple[int, ...]) -> None:
    recipe = RECIPES[name]
    if borders[1] == 1 and recipe is not None and recipe.family.kind == "int4":
        pytest.skip("two columns in a byte")
    weight, x = torch.randn(48, 256), torch.randn(6, 256)
    own = [slice(*each) for each in itertools.pairwise(borders)]
    # What ranks would agree on, over all of them: ranges of the weight's rows, and of the tokens.
    rows = torch.stack((weight.amax(1), -weight.amin(1)))
    tokens = torch.stack((x.amax(1), -x.amin(1)))
    partial = torch.zeros(6, 48, dtype=torch.float64)
    for part in own:
        if recipe is None:
            local: Any = weight[:, part]
        else:
            size = recipe.group_size or 1
            reading = slice(part.start // size * size, -(-part.stop // size) * size)
            relative = slice(part.start - reading.start, part.stop - reading.start)
            local = quantize(weight[:, reading].clone(), recipe, relative, lambda _: rows.clone())
        partial += pack(local, None, "cpu", lambda _: tokens.clone())(x[:, part]).double()
    whole = pack(neutral(name, weight), None, "cpu")(x).double()
    assert_near(partial, whole, torch.float32)


@pytest.mark.parametrize("name", ["int8dq", "8da4w-32"])
def test_ranks_are_asked_for_the_tokens_range_and_their_answer_counts(name: str) -> None:
    weight, _ = make(name, (32, 64), torch.float32)
    x, asked = torch.randn(3, 64), []

    def agree(extremes: Tensor) -> Tensor:
        asked.append(extremes.clone())
        return extremes * 2  # another rank has values twice as large

    y = pack(weight, None, "cpu", agree)(x)
    assert torch.equal(asked[0], torch.stack((x.amax(1), -x.amin(1))))
    assert len(asked) == 1
    alone = pack(weight, None, "cpu")(x)
    assert not torch.equal(y, alone)
    torch.testing.assert_close(y, alone, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("name", ["none", "int8wo", "fp8wo", "int4wo-32"])
def test_static_recipes_never_ask(name: str) -> None:
    weight, _ = make(name, (32, 64), torch.float32)
    pack(weight, None, "cpu", lambda _: pytest.fail("asked"))(torch.randn(3, 64))


@pytest.mark.usefixtures("tinygemm_on_cpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_packed_bytes_are_those_held(name: str, dtype: torch.dtype, device: str) -> None:
    """Also for the forms that a GPU has, which hold the same bytes in this machine's memory."""
    for rows, columns in SHAPES:
        weight, _ = make(name, (rows, columns), dtype)
        form = form_of(weight)
        packed = choose(form, rows, columns, device, dtype).from_neutral(weight, None, None)
        assert packed_bytes(form, rows, columns, dtype, device) == weight_bytes(packed), (rows, columns)


def test_a_bias_counts_in_held_bytes() -> None:
    weight, bias = make("int8wo", (64, 256), torch.bfloat16)
    assert weight_bytes(pack(weight, bias, "cpu")) == weight_bytes(pack(weight, None, "cpu")) + 64 * 2


def test_weights_that_share_memory_count_once() -> None:
    weight = torch.randn(8, 4)
    both = nn.ModuleList([pack(weight, None, "cpu"), pack(weight, None, "cpu")])
    assert weight_bytes(both) == 8 * 4 * 4
