"""Our own maximum with its place: torch's, NaN and ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpllama.kernels import likeliest as kernel
from tpllama.kernels.likeliest import likeliest

BFLOAT16 = torch.bfloat16
pytestmark = pytest.mark.skipif(isinstance(kernel._native(), str), reason=str(kernel._native()))
INF, NAN = torch.inf, torch.nan
SPECIAL = (INF, -INF, NAN, -NAN, 0.0, -0.0, 1e-40, -1e-40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40), columns=st.one_of(st.integers(1, 70), st.sampled_from((2047, 2048, 2049, 6000))),
    kinds=st.integers(1, 1000), special=st.lists(st.sampled_from(SPECIAL), max_size=6), seed=st.integers(0, 999),
)  # fmt: skip
def test_it_is_the_first_of_the_largest(rows: int, columns: int, kinds: int, special: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randint(-kinds, 1, (rows, columns), generator=generator) / 8).to(BFLOAT16)
    for value in special:
        x[torch.randint(rows, (1,), generator=generator), torch.randint(columns, (1,), generator=generator)] = value
    found = likeliest(x)
    assert found is not None
    expected, columns_of = x.float().max(-1)
    assert torch.equal(found[0].isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(found[0][is_number], expected[is_number])
    assert torch.equal(found[1][is_number], columns_of[is_number])
    assert (found[1] >= 0).all()
    assert (found[1] < columns).all()


def test_a_row_of_nothing_but_minus_infinity() -> None:
    found = likeliest(torch.full((3, 5000), -INF, dtype=BFLOAT16))
    assert found is not None
    assert found[0].tolist() == [-INF] * 3
    assert found[1].tolist() == [0] * 3


def test_rows_may_lie_apart() -> None:
    x = torch.randn(8, 300).to(BFLOAT16)
    found = likeliest(x[::2, :200])
    assert found is not None
    assert torch.equal(found[1], x[::2, :200].float().argmax(-1))


def test_what_it_does_not_know_others_compute() -> None:
    assert likeliest(torch.randn(2, 8)) is None
    assert likeliest(torch.empty(2, 0, dtype=BFLOAT16)) is None
