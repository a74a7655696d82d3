"""What is fused between a layer's linears: torch's results, at any shape, the same for a row whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpllama.kernels import fused
from tpllama.model.llama import RMSNorm
from tpllama.model.rope import rotate

pytestmark = pytest.mark.skipif(not fused.is_available(), reason="no C++ compiler")
LEVELS = range(fused._level() + 1) if fused.is_available() else range(1)
BFLOAT16 = torch.bfloat16


@pytest.fixture(params=LEVELS, ids=lambda level: f"level {level}")
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each kind of processor that this one can be."""
    with patch.object(fused, "_level", lambda: request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16).int()


def assert_one_bit_off_at_most(found: Tensor, expected: Tensor, share: float = 0.01) -> None:
    """Of bfloat16, and in few places: float32 sums in another order."""
    off = (bits(found) - bits(expected)).abs()
    assert off.max() <= 1
    assert (off > 0).double().mean() <= share


def norm_of(columns: int) -> RMSNorm:
    norm = RMSNorm(columns, 1e-5).to(BFLOAT16)
    norm.weight.data = randn(columns, seed=9)
    return norm


@pytest.mark.parametrize("shape", [(1, 2048), (3, 100), (7, 1), (65, 33), (64, 576)], ids=str)
@torch.no_grad()
def test_a_norm_is_torchs(level: int, shape: tuple[int, int]) -> None:
    norm, x, delta = norm_of(shape[1]), randn(*shape), randn(*shape, seed=1)
    assert_one_bit_off_at_most(fused.rms_norm(x, norm.weight, norm.eps), norm(x))
    summed = delta.clone()
    assert_one_bit_off_at_most(fused.rms_norm(x, norm.weight, norm.eps, summed), norm(x + delta))
    assert torch.equal(summed, x + delta)


def test_silu_of_every_value_is_torchs(level: int) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(BFLOAT16).view(256, 256)
    for up in (torch.ones_like(every), randn(256, 256)):
        found, expected = fused.silu_and_multiply(every, up), F.silu(every) * up
        assert torch.equal(found.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert_one_bit_off_at_most(found[numbers], expected[numbers], share=1e-4)


def test_the_parts_of_a_joint_output_lie_apart(level: int) -> None:
    joint = randn(5, 2 * 70)
    gate, up = joint.split_with_sizes([70, 70], -1)
    assert torch.equal(fused.silu_and_multiply(gate, up), fused.silu_and_multiply(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("head_dim", [2, 10, 64, 80, 96, 128])
def test_rotation_is_the_models(level: int, head_dim: int) -> None:
    joint, angles = randn(6, 7 * head_dim), torch.rand(6, 1, head_dim)
    cos_sin = angles.cos().to(BFLOAT16), angles.sin().to(BFLOAT16)
    q, k = joint.split_with_sizes([4 * head_dim, 3 * head_dim], -1)
    expected = [rotate(each.unflatten(-1, (-1, head_dim)), cos_sin).flatten(1) for each in (q, k)]
    fused.rotate(q, k, head_dim, cos_sin)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_a_row_is_computed_alike_whatever_is_beside_it(level: int) -> None:
    norm, x, delta, up = norm_of(700), randn(90, 700), randn(90, 700, seed=1), randn(90, 700, seed=2)
    found = []
    for threads, size in ((1, 1), (1, 90), (2, 90), (3, 45)):
        torch.set_num_threads(threads)
        parts = zip(x.split(size), delta.clone().split(size), up.split(size), strict=True)
        found.append(
            torch.cat([
                torch.cat((fused.rms_norm(a, norm.weight, 1e-5, b), b, fused.silu_and_multiply(a, c)), dim=-1)
                for a, b, c in parts
            ])
        )  # fmt: skip
    assert all(torch.equal(each, found[0]) for each in found)


def attend(
    lengths: list[int], shape: tuple[int, int, int], block: int, seed: int, threads: int = 1, only: int | None = None
) -> tuple[Tensor, Tensor]:
    """Texts whose blocks lie anywhere: what is found, and the definition in float64. only: of these, one alone."""
    torch.set_num_threads(threads)
    heads, kv_heads, dim = shape
    blocks = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)).split(blocks)
    spans = [
        [(int(number) * block, min(block, length - place * block)) for place, number in enumerate(own)]
        for own, length in zip(order, lengths, strict=True)
    ]
    keys, values = (randn(sum(blocks) * block, kv_heads, dim, seed=seed + i) for i in (1, 2))
    q, k, v = (
        randn(len(lengths), count * dim, seed=seed + i) for i, count in ((3, heads), (4, kv_heads), (5, kv_heads))
    )
    chosen = [only] if only is not None else list(range(len(lengths)))
    spans, (q, k, v) = [spans[i] for i in chosen], (each[chosen] for each in (q, k, v))
    slots = torch.tensor([first + size - 1 for *_, (first, size) in spans])
    step = fused.Step(slots, list(enumerate(spans)), dim**-0.5)
    out = torch.full_like(q, 7.0)
    fused.attend(step, q, k, v, dim, None, keys, values, out)
    expected = []
    for row, own in enumerate(spans):
        of_text = torch.cat([torch.arange(first, first + size) for first, size in own])
        assert torch.equal(keys[of_text[-1]].flatten(), k[row])
        own_keys, own_values = (x[of_text].double().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[row].double().view(heads, dim), own_keys) * dim**-0.5
        expected.append(torch.einsum("ht,thd->hd", scores.softmax(-1), own_values).flatten())
    return out, torch.stack(expected)


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 70), st.integers(100, 400)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 4), group=st.integers(1, 9), dim=st.sampled_from([1, 10, 64, 80, 96, 128]),
    block=st.sampled_from([1, 7, 16, 64]), seed=st.integers(0, 99), level=st.sampled_from(LEVELS),
)  # fmt: skip
def test_attention_is_its_definition(
    lengths: list[int], kv_heads: int, group: int, dim: int, block: int, seed: int, level: int
) -> None:
    with patch.object(fused, "_level", lambda: level):
        found, expected = attend(lengths, (kv_heads * group, kv_heads, dim), block, seed)
    # Half of bfloat16's spacing; float32 sums of so few have no part in it.
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


def test_attention_of_a_text_does_not_depend_on_its_company_or_on_threads(level: int) -> None:
    lengths, shape = [1, 300, 64, 65, 200, 17, 130, 90, 33], (12, 3, 80)
    found, _ = attend(lengths, shape, 16, 3)
    for threads in (2, 3):
        assert torch.equal(attend(lengths, shape, 16, 3, threads)[0], found)
    for only in range(len(lengths)):
        assert torch.equal(attend(lengths, shape, 16, 3, 2, only)[0][0], found[only])


def test_attention_does_not_depend_on_where_blocks_lie(level: int) -> None:
    keys, values, q, k = (randn(*shape, seed=i) for i, shape in enumerate([(500, 2, 64)] * 2 + [(1, 512), (1, 128)]))
    moved = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    found = []
    for spans, order in (([(0, 500)], torch.arange(500)), ([(int(slot), 1) for slot in moved.argsort()], moved)):
        own_keys, own_values, out = keys[order], values[order], torch.empty_like(q)
        step = fused.Step(torch.tensor([spans[-1][0] + spans[-1][1] - 1]), [(0, spans)], 0.125)
        fused.attend(step, q, k, k, 64, None, own_keys, own_values, out)
        found.append(out)
    assert torch.equal(*found)


def test_what_is_no_number_shows(level: int) -> None:
    keys = randn(200, 1, 64)
    q, out = randn(2, 128), torch.empty(2, 128, dtype=BFLOAT16)
    for stored in (keys, keys.clone()):
        bad = keys.clone()
        bad[30] = torch.nan
        where = (bad, keys) if stored is keys else (keys, bad)
        step = fused.Step(torch.tensor([90, 199]), [(0, [(0, 91)]), (1, [(100, 100)])], 0.125)
        fused.attend(step, q, keys[:2, 0].clone(), keys[:2, 0].clone(), 64, None, *where, out)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
    assert fused.rms_norm(torch.tensor([[1.0, torch.nan]]).to(BFLOAT16), torch.ones(2).to(BFLOAT16), 1e-5).isnan().all()
