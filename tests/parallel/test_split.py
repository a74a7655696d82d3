"""How sizes are dealt to ranks, as properties over all sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig
from tpllama.parallel.split import Ranges, check_tp, legal_tp, scale, split_evenly, split_heads, split_size

SIZES = st.integers(1, 200_000)
# Key-value heads, query heads for each.
HEADS = st.tuples(st.integers(1, 40), st.integers(1, 40))


def config(**changes: Any) -> LlamaConfig:
    fields = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    return LlamaConfig.from_hf(fields | changes)


def lengths(ranges: Ranges) -> list[int]:
    return [stop - start for start, stop in ranges]


def covers(ranges: Ranges, size: int) -> bool:
    """Whether the ranges, one after another, are 0..size."""
    borders = [start for start, _ in ranges] + [ranges[-1][1]]
    return borders[0] == 0 and borders[-1] == size and [stop for _, stop in ranges] == borders[1:]


@given(SIZES, st.integers(1, 600))
def test_even_parts_cover_and_differ_by_at_most_one(count: int, parts: int) -> None:
    ranges = split_evenly(count, parts)
    assert len(ranges) == parts
    assert covers(ranges, count)
    assert max(lengths(ranges)) - min(lengths(ranges)) <= 1
    assert lengths(ranges) == sorted(lengths(ranges), reverse=True)


@given(HEADS, st.data())
def test_every_query_head_is_on_one_rank_with_its_key_value_head(heads: tuple[int, int], data: st.DataObject) -> None:
    num_kv_heads, group = heads
    tp = data.draw(st.integers(1, num_kv_heads * group))
    q, kv = split_heads(num_kv_heads * group, num_kv_heads, tp)
    assert len(q) == len(kv) == tp
    assert covers(q, num_kv_heads * group)
    assert {head for start, stop in kv for head in range(start, stop)} == set(range(num_kv_heads))
    for (q_start, q_stop), (kv_start, kv_stop) in zip(q, kv, strict=True):
        assert q_stop > q_start
        own = [head // group for head in range(q_start, q_stop)]
        assert set(own) == set(range(kv_start, kv_stop))
        # Attention pairs local query head i with local key-value head i // (queries per key-value head).
        per_kv, rest = divmod(len(own), kv_stop - kv_start)
        assert rest == 0
        assert own == [kv_start + index // per_kv for index in range(len(own))]


@given(HEADS, st.data())
def test_heads_are_dealt_as_evenly_as_whole_groups_allow(heads: tuple[int, int], data: st.DataObject) -> None:
    num_kv_heads, group = heads
    tp = data.draw(st.integers(1, num_kv_heads * group))
    q, kv = split_heads(num_kv_heads * group, num_kv_heads, tp)
    if tp <= num_kv_heads:
        assert max(lengths(kv)) - min(lengths(kv)) <= 1
    else:
        assert set(lengths(kv)) == {1}
        ranks_per_group = tp // num_kv_heads
        assert max(lengths(q)) <= -(-group // ranks_per_group)


def test_three_key_value_heads_on_two_and_on_four_ranks() -> None:
    assert split_heads(9, 3, 2) == (((0, 6), (6, 9)), ((0, 2), (2, 3)))
    assert split_heads(9, 3, 4) == (((0, 2), (2, 3), (3, 6), (6, 9)), ((0, 1), (0, 1), (1, 2), (2, 3)))


@given(SIZES, st.integers(1, 300))
@example(151936, 7)
@example(1, 1)
@example(257, 2)
def test_sizes_are_covered_balanced_and_nobody_is_left_out(size: int, tp: int) -> None:
    assume(tp <= size)
    ranges = split_size(size, tp)
    assert len(ranges) == tp
    assert covers(ranges, size)
    assert min(lengths(ranges)) >= 1
    fair = -(-size // tp)
    assert max(lengths(ranges)) <= max(fair * 17 / 16, fair + 1)
    if size % 2 == 0 and size >= 2 * tp:  # int4 holds two columns in a byte
        assert all(length % 2 == 0 for length in lengths(ranges))


@given(SIZES, st.integers(1, 300))
def test_borders_lie_at_the_largest_unit_that_balances(size: int, tp: int) -> None:
    assume(tp <= size)
    borders = {border for each in split_size(size, tp) for border in each}

    def balances(unit: int) -> bool:
        fits = size % unit == 0 and size // unit >= tp
        return fits and -(-size // unit // tp) * unit <= -(-size // tp) * 17 // 16

    best = max((unit for unit in (1, 2, 4, 8, 16, 32, 64, 128, 256) if balances(unit)), default=1)
    assert all(border % best == 0 for border in borders)


@pytest.mark.parametrize(
    ("size", "tp", "expected"),
    [
        (14336, 8, [1792] * 8),  # Llama-3-8B: seven units of 256
        (1536, 2, [768, 768]),  # SmolLM2
        (1536, 4, [384] * 4),  # units of 128
        (1536, 5, [320, 320, 320, 320, 256]),  # units of 64
        (211, 2, [106, 105]),
    ],
)
def test_sizes_of_known_models(size: int, tp: int, expected: list[int]) -> None:
    assert lengths(split_size(size, tp)) == expected


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 60), st.integers(1, 60))
def test_a_degree_is_legal_where_no_rank_is_left_with_nothing(kv: int, group: int, mlp: int, vocab: int) -> None:
    sizes = {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": 2}
    model = config(**sizes, intermediate_size=mlp, vocab_size=vocab)
    legal = legal_tp(model)
    assert legal == list(range(1, min(kv * group, max(1, mlp // 2), vocab) + 1))
    for tp in legal:
        check_tp(model, tp)
        parts = [*split_heads(kv * group, kv, tp), split_size(mlp, tp), split_size(vocab, tp)]
        assert all(length > 0 for ranges in parts for length in lengths(ranges))
    with pytest.raises(UserError):
        check_tp(model, len(legal) + 1)


def test_an_illegal_degree_is_refused_with_the_legal_ones() -> None:
    expected = (
        r"found tensor-parallel degree 13, expected 1 to 12 \(the model has 12 attention heads\), "
        r"choose --tp accordingly"
    )
    with pytest.raises(UserError, match=expected):
        check_tp(config(head_dim=4), 13)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(1, 300))
def test_scaling_multiplies_every_border(borders: list[int], unit: int) -> None:
    ranges = tuple(itertools.pairwise(borders))
    assert [border for each in scale(ranges, unit) for border in each] == [b * unit for each in ranges for b in each]
