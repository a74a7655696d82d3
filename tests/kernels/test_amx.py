"""Our own kernels on AMX: right at any shape, the same for a token whoever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.making import ON_CPU, ROUNDING, tokens_as_seen, values
from kernels.making import make as make_any
from torch import Tensor, nn

from tpllama.kernels import amx, fused, own, small_m, tiles
from tpllama.kernels.cpu import Int8DynamicLinear, TilesEmbedding, TilesLinear
from tpllama.kernels.linear import PlainLinear, quantize_tokens
from tpllama.kernels.pack import pack as pack_any
from tpllama.kernels.pack import tied_embedding
from tpllama.recording import Memory, recording

pytestmark = pytest.mark.skipif(not amx.is_there(), reason=amx.why_not() or "")
BFLOAT16 = torch.bfloat16
AS_ROWS = "none, as rows"  # as weights have them whose tiles aren't whole
NAMES = [*ON_CPU, AS_ROWS]


def make(name: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Any, Tensor]:
    return make_any(name.partition(",")[0], shape, dtype, seed)


def pack(name: str, weight: Any, bias: Tensor | None = None, agree_max: Any = None) -> Any:
    if name in ("none", "int8dq"):  # also where `choose` takes others, as tiles are not whole
        return TilesLinear.from_neutral(weight, bias, agree_max)
    if name == AS_ROWS:
        return PlainLinear.from_neutral(weight, bias, agree_max)
    return pack_any(weight, bias, "cpu", agree_max)


@contextmanager
def from_row(count: int) -> Iterator[None]:
    """From so many rows on ours are taken."""
    with patch.dict(amx.MANY_ROWS, dict.fromkeys(amx.MANY_ROWS, count)):
        yield


def ours(packed: nn.Module, x: Tensor) -> Tensor:
    with from_row(1):
        return packed(x)


def others(packed: nn.Module, x: Tensor) -> Tensor:
    if isinstance(packed, TilesLinear):
        panels = packed.tiles.view(torch.int32)  # [panels, steps, 2, 16 of k, 16 outputs]
        rows = panels.permute(0, 2, 4, 1, 3).reshape(32 * len(panels), -1).view(packed.tiles.dtype)
        rows = rows[: packed.out_features, : x.shape[-1]].contiguous()
        if packed.scale is None:
            packed = PlainLinear.from_neutral(rows, packed.bias, None)
        else:
            packed = Int8DynamicLinear(rows, packed.scale, packed.bias, packed.agree_max)
    with from_row(1 << 30):
        return packed(x)


def tokens(count: int, columns: int, seed: int = 0) -> Tensor:
    """Of very different sizes, one of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator) * 10.0 ** torch.randint(-3, 3, (count, 1), generator=generator)
    x[count // 2] *= count > 2
    return x.to(BFLOAT16)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES), rows=st.one_of(st.integers(1, 70), st.just(530)), outputs=st.integers(1, 290),
    columns=st.one_of(st.integers(1, 200), st.integers(1, 20).map(lambda n: 32 * n), st.integers(2000, 2200)),
    with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_equals_float64_and_the_other_kernels(
    name: str, rows: int, outputs: int, columns: int, with_bias: bool, seed: int
) -> None:
    if not name.startswith("none"):  # torchao can't do with one column, nor its int4 with odd ones
        columns += columns % 2
    weight, bias = make(name, (outputs, columns), BFLOAT16, seed)
    x = tokens(rows, columns, seed)
    packed = pack(name, weight, bias if with_bias else None)
    y = ours(packed, x)
    seen, own_bias = tokens_as_seen(x, weight), bias.double() if with_bias else None
    exact = F.linear(seen, values(weight), own_bias)
    sizes = F.linear(seen.abs(), values(weight).abs(), None if own_bias is None else own_bias.abs())
    assert ((y.double() - exact).abs() <= 2 * ROUNDING[BFLOAT16] * sizes + 1e-7).all()
    if name == "int8dq":
        assert torch.equal(y, others(packed, x))


def test_int8dq_is_the_librarys_bit_for_bit() -> None:
    """Also where outputs are among bfloat16's smallest numbers."""
    for outputs, columns, size in ((64, 256, 1.0), (33, 70, 1.0), (18, 2100, 1.0), (40, 64, 1e-33)):
        weight, _ = make("int8dq", (outputs, columns), BFLOAT16)
        packed, x = pack("int8dq", weight), tokens(40, columns)
        packed.scale *= size
        packed.least_scale *= size
        x[3] = torch.linspace(-255, 255, columns).round() / 2  # ties
        q, scale = quantize_tokens(x, None)
        expected = (torch._int_mm(q, weight.qdata.t()).float() * scale * packed.scale).to(BFLOAT16)
        assert expected.count_nonzero() > expected.numel() // 2
        assert torch.equal(ours(packed, x), expected)
        if size == 1:  # where few tokens' kernel runs without AVX-512 it is the library's, too
            assert torch.equal(others(packed, x), expected)


@pytest.mark.parametrize("name", ["int8dq", "8da4w-32"])
def test_a_range_that_ranks_agreed_on_counts(name: str) -> None:
    weight, _ = make(name, (40, 256), BFLOAT16)
    x = tokens(600, 256)  # more than are multiplied at once
    y = ours(pack(name, weight, None, lambda extremes: extremes * 2), x)
    assert torch.equal(y, torch.cat([ours(pack(name, weight, None, lambda e: e * 2), part) for part in x.split(77)]))
    assert not torch.equal(y, ours(pack(name, weight), x))
    if name == "int8dq":
        assert torch.equal(y, others(pack(name, weight, None, lambda extremes: extremes * 2), x))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_computed_alike_whoever_is_beside_it(name: str) -> None:
    """One, a few, and more than are multiplied at once; in one block of columns and in two."""
    for columns in (256, 2304):
        weight, _ = make(name, (100, columns), BFLOAT16)
        packed, x = pack(name, weight), tokens(530, columns)
        together = ours(packed, x)
        for first, last in ((0, 1), (1, 3), (3, 19), (19, 51), (51, 180), (180, 530)):
            assert torch.equal(ours(packed, x[first:last]), together[first:last])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES), rows=st.one_of(st.integers(1, 70), st.just(530)),
    outputs=st.one_of(st.integers(1, 150), st.integers(1, 5).map(lambda n: 32 * n)),
    columns=st.one_of(st.integers(2, 200).map(lambda n: 2 * n), st.integers(2000, 2200).map(lambda n: n // 2 * 2)),
    threads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_gate_and_up_at_once_are_gate_and_up(
    name: str, rows: int, outputs: int, columns: int, threads: int, seed: int
) -> None:
    """Bit for bit what the kernels for each and the one for silu make of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, _ = make(name, (2 * outputs, columns), BFLOAT16, seed)
        packed: Any = pack(name, weight)
        x = tokens(rows, columns, seed) * 3
        with from_row(1):
            found = own.gated(x, packed.own_weight())
        if isinstance(packed, TilesLinear) and outputs % tiles.PANEL_OUTPUTS:
            assert found is None  # up would begin within a tile
            return
        assert found is not None
        expected = fused.silu_and_multiply(*ours(packed, x).split(outputs, 1))
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["none", AS_ROWS])
def test_silu_of_every_value(name: str) -> None:
    gates = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    weight = torch.stack((gates, torch.ones_like(gates)), 0).flatten()[:, None]  # all gates, and up is 1
    x = torch.ones(40, 1).to(BFLOAT16)
    packed: Any = pack(name, weight.contiguous())
    with from_row(1):
        found = own.gated(x, packed.own_weight())
    # Tiles take the smallest numbers for zeros.
    is_normal = gates.abs() >= torch.finfo(BFLOAT16).tiny
    expected = fused.silu_and_multiply(gates[None], torch.ones_like(gates)[None])[0]
    for row in (found[0], found[39]):
        assert torch.equal(row[is_normal].view(torch.int16), expected[is_normal].view(torch.int16))


@pytest.mark.parametrize("name", ["none", AS_ROWS])
@pytest.mark.parametrize("gate", [float("inf"), -float("inf"), 3e38, 81.0, -81.0, 1e-38])
def test_silu_of_a_value_whose_neighbours_are_usual(name: str, gate: float) -> None:
    gates = torch.ones(32, dtype=BFLOAT16)
    gates[5] = gate
    is_infinite = gates.isinf()
    weight = torch.stack((gates.where(~is_infinite, gates.sign() * 1e20), torch.ones_like(gates)), 0).flatten()[:, None]
    x = torch.full((40, 1), 1e20 if is_infinite.any() else 1).to(BFLOAT16)
    packed: Any = pack(name, weight.contiguous())
    with from_row(1):
        found = own.gated(x, packed.own_weight())
    expected = fused.silu_and_multiply(*ours(packed, x).split(32, 1))
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", ["int8dq", "int8wo"])
def test_silu_of_the_smallest_values_and_of_zeros_of_both_signs(name: str) -> None:
    weight, _ = make(name, (128, 96), BFLOAT16)
    packed: Any = pack(name, weight)
    packed.scale[:64] *= 1e-38
    if name == "int8dq":
        packed.least_scale *= 1e-38
    x = tokens(40, 96)
    with from_row(1):
        found = own.gated(x, packed.own_weight())
    gate, up = ours(packed, x).split(64, 1)
    is_zero = gate == 0
    assert (is_zero & gate.signbit()).any()
    assert (is_zero & ~gate.signbit()).any()
    assert torch.equal(found.view(torch.int16), fused.silu_and_multiply(gate, up).view(torch.int16))


def test_the_smallest_outputs_of_a_token_stay_beside_a_value_that_is_no_number() -> None:
    weight, _ = make("int8dq", (64, 64), BFLOAT16)
    packed: Any = pack("int8dq", weight)
    packed.scale *= 1e-36
    packed.least_scale *= 1e-36
    x = tokens(40, 64) * 1e-3
    alone = ours(packed, x[:20])
    x[38], x[39] = torch.nan, 1e30
    assert ((alone != 0) & (alone.abs() < torch.finfo(BFLOAT16).tiny)).any()
    assert torch.equal(ours(packed, x)[:20], alone)


@pytest.mark.parametrize("name", NAMES)
def test_threads_share_tokens_and_outputs(name: str) -> None:
    """Also where tokens are more than a core's cache holds, and results are written past it."""
    before = torch.get_num_threads()
    try:
        for outputs, columns, count in ((200, 256, 50), (1, 256, 40), (512, 2304, 530)):
            weight, _ = make(name, (outputs, columns), BFLOAT16)
            packed, x = pack(name, weight), tokens(count, columns)
            found = []
            for threads in (1, 2, 3, 16):
                torch.set_num_threads(threads)
                found.append(ours(packed, x))
            assert all(torch.equal(each, found[0]) for each in found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_no_number_shows_in_its_token_alone(name: str) -> None:
    weight, _ = make(name, (32, 128), BFLOAT16)
    packed = pack(name, weight)
    for bad in (float("nan"), -float("nan"), float("inf")):
        x = torch.randn(20, 128).to(BFLOAT16)
        good = ours(packed, x)
        x[7, 40] = bad
        y, other = ours(packed, x), others(packed, x)
        rest = torch.arange(20) != 7
        assert torch.equal(y[rest], good[rest])
        assert torch.equal(y[7].isfinite(), other[7].isfinite())
        assert not y[7].isfinite().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 70), (32, 64), (96, 40), (352, 2048)])
def test_a_team_computes_what_one_caller_has_computed(name: str, outputs: int, columns: int) -> None:
    weight, _ = make(name, (outputs, columns), BFLOAT16)
    packed: Any = pack(name, weight)
    before = torch.get_num_threads()
    for count in (1, 5, 17, 32, 40):
        x = tokens(count, columns)
        with from_row(1), recording(Memory()) as made:
            y = own.linear(x, packed.own_weight())
        assert y is not None
        expected = y.clone()
        for threads in (1, 2, 3):
            y.fill_(torch.nan)
            torch.set_num_threads(threads)
            made.replay()
            assert torch.equal(y, expected)
    torch.set_num_threads(before)


def test_an_embedding_has_the_rows_of_the_head_that_it_is_tied_to() -> None:
    weight = torch.randn(96, 160).to(BFLOAT16)
    head = pack_any(weight, None, "cpu")
    embedding = tied_embedding(head)
    assert isinstance(embedding, TilesEmbedding)
    assert embedding.tiles.data_ptr() == head.tiles.data_ptr()
    ids = torch.randint(96, (3, 7))
    assert torch.equal(embedding(ids), weight[ids])
    assert torch.equal(embedding(ids.t()), weight[ids.t()])
    assert embedding(ids[:0]).shape == (0, 7, 160)
    for token in (-1, 96):
        with pytest.raises(IndexError, match=f"found token {token}, expected 0 to 95"):
            embedding(torch.tensor([3, token]))


def test_an_embedding_without_tiles_is_the_heads_weight() -> None:
    head = pack_any(torch.randn(90, 160).to(BFLOAT16), None, "cpu")
    embedding: Any = tied_embedding(head)
    assert embedding.weight.data_ptr() == head.weight.data_ptr()
    assert torch.equal(embedding(torch.tensor([3, 89])), head.weight[[3, 89]])


def test_compiled_layers_use_it() -> None:
    weight, _ = make("int8dq", (64, 128), BFLOAT16)
    packed = pack("int8dq", weight)
    compiled = torch.compile(packed, backend="aot_eager", dynamic=True, fullgraph=True)
    for count in (2, 40, 130):
        x = tokens(count, 128)
        assert torch.equal(compiled(x), packed(x))


@pytest.mark.parametrize("name", ["none", AS_ROWS])
def test_the_library_computes_between_two_calls(name: str) -> None:
    """It has its own settings of the tiles, on the same threads."""
    weight, _ = make(name, (64, 256), BFLOAT16)
    packed, x, a = pack(name, weight), tokens(40, 256), torch.randn(256, 256).to(BFLOAT16)
    y, product = ours(packed, x), a @ a
    for _ in range(3):
        assert torch.equal(ours(packed, x), y)
        assert torch.equal(a @ a, product)


def test_without_it_others_compute_and_say_so() -> None:
    with patch.object(amx, "_native", lambda: "this processor has no AMX"):
        assert amx.why_not() == "this processor has no AMX"
        assert amx.kernel_name("int8").startswith(small_m.kernel_name())
        assert "AMX" not in amx.kernel_name("int8")
        weight, _ = make("int8wo", (64, 256), BFLOAT16)
        packed, x = pack("int8wo", weight), torch.randn(64, 256).to(BFLOAT16)
        assert not amx.fits("int8", x)
        assert torch.equal(packed(x), others(packed, x))
    with from_row(3):
        assert amx.kernel_name("int8") == f"{small_m.kernel_name()}; from 3 rows on own, AMX"
    with from_row(1):
        assert amx.kernel_name("int8") == "own, AMX"
