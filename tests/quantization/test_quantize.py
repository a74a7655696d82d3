"""Quantizing a part of a weight gives exactly that part of the whole weight's integers and scales."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.quantization import Int4Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _quantize_affine_tinygemm,
)

from tpllama.kernels.linear import dequantize, int4_parts
from tpllama.quantization.int4 import cut_int4, int4_tensor
from tpllama.quantization.quantize import columns_to_read, join_rows, local_group_size, quantize
from tpllama.quantization.recipes import RECIPES, Recipe

ON_CPU = [name for name, recipe in RECIPES.items() if recipe is not None and "cpu" in recipe.family.devices]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def recipe_named(name: str) -> Recipe:
    recipe = RECIPES[name]
    assert recipe is not None
    return recipe


def random_weight(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of different sizes and offsets, with outliers; one of zeros, one constant, one without a sign change."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10 ** (torch.rand(rows, 1, generator=generator) * 4 - 3)
    weight[:, torch.randint(columns, (1,), generator=generator)] *= 5
    weight[0], weight[1], weight[2] = 0, 0.25, weight[2].abs() + 0.1
    return weight.to(dtype)


def parts_of(weight: Any) -> dict[str, Tensor]:
    """A neutral tensor's integers, and its scales and zero points as one value per column."""
    columns = weight.shape[1]
    if isinstance(weight, Int4Tensor):
        q, scale, zero = int4_parts(weight)
        parts = {"qdata": q, "scale": scale.t(), "zero_point": zero.t()}
    else:
        parts = {"qdata": weight.qdata, "scale": weight.scale}
        if type(weight).__name__ == "IntxUnpackedToInt8Tensor":
            parts["zero_point"] = weight.zero_point
    return {name: part.repeat_interleave(columns // part.shape[1], dim=1) for name, part in parts.items()}


def quantize_parts(weight: Tensor, recipe: Recipe, borders: list[int]) -> list[Tensor]:
    """The parts between borders, each quantized as a rank does; what ranks agree on is computed over all of them."""
    given_to_agree: list[Tensor] = []

    def quantize_part(own: slice, agree_max: Any) -> Tensor:
        reading = columns_to_read(recipe, own, weight.shape[1])
        relative = slice(own.start - reading.start, own.stop - reading.start)
        return quantize(weight[:, reading].clone(), recipe, relative, agree_max)

    def listen(x: Tensor) -> Tensor:
        given_to_agree.append(x.clone())
        return x

    own = [slice(*each) for each in itertools.pairwise(borders)]
    for each in own:
        quantize_part(each, listen)
    if not given_to_agree:
        return [quantize_part(each, None) for each in own]
    agreed = torch.stack(given_to_agree).amax(0)
    return [quantize_part(each, lambda _: agreed.clone()) for each in own]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A number of columns that takes groups of 32, and borders at multiples of 2: uneven parts, one or more."""
    columns = 32 * draw(st.integers(1, 20))
    inner = draw(st.sets(st.integers(1, columns // 2 - 1), max_size=4)) if columns > 2 else set()
    return columns, [0, *sorted(2 * border for border in inner), columns]


@settings(max_examples=15, deadline=None)
@given(split=splits(), rows=st.integers(3, 20), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 30))
@pytest.mark.parametrize("name", ON_CPU)
def test_parts_together_are_the_whole(
    name: str, split: tuple[int, list[int]], rows: int, dtype: torch.dtype, seed: int
) -> None:
    recipe, (columns, borders) = recipe_named(name), split
    if recipe.group_size:
        columns *= recipe.group_size // 32
        borders = [*borders[:-1], columns]
    weight = random_weight(rows, columns, dtype, seed)
    whole = quantize(weight, recipe, slice(0, columns))
    cut = quantize_parts(weight, recipe, borders)
    assert [part.shape[1] for part in cut] == [stop - start for start, stop in itertools.pairwise(borders)]
    assert {part.dtype for part in cut} == {dtype}
    pieces = [parts_of(part) for part in cut]
    for kind, expected in parts_of(whole).items():
        together = torch.cat([piece[kind] for piece in pieces], dim=1)
        assert torch.equal(together.view(torch.uint8), expected.view(torch.uint8)), kind
    values = torch.cat([dequantize(part) for part in cut], dim=1)
    torch.testing.assert_close(values, dequantize(whole), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(24,), (5, 16, 3), (1, 1, 22)], ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_joined_rows_are_the_whole(name: str, rows: tuple[int, ...]) -> None:
    recipe, weight = recipe_named(name), random_weight(24, 512, torch.bfloat16, 1)
    whole = quantize(weight, recipe, slice(0, 512))
    joined = join_rows((quantize(part, recipe, slice(0, 512)) for part in weight.split(rows)), 24)
    assert type(joined) is type(whole)
    assert (joined.shape, joined.dtype, joined.block_size) == (whole.shape, whole.dtype, whole.block_size)
    for kind, expected in parts_of(whole).items():
        assert torch.equal(parts_of(joined)[kind].view(torch.uint8), expected.view(torch.uint8)), kind
    torch.testing.assert_close(dequantize(joined), dequantize(whole), rtol=0, atol=0)
    names, attributes = joined.__tensor_flatten__()
    assert (names, attributes) == whole.__tensor_flatten__()


@pytest.mark.parametrize("name", ON_CPU)
def test_quantized_values_are_near_the_weights(name: str) -> None:
    recipe, weight = recipe_named(name), torch.randn(16, 512)
    error = (dequantize(quantize(weight, recipe, slice(0, 512))) - weight).abs().max()
    step = {"int8": weight.abs().max() / 127, "int4": 2 * weight.abs().max() / 15, "float8": weight.abs().max() / 16}
    assert 0 < error <= step[recipe.family.kind]


@pytest.mark.parametrize("name", ["int8wo", "int8dq", "fp8wo"])
def test_a_rank_that_does_not_agree_gets_other_scales(name: str) -> None:
    """What the agreement is for: this fails where witnesses change nothing."""
    recipe, weight = recipe_named(name), random_weight(16, 64, torch.float32, 2)
    agreed = parts_of(quantize_parts(weight, recipe, [0, 32, 64])[0])
    alone = parts_of(quantize(weight[:, :32], recipe, slice(0, 32)))
    assert not torch.equal(agreed["scale"], alone["scale"])


@given(size=st.sampled_from([32, 64, 128, 256]), groups=st.integers(1, 9), data=st.data())
def test_a_rank_reads_to_the_borders_of_its_groups(size: int, groups: int, data: st.DataObject) -> None:
    in_features = size * groups
    start = data.draw(st.integers(0, in_features - 1))
    stop = data.draw(st.integers(start + 1, in_features))
    reading = columns_to_read(recipe_named(f"int4wo-{size}"), slice(start, stop), in_features)
    assert reading.start % size == reading.stop % size == 0
    assert start - size < reading.start <= start
    assert stop <= reading.stop < stop + size
    assert columns_to_read(recipe_named("int8wo"), slice(start, stop), in_features) == slice(start, stop)
    local = local_group_size(size, start, stop)
    assert size % local == start % local == stop % local == 0
    larger = [each for each in range(local + 1, size + 1) if size % each == 0]
    assert all(start % each or stop % each for each in larger)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from([32, 64, 128, 256]), st.sampled_from(DTYPES))
def test_int4_is_what_torchaos_tinygemm_primitives_give(rows: int, groups: int, size: int, dtype: torch.dtype) -> None:
    weight = random_weight(rows + 2, groups * size, dtype, rows)
    block, limits = (1, size), (torch.int32, 0, 15)
    scale, zero = _choose_qparams_affine_tinygemm(weight, MappingType.ASYMMETRIC, block, *limits, 1e-6)
    expected = _quantize_affine_tinygemm(weight, block, scale, zero, *limits)
    quantized = quantize(weight, recipe_named(f"int4wo-{size}"), slice(0, weight.shape[1]))
    assert isinstance(quantized, Int4Tensor)
    assert list(quantized.block_size) == [1, size]
    q, own_scale, own_zero = int4_parts(quantized)
    assert torch.equal(q.int() + 8, expected)
    assert torch.equal(own_scale.t(), scale.view(rows + 2, groups))
    assert torch.equal(own_zero.t(), zero.view(rows + 2, groups))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 1 << 30))
def test_int4_parts_survive_the_round_trip(rows: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (rows, 2 * pairs), generator=generator, dtype=torch.int8)
    scale, zero = torch.randn(2, pairs, rows, generator=generator).to(torch.bfloat16)
    weight = int4_tensor(q, scale, zero, 2)
    assert weight.shape == q.shape
    assert weight.qdata.numel() * 2 == q.numel()
    for part, expected in zip(int4_parts(weight), (q, scale, zero), strict=True):
        assert torch.equal(part, expected)
    values = q * scale.t().repeat_interleave(2, dim=1) + zero.t().repeat_interleave(2, dim=1)
    assert torch.equal(dequantize(weight), values)


def test_cutting_int4_repeats_scales_of_groups_it_makes_smaller() -> None:
    q = torch.arange(128, dtype=torch.int8).view(2, 64) % 16 - 8
    scale, zero = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    cut = cut_int4(int4_tensor(q, scale, zero, 32), slice(16, 48), 16)
    assert cut.shape == (2, 32)
    assert list(cut.block_size) == [1, 16]
    parts = int4_parts(cut)
    assert torch.equal(parts[0], q[:, 16:48])
    assert torch.equal(parts[1], scale)
    assert torch.equal(parts[2], zero)
    narrower = cut_int4(int4_tensor(q, scale, zero, 32), slice(0, 16), 16)
    assert torch.equal(int4_parts(narrower)[1], scale[:1])
