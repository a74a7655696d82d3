"""Attention of prompts in C++: its definition, and the same bits however a prompt is cut and wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpllama.kernels import prompt

pytestmark = pytest.mark.skipif(not prompt.is_available(), reason=prompt.why_not() or "")
BFLOAT16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


class Sequence:
    """A sequence whose blocks lie anywhere: its queries, keys and values by position, and where they are stored."""

    def __init__(self, length: int, shape: tuple[int, int, int], block: int, seed: int) -> None:
        heads, kv_heads, dim = shape
        self.shape, self.length, self.block = shape, length, block
        self.q = randn(length, heads * dim, seed=seed)
        self.k, self.v = (randn(length, kv_heads, dim, seed=seed + i) for i in (1, 2))
        self.order = torch.randperm(-(-length // block), generator=torch.Generator().manual_seed(seed)).tolist()
        self.keys, self.values = (torch.full((len(self.order) * block, *shape[1:]), torch.nan) for _ in range(2))
        self.keys, self.values = self.keys.to(BFLOAT16), self.values.to(BFLOAT16)
        for first, size, position in self.runs(length):
            self.keys[first : first + size] = self.k[position : position + size]
            self.values[first : first + size] = self.v[position : position + size]

    def runs(self, stop: int) -> list[tuple[int, int, int]]:
        """First slot, number of slots and first position of each run up to `stop`."""
        starts = range(0, stop, self.block)
        blocks = zip(self.order, starts, strict=False)
        return [(number * self.block, min(self.block, stop - start), start) for number, start in blocks]

    def attend(self, start: int, stop: int, threads: int = 1) -> Tensor:
        torch.set_num_threads(threads)
        spans = [(first, size) for first, size, _ in self.runs(stop)]
        # Beside it in the step are other tokens, and beside queries other outputs.
        count, (heads, _, dim) = stop - start, self.shape
        step = torch.full((count + 3, heads * dim + 32), torch.nan, dtype=BFLOAT16)
        step[2:-1, : heads * dim] = self.q[start:stop]
        out = torch.full((count + 3, heads * dim), 7.0, dtype=BFLOAT16)
        each = prompt.Prompts([(2, count, spans)], dim**-0.5)
        each.attend(step[:, : heads * dim], self.keys, self.values, out)
        assert (out[[0, 1, -1]] == 7).all()
        return out[2:-1]

    def expected(self, start: int, stop: int) -> Tensor:
        heads, kv_heads, dim = self.shape
        q = self.q[start:stop].double().view(-1, heads, dim)
        k, v = (x[:stop].double().repeat_interleave(heads // kv_heads, 1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores.masked_fill_(torch.arange(stop) > torch.arange(start, stop)[:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def is_near(found: Tensor, expected: Tensor) -> bool:
    # Weights are rounded to bfloat16, each by up to 2^-9 of itself; values are around 1, and results add up fewer.
    return bool(((found.double() - expected).abs() <= expected.abs() * 2**-8 + 2**-8).all())


@settings(max_examples=60, deadline=None)
@given(
    length=st.one_of(st.integers(1, 70), st.integers(200, 600)), part=st.floats(0, 1), kv_heads=st.integers(1, 3),
    group=st.integers(1, 9), dim=st.sampled_from([1, 10, 32, 64, 80, 96, 128]), block=st.sampled_from([1, 7, 16, 64]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_is_its_definition(
    length: int, part: float, kv_heads: int, group: int, dim: int, block: int, seed: int
) -> None:
    sequence, start = Sequence(length, (kv_heads * group, kv_heads, dim), block, seed), int(part * (length - 1))
    assert is_near(sequence.attend(start, length), sequence.expected(start, length))


def test_a_token_is_computed_alike_however_its_prompt_is_cut_and_on_any_threads() -> None:
    sequence = Sequence(530, (12, 3, 64), 16, 4)
    whole = sequence.attend(0, 530)
    for threads in (2, 3):
        assert torch.equal(sequence.attend(0, 530, threads), whole)
    for cut in (1, 31, 32, 255, 256, 300):
        parts = [sequence.attend(start, min(start + cut, 530), 2) for start in range(0, 530, cut)]
        assert torch.equal(torch.cat(parts), whole)


def test_it_does_not_depend_on_where_blocks_lie() -> None:
    shape = (8, 2, 64)
    one, other = Sequence(300, shape, 300, 5), Sequence(300, shape, 7, 5)
    assert torch.equal(one.q, other.q)
    assert torch.equal(one.attend(100, 300), other.attend(100, 300))


def test_several_prompts_of_a_step() -> None:
    sequences = [Sequence(length, (6, 2, 32), 300, length) for length in (5, 300, 33)]
    q = torch.cat([sequence.q for sequence in sequences])
    keys, values = (torch.cat([getattr(each, name) for each in sequences]) for name in ("keys", "values"))
    said = [(0, 5, [(0, 5)]), (5, 300, [(300, 300)]), (305, 33, [(600, 33)])]
    out = torch.empty_like(q)
    prompts = prompt.Prompts(said, 32**-0.5)
    assert len(prompts) == 3
    prompts.attend(q, keys, values, out)
    for own, (row, count, _), sequence in zip(out.split([5, 300, 33]), said, sequences, strict=True):
        assert torch.equal(own, out[row : row + count])
        assert torch.equal(own, sequence.attend(0, count))


def test_large_scores() -> None:
    sequence = Sequence(300, (4, 2, 64), 16, 8)
    sequence.q *= 40  # one key has all the weight
    assert is_near(sequence.attend(0, 300), sequence.expected(0, 300))


def test_what_is_no_number_shows_where_it_is_seen() -> None:
    sequence = Sequence(400, (4, 2, 64), 16, 6)
    for stored in (sequence.keys, sequence.values):
        [slot] = [first + 100 - at for first, size, at in sequence.runs(400) if at <= 100 < at + size]
        before = stored[slot].clone()
        stored[slot] = torch.nan
        found = sequence.attend(50, 400)
        assert found[50:].isnan().all()
        if stored is sequence.keys:  # of values, a later one's weight of zero is no number either, as in torch
            assert found[:50].isfinite().all()
        stored[slot] = before
