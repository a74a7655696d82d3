"""Attention over the paged cache against its definition, wherever a sequence's blocks lie."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpllama.engine import attention_plan
from tpllama.engine.batch import Batch, Chunk
from tpllama.engine.blocks import BlockTable
from tpllama.engine.cache import PagedCache, slots_of
from tpllama.engine.memory import CacheShape

CPU = torch.device("cpu")
NUM_BLOCKS = 40


@dataclass(frozen=True)
class Sequence:
    """`before` tokens in the cache, `count` new ones; how its blocks lie."""

    before: int
    count: int
    layout: str


@dataclass(frozen=True)
class Case:
    sequences: list[Sequence]
    kv_heads: int
    queries_per_kv: int
    head_dim: int
    block_size: int
    shared_blocks: int
    filling: int
    seed: int


SEQUENCES = st.builds(
    Sequence,
    before=st.integers(0, 40),
    count=st.sampled_from([1, 1, 1, 2, 5, 17]),
    layout=st.sampled_from(["run", "two runs", "scattered"]),
)
CASES = st.builds(
    Case,
    sequences=st.lists(SEQUENCES, min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    queries_per_kv=st.integers(1, 4),
    head_dim=st.sampled_from([4, 16, 20]),
    block_size=st.sampled_from([1, 3, 8, 16]),
    shared_blocks=st.integers(0, 3),
    filling=st.integers(0, 3),
    seed=st.integers(0, 99),
)


def tables(case: Case) -> list[BlockTable]:
    """The blocks of each sequence: the first ones of every other are the same, where all are long enough."""
    chance = random.Random(case.seed)
    sizes = [-(-(each.before + each.count) // case.block_size) for each in case.sequences]
    shared = min(case.shared_blocks, *(each.before // case.block_size for each in case.sequences))
    fresh = list(range(2 * shared, 2 * shared + 2 * sum(sizes) + 1))
    made = []
    for place, (size, sequence) in enumerate(zip(sizes, case.sequences, strict=True)):
        own = [fresh.pop(0) for _ in range(size - shared)]
        if sequence.layout == "two runs":
            middle = len(own) // 2
            own = own[middle:] + own[:middle]
        elif sequence.layout == "scattered":
            chance.shuffle(own)
        elif chance.random() < 0.5:
            fresh.pop(0)  # a gap, so that not all sequences follow each other
        first = shared * (place % 2)
        made.append(BlockTable([*range(first, first + shared), *own]))
    return made


def run(case: Case, dtype: torch.dtype, stored: str, is_alone: bool = False) -> tuple[Tensor, Tensor]:
    """What the cache gives for a step, and what the definition gives in float64 from the values that were stored."""
    generator = torch.Generator().manual_seed(case.seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    made = tables(case)
    blocks = 1 + max(block for table in made for block in table.blocks)
    shape = CacheShape(2, case.kv_heads, case.head_dim, stored, case.block_size, blocks)
    cache = PagedCache(shape, case.queries_per_kv, case.head_dim**-0.5, dtype, CPU, is_alone)
    layer = cache.layers[1]
    for sequence, table in zip(case.sequences, made, strict=True):
        if sequence.before:
            slots = torch.tensor(slots_of(tuple(table.runs), 0, sequence.before, shape))
            for store in (layer.keys, layer.values):
                store.write(slots, values(sequence.before, case.kv_heads, case.head_dim))
    chunks = tuple(
        Chunk(each.before, (0,) * each.count, 0, tuple(table.runs))
        for each, table in zip(case.sequences, made, strict=True)
    )
    tokens = sum(each.count for each in case.sequences)
    cache.begin(Batch(chunks), tokens + case.filling)
    q = values(tokens + case.filling, case.kv_heads * case.queries_per_kv, case.head_dim)
    k, v = (values(tokens + case.filling, case.kv_heads, case.head_dim) for _ in range(2))
    found = layer.attend(q, k, v)
    assert not found[tokens:].any()
    expected = []
    ends = list(itertools.accumulate((each.count for each in case.sequences), initial=0))
    for first, sequence, table in zip(ends, case.sequences, made, strict=False):
        for place in range(sequence.count):
            slots = torch.tensor(slots_of(tuple(table.runs), 0, sequence.before + place + 1, shape))
            keys, contents = (store.take(slots)[0].double() for store in (layer.keys, layer.values))
            query = q[first + place].double().view(case.kv_heads, case.queries_per_kv, case.head_dim)
            weights = (query @ keys.transpose(1, 2) / case.head_dim**0.5).softmax(-1)
            expected.append((weights @ contents).flatten(0, 1))
    return found[:tokens], torch.stack(expected)


@pytest.fixture(autouse=True)
def _reads_together_whatever_it_can() -> Iterator[None]:
    with patch.object(attention_plan, "_SHARED_TOKENS", 1), patch.object(attention_plan, "_QUERIES", 4):
        yield


@given(CASES)
@settings(max_examples=150, deadline=None)
def test_attention_is_its_definition_wherever_blocks_lie(case: Case) -> None:
    found, expected = run(case, torch.float32, "float32")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(CASES)
@settings(max_examples=60, deadline=None)
def test_too_little_in_common_is_read_by_each(case: Case) -> None:
    with patch.object(attention_plan, "_SHARED_TOKENS", 1000):
        found, expected = run(case, torch.float32, "float32")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_bfloat16_rounds_and_no_more(case: Case) -> None:
    found, expected = run(case, torch.bfloat16, "bfloat16")
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@given(CASES)
@settings(max_examples=40, deadline=None)
def test_values_of_one_byte_are_used_as_they_are_stored(stored: str, case: Case) -> None:
    found, expected = run(case, torch.float32, stored)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_nothing_read_together_gives_the_same(case: Case) -> None:
    found, expected = run(case, torch.float32, "float32", is_alone=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_what_is_stored_in_a_byte_is_near(stored: str) -> None:
    shape = CacheShape(1, 2, 64, stored, 16, 4)
    store = PagedCache(shape, 1, 0.125, torch.float32, CPU).layers[0].keys
    x = torch.randn(30, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 30)[:, None, None]
    x[3] = 0
    slots = torch.arange(7, 37)
    store.write(slots, x)
    stored_x = store.take(slots)[0].transpose(0, 1)
    largest = x.abs().amax(-1, keepdim=True)
    step = 1 / 254 if stored == "int8" else 1 / 28  # half of an integer; half of e4m3's spacing at the top, 32 of 448
    assert ((stored_x - x).abs() <= largest * step * 1.001).all()
    assert torch.equal(stored_x[3], x[3])


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_blocks_move_between_device_and_host_and_are_copied(stored: str) -> None:
    shape = CacheShape(2, 1, 4, stored, 2, num_blocks=4, num_host_blocks=3)
    cache = PagedCache(shape, 1, 0.125, torch.float32, CPU)
    x = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0))
    for index, layer in enumerate(cache.layers):
        layer.keys.write(torch.tensor([2, 3]), x + index)
        layer.values.write(torch.tensor([2, 3]), -x - index)
    before = [store.read(2, 2) for layer in cache.layers for store in (layer.keys, layer.values)]
    chunk = Chunk(0, (1,), 1, ((3, 1),))
    cache.begin(Batch((chunk,), to_host=((1, 2),)), 1)
    for layer in cache.layers:
        layer.keys.write(torch.tensor([2, 3]), x * 0)
        layer.values.write(torch.tensor([2, 3]), x * 0)
    cache.begin(Batch((chunk,), from_host=((2, 0),)), 1)
    cache.begin(Batch((chunk,), copies=((0, 1),)), 1)
    for start in (0, 2):
        after = [store.read(start, 2) for layer in cache.layers for store in (layer.keys, layer.values)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_cache_takes_the_bytes_that_were_planned() -> None:
    for stored, item in (("bfloat16", 2), ("int8", 1), ("float32", 4)):
        shape = CacheShape(3, 2, 8, stored, 4, num_blocks=5, num_host_blocks=2)
        cache = PagedCache(shape, 1, 0.125, torch.bfloat16, CPU)
        per_block = 2 * 3 * 2 * 4 * (8 * item + (4 if item == 1 else 0))
        taken = sum(part.numel() * part.element_size() for layer in cache.layers for part in layer.parts())
        assert taken == shape.num_bytes == 6 * per_block  # one block more, for the tokens that fill a step up
