"""The sampler against brute force on whole rows, and split over ranks against itself on one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpllama.engine.batch import Draw, Sampled
from tpllama.engine.noise import gumbel, key_words
from tpllama.engine.request import NO_NUMBERS, NO_TOKEN, TokenLogprobs, bit_mask
from tpllama.engine.sampler import Sampler
from tpllama.parallel.collectives import OneRank

from .thread_ranks import on_ranks

GREEDY = Draw()


@dataclass(frozen=True)
class Case:
    """Rows of logits, a draw for each."""

    logits: Tensor
    draws: list[Draw]


def draw(**changes: Any) -> Draw:
    return Draw(**{"temperature": 1.0, **changes})


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


def noise(key: tuple[int, int, int], ids: Tensor) -> Tensor:
    return gumbel(key_words([key], torch.device("cpu")), ids.int())


def bitmask(tokens: Iterable[int], size: int) -> bytes:
    """As `Draw.allowed` has it."""
    bits = sum(1 << token for token in tokens)
    return bits.to_bytes(size, "little")


# Brute force: the definition of every change and filter, on one whole row. Scores are float32 after each change.


def changed(row: Tensor, each: Draw) -> Tensor:
    row = row.double().clone()
    if each.allowed is not None:
        bits = int.from_bytes(each.allowed, "little")
        row[[token for token in range(len(row)) if not bits >> token & 1]] = -math.inf
    row[list(each.banned)] = -math.inf
    for token, bias in each.bias:
        row[token] = (row[token] + bias).float()
    seen = int.from_bytes(each.seen, "little")
    for token in (token for token in range(len(row)) if seen >> token & 1):
        factor = each.repetition_penalty if row[token] < 0 else 1 / each.repetition_penalty
        row[token] = (row[token] * factor).float()
    for token, count in each.counts:
        row[token] = (row[token] - count * each.frequency_penalty - (count > 0) * each.presence_penalty).float()
    return row


def scaled(row: Tensor, each: Draw) -> Tensor:
    scores = changed(row, each).float()
    return (scores / each.temperature if each.temperature > 0 else scores).double()


def kept(scores: Tensor, each: Draw) -> Tensor:
    """Which tokens survive the filters: top-k, top-p among those, min-p. Equal scores survive or fall together."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < each.top_k < len(scores):
        keep &= scores >= scores.sort(descending=True).values[each.top_k - 1]
    if each.top_p < 1:
        values = scores.masked_fill(~keep, -math.inf).sort(descending=True).values
        mass = values.softmax(-1)
        keep &= scores >= values[mass.cumsum(-1) - mass < each.top_p][-1]
    if each.min_p > 0:
        keep &= scores >= scores.max() + math.log(each.min_p)
    return keep


def brute_force(row: Tensor, each: Draw) -> set[int]:
    """The token, or several where float32 can't tell: a mass just at top-p, a score just at min-p, an equal sum."""
    scores, found = scaled(row, each), set()
    if bool((scores == -math.inf).all()):
        return {-1}
    rounding = 1e-7 * (10 + float(scores.max().abs()))
    for p_nudge, min_nudge in product((-1e-6, 0, 1e-6), (-rounding, 0, rounding)):
        noisy = scores
        if each.temperature > 0:
            top_p, min_p = min(1.0, each.top_p * (1 + p_nudge)), min(1.0, each.min_p * math.exp(min_nudge))
            keep = kept(scores, each._replace(top_p=top_p, min_p=min_p))
            noisy = scores.masked_fill(~keep, -math.inf) + noise(each.key, torch.arange(len(row))).double()
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
    large_seed, token = st.integers(-(2**63), 2**63), st.integers(0, vocab - 1)
    tokens = st.lists(token, unique=True, max_size=20).map(tuple)
    amounts = st.floats(-20, 20)

    def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(token, values, max_size=20).map(lambda found: tuple(found.items()))

    masks = st.binary(max_size=vocab // 8 + 3) | st.builds(bitmask, tokens, st.just(vocab // 8 + 1))
    return st.builds(
        Draw,
        temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 100]) | st.integers(0, vocab + 3),
        top_p=st.just(1.0) | st.floats(0.01, 1.0),
        min_p=st.just(0.0) | st.floats(0.001, 1.0),
        key=st.tuples(large_seed, st.integers(0, 5), st.integers(0, 1000)),
        logprobs=st.none() | st.integers(0, 8),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
        presence_penalty=st.just(0.0) | amounts,
        frequency_penalty=st.just(0.0) | amounts,
        seen=tokens.map(lambda seen: bytes(bit_mask(list(seen)))),
        counts=pairs(st.integers(0, 5)),
        bias=st.just(()) | pairs(amounts),
        banned=st.just(()) | tokens,
        allowed=st.none() | st.none() | masks,
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
        expected = sample(case.logits, case.draws)
        for results in sample_split(case.logits, case.draws, borders):
            assert [each.token for each in results] == [each.token for each in expected]
            for result, on_one in zip(results, expected, strict=True):
                check_equal_logprobs(result.logprobs, on_one.logprobs)

    check()


def check_equal_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    """The same tokens in the same order; the values up to the order in which float64 sums were added."""
    if found is None or expected is None:
        assert found is expected
        return
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-12)
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-12)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_rows_draw_does_not_depend_on_the_others(case: Case) -> None:
    """Not by a bit; nor are the given logits changed, which several draws may share."""
    before = case.logits.clone()
    alone = [sample(row[None], [each])[0] for row, each in zip(case.logits, case.draws, strict=True)]
    assert sample(case.logits, case.draws) == alone
    assert torch.equal(case.logits, before)
    shared = case.logits[:1].expand(len(case.draws), -1)
    assert sample(shared, case.draws) == [sample(case.logits[:1], [each])[0] for each in case.draws]


@given(split_cases(3))
@settings(max_examples=60, deadline=None)
def test_logprobs_are_the_log_softmax_of_the_models_logits(drawn: tuple[Case, list[int]]) -> None:
    case, borders = drawn
    for results in [sample(case.logits, case.draws), *sample_split(case.logits, case.draws, borders)]:
        for row, each, result in zip(case.logits, case.draws, results, strict=True):
            if each.logprobs is None or result.token == -1:
                assert result.logprobs is None
                continue
            assert result.logprobs is not None
            check_logprobs(result.logprobs, row, result.token, each.logprobs)


def check_logprobs(found: TokenLogprobs, row: Tensor, token: int, count: int) -> None:
    """The likeliest tokens are in order; of equal ones, those with the lowest ids come first."""
    expected = row.double().log_softmax(-1)
    assert found.token_id == token
    assert math.isclose(found.logprob, float(expected[token]), abs_tol=1e-5)
    assert [token for token, _ in found.top] == row.sort(descending=True, stable=True).indices[:count].tolist()
    values = torch.tensor([value for _, value in found.top], dtype=torch.float64)
    torch.testing.assert_close(values, expected[[token for token, _ in found.top]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_logprobs_of_given_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows than are handled at once."""
    monkeypatch.setattr("tpllama.engine.logprobs._CPU_BLOCK", 1000)
    logits = make_logits("normal", 50, 300, 2).to(dtype)
    following, counts = [7 * row % 300 for row in range(50)], [row % 4 for row in range(50)]

    def score(ranks: Any) -> list[TokenLogprobs]:
        start, stop = [0, 120, 300][ranks.rank :][:2] if ranks.size == 2 else (0, 300)
        return Sampler(ranks, (start, stop), 300).score(logits[:, start:stop], following, counts)

    for found in [score(OneRank()), *on_ranks(2, score)]:
        for each, row, token, count in zip(found, logits.float(), following, counts, strict=True):
            check_logprobs(each, row, token, count)


def test_nothing_to_draw_or_to_score() -> None:
    sampler = Sampler(OneRank(), (0, 10), 10)
    assert sampler.sample(torch.empty(0, 10), []) == []
    assert sampler.score(torch.empty(0, 10), [], []) == []


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


@pytest.mark.parametrize("borders", [[], [100], [100, 230]])
def test_greedy_in_bfloat16_is_greedy_in_float32(borders: list[int]) -> None:
    logits = (torch.randn(6, 300, generator=torch.Generator().manual_seed(2)) * 3).to(torch.bfloat16)
    logits[1, 7], logits[2, 250], logits[3] = math.nan, math.inf, -math.inf
    logits[4, [90, 240]] = 100  # the first of equals
    logits[5] = -0.0
    logits[5, 4] = 0.0
    expected = tokens(logits.float(), [GREEDY] * 6)
    assert expected[1:] == [NO_NUMBERS, NO_NUMBERS, NO_TOKEN, 90, 0]
    for results in sample_split(logits, [GREEDY._replace(top_k=3, key=(1, 2, 3))] * 6, borders):
        assert [each.token for each in results] == expected


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("borders", [[], [3]])
def test_a_row_with_no_token_left_draws_none_and_leaves_others_alone(changes: Any, borders: list[int]) -> None:
    logits = make_logits("normal", 1, 12, 4).expand(3, -1)
    nothing = [draw(allowed=b"", logprobs=2, **changes), draw(banned=tuple(range(12)), **changes)]
    [other] = sample(logits[:1], [draw(**changes)])
    for results in sample_split(logits, [*nothing, draw(**changes)], borders):
        assert results == [Sampled(-1), Sampled(-1), other]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 1}]
)
def test_logits_that_are_no_numbers_are_said_to_be_so_and_leave_others_alone(bad: float, changes: Any) -> None:
    logits = make_logits("normal", 3, 12, 4)
    each = draw(**changes)
    expected = [sample(logits[row : row + 1], [each])[0] for row in (0, 2)]
    logits[1, 2] = bad

    def work(ranks: Any) -> list[Sampled]:
        start, stop = [0, 5, 12][ranks.rank :][:2]
        return Sampler(ranks, (start, stop), 12).sample(logits[:, start:stop], [each] * 3)

    for found in on_ranks(2, work):
        assert [each.token for each in found] == [expected[0].token, NO_NUMBERS, expected[1].token]


@pytest.mark.parametrize("temperature", [0.0, 1e-46, 1.0, 1e300])
@pytest.mark.parametrize("amount", [1e308, -1e308])
@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_values_leave_numbers(temperature: float, amount: float, penalty: float) -> None:
    extreme = draw(
        temperature=temperature, bias=((0, amount), (1, -amount)), seen=b"\x07", repetition_penalty=penalty,
        counts=((0, 10**6), (3, 1)), presence_penalty=amount, frequency_penalty=amount, banned=(4,), top_p=0.9,
    )  # fmt: skip
    for each in (extreme, extreme._replace(top_p=1.0)):
        assert tokens(make_logits("normal", 1, 9, 1), [each])[0] in {0, 1, 2, 3, 5, 6, 7, 8}


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = make_logits("normal", 2, 20, 1)
    outside = {"banned": (-1, 20), "bias": ((20, 9.0),), "seen": b"\0\0\0\x02", "counts": ((-1, 2),)}
    changed_row = draw(temperature=0, repetition_penalty=2.0, presence_penalty=1.0, **outside)
    assert tokens(logits, [changed_row, GREEDY]) == tokens(logits, [GREEDY, GREEDY])


# The noise.

CHI_SQUARE_9_AT_1_IN_1000 = 27.88
CHI_SQUARE_11_AT_1_IN_1000 = 31.26
CHI_SQUARE_255_AT_1_IN_1000 = 330.5


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


KEYS = [(1, 2, 3), (0, 0, 0), (0, 0, 1), (2**40, 1, 500)]
NEIGHBOURS = [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1 + 2**32, 2, 3), (-1, 2, 3)]


@pytest.mark.parametrize("key", KEYS)
def test_noise_follows_the_gumbel_distribution(key: tuple[int, int, int]) -> None:
    found = noise(key, torch.arange(100_000)).double().sort().values
    empirical = (torch.arange(100_000) + 0.5) / 100_000
    distance = float((empirical - torch.exp(-torch.exp(-found))).abs().max())
    assert distance < 1.95 / math.sqrt(100_000)  # Kolmogorov-Smirnov at 1 in 1000


@pytest.mark.parametrize("place", [0, 1, 2], ids=["seed", "sample", "step"])
def test_large_noise_which_decides_is_as_frequent_as_it_should_be(place: int) -> None:
    """The maximum of 1000 tokens' noise, less log 1000, is Gumbel again; its place is uniform."""
    keys = [tuple(number if at == place else 3 for at in range(3)) for number in range(4000)]
    first, second = key_words(keys, torch.device("cpu"))
    largest, where = gumbel((first[:, None], second[:, None]), torch.arange(1000, dtype=torch.int32)).max(-1)
    found = (largest.double() - math.log(1000)).sort().values
    empirical = (torch.arange(4000) + 0.5) / 4000
    assert float((empirical - torch.exp(-torch.exp(-found))).abs().max()) < 1.95 / math.sqrt(4000)
    places = torch.bincount(where // 100, minlength=10).double()
    assert float(((places - 400) ** 2 / 400).sum()) < CHI_SQUARE_9_AT_1_IN_1000


@pytest.mark.parametrize("other", NEIGHBOURS)
def test_noise_of_different_keys_is_independent(other: tuple[int, int, int]) -> None:
    ids = torch.arange(20_000)
    check_independent(noise((1, 2, 3), ids), noise(other, ids))


@pytest.mark.parametrize("distance", [1, 2, 256, 4096])
def test_noise_of_neighbouring_tokens_is_independent(distance: int) -> None:
    ids = torch.arange(20_000)
    check_independent(noise((1, 2, 3), ids), noise((1, 2, 3), ids + distance))


def check_independent(first: Tensor, second: Tensor) -> None:
    """No correlation, and a chi-square test of which sixteenth of its range each is in."""
    both = torch.stack((first, second)).double()
    assert abs(float(both.corrcoef()[0, 1])) < 4 / math.sqrt(both.shape[1])
    sixteenth = (torch.exp(-torch.exp(-both)) * 16).long().clamp(0, 15)
    found = torch.bincount(sixteenth[0] * 16 + sixteenth[1], minlength=256).double()
    expected = both.shape[1] / 256
    assert float(((found - expected) ** 2 / expected).sum()) < CHI_SQUARE_255_AT_1_IN_1000


@given(st.tuples(*[st.integers(-(2**63), 2**63)] * 3), st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_noise_is_a_function_of_key_and_token_id_alone(key: tuple[int, int, int], ids: list[int]) -> None:
    together = noise(key, torch.tensor(ids))
    alone = torch.cat([noise(key, torch.tensor([token])) for token in ids])
    assert torch.equal(together, alone)
    assert bool(together.isfinite().all())


def test_noise_is_finite_and_within_its_range_at_every_key() -> None:
    first = torch.arange(-(2**31), 2**31, 1009, dtype=torch.int64).int()
    found = gumbel((first, first.flip(0)), torch.tensor(5, dtype=torch.int32))
    assert float(found.min()) > -3
    assert float(found.max()) < 22.2
