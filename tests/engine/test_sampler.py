"""The sampler against brute force on whole rows, and split over ranks against itself on one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpllama.engine.batch import Draw, Sampled
from tpllama.engine.sampler import Sampler, gumbel
from tpllama.parallel.collectives import OneRank

from .thread_ranks import on_ranks

GREEDY = Draw(0.0, 0, 1.0, 0.0, 1.0, (0, 0, 0), (), None)


@dataclass(frozen=True)
class Case:
    """Rows of logits, a draw for each."""

    logits: Tensor
    draws: list[Draw]


def draw(**changes: Any) -> Draw:
    return Draw(**(GREEDY.__dict__ | {"temperature": 1.0} | changes))


def sample(logits: Tensor, draws: list[Draw]) -> list[Sampled]:
    vocab = logits.shape[1]
    return Sampler(OneRank(), (0, vocab), vocab).sample(logits, draws)


def tokens(logits: Tensor, draws: list[Draw]) -> list[int]:
    return [each.token for each in sample(logits, draws)]


def sample_split(logits: Tensor, draws: list[Draw], borders: list[int]) -> list[list[Sampled]]:
    """Each rank's results, with the vocabulary cut at `borders`."""
    vocab = logits.shape[1]
    edges = [0, *borders, vocab]

    def work(ranks: Any) -> list[Sampled]:
        start, stop = edges[ranks.rank], edges[ranks.rank + 1]
        return Sampler(ranks, (start, stop), vocab).sample(logits[:, start:stop], draws)

    return on_ranks(len(edges) - 1, work)


# Brute force: the definition of every filter, on one whole row in float64.


def scaled(row: Tensor, each: Draw) -> Tensor:
    row = row.double().clone()
    for token in each.seen:
        row[token] = row[token] / each.repetition_penalty if row[token] > 0 else row[token] * each.repetition_penalty
    return row / each.temperature if each.temperature > 0 else row


def kept(scores: Tensor, each: Draw) -> Tensor:
    """Which tokens survive the filters: top-k, top-p among those, min-p. Equal scores survive or fall together."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < each.top_k < len(scores):
        keep &= scores >= scores.sort(descending=True).values[each.top_k - 1]
    if each.top_p < 1:
        values, order = scores.masked_fill(~keep, -math.inf).softmax(-1).sort(descending=True)
        last = order[values.cumsum(-1) - values < each.top_p][-1]
        keep &= scores >= scores[last]
    if each.min_p > 0:
        keep &= scores >= scores.max() + math.log(each.min_p)
    return keep


def brute_force(row: Tensor, each: Draw) -> set[int]:
    """The token, or several where float32 can't tell: a mass just at top-p, a score just at min-p, an equal sum."""
    scores, found = scaled(row, each), set()
    for nudge in (1 - 1e-6, 1, 1 + 1e-6):
        noisy = scores
        if each.temperature > 0:
            nudged = replace(each, top_p=min(1.0, each.top_p * nudge), min_p=min(1.0, each.min_p * nudge))
            noise = gumbel(each.key, torch.arange(len(row))).double()
            noisy = scores.masked_fill(~kept(scores, nudged), -math.inf) + noise
        best = float(noisy.max())
        found |= set((noisy >= best - 1e-6 * (1 + abs(best))).nonzero().flatten().tolist())
    return found


def check_brute_force(drawn: list[int], case: Case) -> None:
    for token, row, each in zip(drawn, case.logits, case.draws, strict=True):
        assert token in brute_force(row, each)


# Strategies.


def make_logits(kind: str, rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, vocab, generator=generator)
    match kind:
        case "flat":
            return torch.zeros(rows, vocab)
        case "ties":
            return normal.mul(2).round()
        case "peaky":
            return normal + 40 * torch.nn.functional.one_hot(normal.argmax(-1), vocab)
        case "forbidden":
            return normal.masked_fill((normal > 0.5) & (torch.arange(vocab) > 0), -math.inf)
        case _:
            return normal * 3


def draws_for(vocab: int) -> st.SearchStrategy[Draw]:
    large_seed = st.integers(-(2**63), 2**63)
    return st.builds(
        Draw,
        temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 100]) | st.integers(0, vocab + 3),
        top_p=st.just(1.0) | st.floats(0.01, 1.0),
        min_p=st.just(0.0) | st.floats(0.001, 1.0),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
        key=st.tuples(large_seed, st.integers(0, 5), st.integers(0, 1000)),
        seen=st.lists(st.integers(0, vocab - 1), unique=True, max_size=20).map(tuple),
        logprobs=st.none() | st.integers(0, 8),
    )


@st.composite
def cases(draw_value: st.DrawFn) -> Case:
    rows, vocab = draw_value(st.integers(1, 4)), draw_value(st.integers(8, 30) | st.integers(200, 400))
    kind = draw_value(st.sampled_from(["flat", "ties", "peaky", "forbidden", "normal"]))
    logits = make_logits(kind, rows, vocab, draw_value(st.integers(0, 10**6)))
    return Case(logits, draw_value(st.lists(draws_for(vocab), min_size=rows, max_size=rows)))


@st.composite
def split_cases(draw_value: st.DrawFn, ranks: int) -> tuple[Case, list[int]]:
    case = draw_value(cases())
    inner = st.integers(1, case.logits.shape[1] - 1)
    return case, sorted(draw_value(st.lists(inner, unique=True, min_size=ranks - 1, max_size=ranks - 1)))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_tokens_are_those_of_brute_force(case: Case) -> None:
    check_brute_force(tokens(case.logits, case.draws), case)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_draw_the_tokens_of_one_rank(ranks: int) -> None:
    @given(split_cases(ranks))
    @settings(max_examples=80, deadline=None)
    def check(drawn: tuple[Case, list[int]]) -> None:
        case, borders = drawn
        expected = tokens(case.logits, case.draws)
        for results in sample_split(case.logits, case.draws, borders):
            assert [each.token for each in results] == expected

    check()


@given(split_cases(3))
@settings(max_examples=60, deadline=None)
def test_logprobs_are_the_log_softmax_of_the_models_logits(drawn: tuple[Case, list[int]]) -> None:
    case, borders = drawn
    expected = case.logits.double().log_softmax(-1)
    for results in [sample(case.logits, case.draws), *sample_split(case.logits, case.draws, borders)]:
        for row, each, result in zip(expected, case.draws, results, strict=True):
            if each.logprobs is None:
                assert result.logprobs is None
                continue
            assert result.logprobs is not None
            assert result.logprobs.token_id == result.token
            assert math.isclose(result.logprobs.logprob, float(row[result.token]), abs_tol=1e-5)
            check_top(row, each.logprobs, result.logprobs.top)


def check_top(row: Tensor, count: int, top: tuple[tuple[int, float], ...]) -> None:
    ids = [token for token, _ in top]
    values = torch.tensor([value for _, value in top], dtype=torch.float64)
    assert len(set(ids)) == len(ids) == count
    torch.testing.assert_close(values, row[ids], rtol=0, atol=1e-5)
    torch.testing.assert_close(values, row.topk(count).values, rtol=0, atol=1e-5)


def test_more_logprobs_than_tokens_give_all_tokens() -> None:
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    for results in [sample(logits, [draw(logprobs=20)]), *sample_split(logits, [draw(logprobs=20)], [2])]:
        assert results[0].logprobs is not None
        assert sorted(token for token, _ in results[0].logprobs.top) == list(range(7))


def wide_rows() -> Tensor:
    """Rows whose mass lies on more tokens than a rank first offers."""
    return torch.cat((make_logits("normal", 30, 3000, 8) * 0.3, make_logits("ties", 30, 3000, 9) * 0.5))


@pytest.mark.parametrize("filters", [{"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 500, "top_p": 0.8}])
def test_wide_rows_draw_the_tokens_of_brute_force_on_any_number_of_ranks(filters: dict[str, float]) -> None:
    logits = wide_rows()
    draws = [draw(key=(row, 0, 0), **filters) for row in range(len(logits))]
    expected = tokens(logits, draws)
    check_brute_force(expected, Case(logits, draws))
    for results in sample_split(logits, draws, [700, 2900]):
        assert [each.token for each in results] == expected


def test_a_rank_that_has_most_of_the_likely_tokens_hides_none() -> None:
    """The first rank's hundred come before any of the second's, but only 64 of each are offered at first."""
    logits = torch.linspace(0.2, 0, 200).expand(100, -1)
    draws = [draw(top_p=0.6, key=(0, 0, step)) for step in range(100)]
    expected = tokens(logits, draws)
    check_brute_force(expected, Case(logits, draws))
    assert [[each.token for each in results] for results in sample_split(logits, draws, [100])] == [expected] * 2


@pytest.mark.parametrize("borders", [[], [100], [50, 120]])
def test_mass_counts_every_token_that_ties_with_the_last_of_top_k(borders: list[int]) -> None:
    """Four tokens of e and 200 of 1: top-k 5 keeps all, and the four have a bit more than a twentieth of the mass."""
    logits = torch.zeros(1, 204)
    logits[0, :4] = 1
    drawn = set()
    for step in range(60):
        results = sample_split(logits, [draw(top_k=5, top_p=0.1, key=(0, 0, step))], borders)
        drawn |= {each[0].token for each in results}
    assert drawn - {0, 1, 2, 3}


@given(st.integers(0, 10**6), st.sampled_from([64, 65, 100, 200]))
@settings(max_examples=20, deadline=None)
@example(0, 100)
def test_large_top_k_keeps_no_more_than_k(seed: int, top_k: int) -> None:
    logits = make_logits("normal", 1, 300, seed) * 0.01
    best = set(logits[0].topk(top_k).indices.tolist())
    drawn = tokens(logits.expand(50, -1), [draw(top_k=top_k, key=(seed, 0, step)) for step in range(50)])
    assert set(drawn) <= best


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-39, 1e-46])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits("normal", 20, 300, 3)
    drawn = tokens(logits, [draw(temperature=temperature, top_p=0.9)] * 20)
    assert drawn == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_among_equals_on_any_number_of_ranks() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [4, 7]] = 1
    assert tokens(logits, [GREEDY]) == [4]
    assert [results[0].token for results in sample_split(logits, [GREEDY], [2, 5])] == [4, 4, 4]


def test_a_rows_draw_does_not_depend_on_the_others() -> None:
    logits = make_logits("normal", 4, 200, 1)
    draws = [draw(top_p=0.9), draw(temperature=0), draw(top_k=3, repetition_penalty=1.5, seen=(1, 2)), draw(min_p=0.1)]
    alone = [tokens(row[None], [each])[0] for row, each in zip(logits, draws, strict=True)]
    assert tokens(logits, draws) == alone


# The noise.

CHI_SQUARE_11_AT_1_IN_1000 = 31.26


@pytest.mark.parametrize("changing", [0, 1, 2], ids=["seed", "sample", "step"])
def test_draws_follow_the_softmax(changing: int) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    count, temperature = 3000, 0.8
    keys = [tuple(number if place == changing else 7 for place in range(3)) for number in range(count)]
    drawn = tokens(logits.expand(count, -1), [draw(temperature=temperature, key=key) for key in keys])
    found = torch.bincount(torch.tensor(drawn), minlength=12).double()
    expected = (logits.double() / temperature).softmax(-1) * count
    assert float(((found - expected) ** 2 / expected).sum()) < CHI_SQUARE_11_AT_1_IN_1000


def test_draws_follow_the_softmax_of_what_filters_keep() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6)) * 1.5
    count, filters = 3000, draw(top_k=12)
    keep = kept(logits.double(), filters)
    drawn = tokens(logits.expand(count, -1), [draw(top_k=12, key=(step, 0, 0)) for step in range(count)])
    found = torch.bincount(torch.tensor(drawn), minlength=40)
    assert int(found[~keep].sum()) == 0
    expected = logits.double().masked_fill(~keep, -math.inf).softmax(-1)[keep] * count
    assert float(((found[keep] - expected) ** 2 / expected).sum()) < CHI_SQUARE_11_AT_1_IN_1000


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel((1, 2, 3), torch.arange(100_000)).double().sort().values
    empirical = (torch.arange(100_000) + 0.5) / 100_000
    distance = float((empirical - torch.exp(-torch.exp(-noise))).abs().max())
    assert distance < 1.95 / math.sqrt(100_000)  # Kolmogorov-Smirnov at 1 in 1000


@pytest.mark.parametrize("other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1 + 2**32, 2, 3), (-1, 2, 3)])
def test_noise_of_different_keys_is_independent(other: tuple[int, int, int]) -> None:
    ids = torch.arange(20_000)
    both = torch.stack((gumbel((1, 2, 3), ids), gumbel(other, ids))).double()
    assert abs(float(both.corrcoef()[0, 1])) < 4 / math.sqrt(20_000)


@given(st.tuples(*[st.integers(-(2**63), 2**63)] * 3), st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_noise_is_a_function_of_key_and_token_id_alone(key: tuple[int, int, int], ids: list[int]) -> None:
    together = gumbel(key, torch.tensor(ids))
    alone = torch.cat([gumbel(key, torch.tensor([token])) for token in ids])
    assert torch.equal(together, alone)
    assert bool(together.isfinite().all())
