"""Our own kernels for few tokens: right at any shape, the same for a token whoever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.making import DTYPES, ON_CPU, ROUNDING, assert_near, make, tokens_as_seen, values
from torch import Tensor, nn
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from tpllama.build import weight_bytes
from tpllama.kernels import amx, small_m, tiles
from tpllama.kernels.cpu import Int4Linear
from tpllama.kernels.int4 import OwnInt4Linear, pack_int4
from tpllama.kernels.linear import quantize_tokens, token_range
from tpllama.kernels.pack import choose, form_of, pack, packed_bytes

pytestmark = pytest.mark.skipif(small_m.level() < 0, reason=small_m.kernel_name())
LEVELS = range(small_m.level() + 1)
BFLOAT16 = torch.bfloat16


@pytest.fixture(autouse=True)
def without_amx() -> Iterator[None]:
    """Many tokens are the library's here."""
    with patch.object(amx, "_native", lambda: "not here"), patch.object(tiles, "_native", lambda: "not here"):
        yield


def by_library(packed: nn.Module, x: Tensor) -> Tensor:
    with patch.dict(small_m.FEW_ROWS, dict.fromkeys(small_m.FEW_ROWS, 0)):
        return packed(x)


def tokens(count: int, columns: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """Of very different sizes, one of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator) * 10.0 ** torch.randint(-3, 3, (count, 1), generator=generator)
    x[count // 2] *= count > 2
    return x.to(dtype)


def exact_tokens(x: Tensor, weight: Any) -> Tensor:
    """As `tokens_as_seen`, without the rounding of what 8da4w's integers are worth."""
    if not (form_of(weight).kind == "int4" and form_of(weight).dynamic):
        return tokens_as_seen(x, weight)
    limits, block = {"quant_min": -128, "quant_max": 127}, (1, x.shape[1])
    parts = choose_qparams_affine(x, MappingType.ASYMMETRIC, block, torch.int8, zero_point_dtype=torch.int8, **limits)
    quantized = quantize_affine(x, block, *parts, torch.int8, **limits)
    return dequantize_affine(quantized, block, *parts, torch.int8, output_dtype=torch.float32, **limits).double()


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(ON_CPU), rows=st.integers(1, 33), outputs=st.integers(1, 70),
    columns=st.one_of(st.integers(1, 200), st.integers(1, 20).map(lambda n: 32 * n)),
    dtype=st.sampled_from((BFLOAT16, *DTYPES)), with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_equals_float64_and_the_library(
    name: str, rows: int, outputs: int, columns: int, dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    if name != "none":  # torchao can't do with one column, nor its int4 with odd ones
        columns += columns % 2
    weight, bias = make(name, (outputs, columns), dtype, seed)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    packed = pack(weight, bias if with_bias else None, "cpu")
    y, library = packed(x), by_library(packed, x)
    seen, own_bias = tokens_as_seen(x, weight), bias.double() if with_bias else None
    exact = F.linear(seen, values(weight), own_bias)
    sizes = F.linear(seen.abs(), values(weight).abs(), None if own_bias is None else own_bias.abs())
    for each in (y, library):
        assert ((each.double() - exact).abs() <= 2 * ROUNDING[dtype] * sizes + 1e-7).all()
    form = form_of(weight)
    assert packed_bytes(form, *weight.shape, dtype, "cpu") + with_bias * bias.nbytes == weight_bytes(packed)
    if name == "int8dq":
        assert torch.equal(y, library)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8dq_is_the_librarys_bit_for_bit(dtype: torch.dtype, level: int) -> None:
    with patch.object(small_m, "_level", lambda: level):
        for outputs, columns in ((64, 256), (33, 70), (1, 1), (18, 1000)):
            weight, _ = make("int8dq", (outputs, columns), dtype)
            packed, x = pack(weight, None, "cpu"), tokens(16, columns, columns, dtype)
            assert torch.equal(
                small_m.extremes(x), torch.cat(token_range(x, None)[::-1], dim=1).t() * torch.tensor([[1], [-1]])
            )
            expected = by_library(packed, x)
            assert torch.equal(packed(x), expected)
            assert torch.equal(
                packed.__class__(packed.qdata, packed.scale, None, lambda extremes: extremes)(x), expected
            )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["none", "int8wo"])
def test_without_avx512_too(name: str, level: int) -> None:
    with patch.object(small_m, "_level", lambda: level):
        for outputs, columns in ((64, 256), (33, 70), (1, 1), (18, 1000)):
            weight, _ = make(name, (outputs, columns), BFLOAT16)
            x = tokens(5, columns)
            y = small_m.linear("plain" if name == "none" else "int8", x, *_parts(weight))
            assert_near(y, F.linear(x.double(), values(weight)), BFLOAT16, times=2)


def _parts(weight: Any) -> tuple[Tensor, int, Tensor | None]:
    if type(weight) is Tensor:
        return weight, weight.shape[0], None
    return weight.qdata, weight.shape[0], weight.scale.flatten().to(BFLOAT16)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_token_is_computed_alike_whoever_is_beside_it(name: str) -> None:
    weight, _ = make(name, (70, 768), BFLOAT16)
    packed, x = pack(weight, None, "cpu"), tokens(16, 768)
    alone = torch.cat([packed(row) for row in x.split(1)])
    for count in range(2, 17):
        assert torch.equal(packed(x[-count:]), alone[-count:])


@pytest.mark.parametrize("name", [name for name in ON_CPU if name.startswith(("int4wo", "8da4w"))])
@pytest.mark.parametrize("columns", [256, 768])
def test_int4_is_nearer_to_float64_than_the_librarys(name: str, columns: int) -> None:
    torch.manual_seed(columns)
    weight, _ = make(name, (64, columns), BFLOAT16)
    own, library, x = (
        pack(weight, None, "cpu"),
        Int4Linear.from_neutral(weight, None, None),
        torch.randn(16, columns).to(BFLOAT16),
    )
    assert isinstance(own, OwnInt4Linear)
    # The library rounds dequantized tokens to bfloat16 once more; ours takes their integers.
    exact, seen = (F.linear(each, values(weight)) for each in (exact_tokens(x, weight), tokens_as_seen(x, weight)))
    assert (own(x).double() - exact).norm() <= 1.1 * (library(x).double() - seen).norm()


def test_threads_share_the_outputs() -> None:
    before = torch.get_num_threads()
    try:
        for name in ON_CPU:
            weight, _ = make(name, (70, 256), BFLOAT16)
            packed, x = pack(weight, None, "cpu"), tokens(3, 256)
            found = []
            for threads in (1, 2, 3, 64):
                torch.set_num_threads(threads)
                found.append(packed(x))
            assert all(torch.equal(each, found[0]) for each in found)
    finally:
        torch.set_num_threads(before)


def test_a_value_that_is_no_number_shows() -> None:
    for name in ON_CPU:
        weight, _ = make(name, (32, 256), BFLOAT16)
        x = torch.randn(2, 256).to(BFLOAT16)
        for bad in (float("nan"), -float("nan")):
            x[1, 40] = bad
            y = pack(weight, None, "cpu")(x)
            assert y[0].isfinite().all()
            assert y[1].isnan().all()


@pytest.mark.parametrize("kind", ["plain", "int8", "float8", "int4"])
def test_small_values_count_beside_a_large_one(kind: small_m.Kind) -> None:
    """A token's other values keep their precision where one is 10,000 times larger and its weights are zero."""
    if not small_m.has(kind):
        pytest.skip(small_m.kernel_name())
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (64, 256), generator=generator)
    x = torch.randn(3, 256, generator=generator).to(BFLOAT16)
    q[:, 100], x[:, 100] = 0, 1e4
    dtypes = {"plain": BFLOAT16, "int8": torch.int8, "float8": torch.float8_e4m3fn}
    weight = pack_int4(q.to(torch.int8)) if kind == "int4" else q.to(dtypes[kind])
    scale = None if kind == "plain" else torch.ones(64, 8 if kind == "int4" else 1, dtype=BFLOAT16)
    y = small_m.linear(kind, x, weight, 64, scale, None, 32 * (kind == "int4"))
    assert_near(y, F.linear(x.double(), q.double()), BFLOAT16, times=1)


@pytest.mark.skipif(not small_m.has("int4"), reason=small_m.kernel_name())
@pytest.mark.parametrize("kind", ["int4", "int4_dynamic"])
def test_int4_without_zeros(kind: small_m.Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (18, 128), dtype=torch.uint8, generator=generator)
    scale, x = torch.rand(18, 8, generator=generator).to(BFLOAT16), tokens(3, 256)
    found = small_m.linear(kind, x, weight, 18, scale, None, 32)
    assert torch.equal(found, small_m.linear(kind, x, weight, 18, scale, torch.zeros_like(scale), 32))
    wide = small_m.many_rows("int4", x, weight, 18, scale, None, 32)
    assert torch.equal(wide, small_m.many_rows("int4", x, weight, 18, scale, torch.zeros_like(scale), 32))


def test_compiled_layers_use_it() -> None:
    weight, _ = make("int8dq", (64, 128), BFLOAT16)
    packed, x = pack(weight, None, "cpu"), tokens(4, 128)
    compiled = torch.compile(packed, backend="aot_eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(x), packed(x))
    assert torch.equal(compiled(tokens(40, 128)), packed(tokens(40, 128)))


def test_without_a_compiler_the_library_does_it() -> None:
    with patch.object(small_m, "_level", lambda: -1):
        for name in ON_CPU:
            weight, _ = make(name, (64, 256), BFLOAT16)
            packed, x = pack(weight, None, "cpu"), torch.randn(4, 256).to(BFLOAT16)
            assert not isinstance(packed, OwnInt4Linear)
            assert_near(packed(x), F.linear(tokens_as_seen(x, weight), values(weight)), BFLOAT16, times=1.5)
    with patch.object(small_m, "_native", lambda: "no C++ compiler"):
        assert small_m.kernel_name() == "torch (no C++ compiler)"


def test_quantized_tokens_are_rounded_once() -> None:
    """Ties of x / scale go to the even integer, as torch rounds them."""
    x = torch.cat((torch.arange(-255, 256) / 2, torch.tensor([127.5]))).repeat(2, 1)
    q, scale = quantize_tokens(x, None)
    eye = torch.eye(x.shape[1], dtype=torch.int8)
    y = small_m.linear("int8_dynamic", x, eye, x.shape[1], torch.ones(x.shape[1]))
    assert torch.equal(y, q.float() * scale)


def test_the_choice_of_int4() -> None:
    form = form_of(make("int4wo-32", (64, 256), BFLOAT16)[0])
    assert choose(form, 64, 256, "cpu", torch.float32) is Int4Linear
    assert choose(form, 50, 96, "cpu", BFLOAT16) is (OwnInt4Linear if small_m.has("int4") else Int4Linear)
