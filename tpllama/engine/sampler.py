"""Choosing tokens from logits that are split by vocabulary over the ranks, without gathering them.

Every filter is a threshold on a row's scaled logits: found from each rank's few largest, then applied where
the logits are. The draw is a Gumbel maximum (Gumbel 1954; arXiv 1611.01144): the largest logit after adding
noise that is a function of (seed, sample, step, token) alone. So a text is the same alone or in a batch,
at any number of ranks, and a difference can only come from logits that nearly tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpllama.engine.batch import Draw, Sampled
from tpllama.engine.filters import is_filtered, thresholds
from tpllama.engine.logits import edited
from tpllama.engine.logprobs import token_logprobs
from tpllama.engine.native import likeliest
from tpllama.engine.noise import gumbel, key_words
from tpllama.engine.request import NO_NUMBERS, NO_TOKEN, TokenLogprobs
from tpllama.parallel.collectives import Ranks

# Beyond these, scaled logits would overflow or be no numbers; draws are greedy or uniform already.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Elements of noise that are computed together: on a CPU a dozen operations over them stay in its cache.
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**25

_MAXIMUM_BLOCK = 128
# Fields of a draw from `logprobs` on, where nothing but its temperature and filters counts.
_LOGPROBS = Draw._fields.index("logprobs")
_PLAIN = Draw()[_LOGPROBS:]
# Each row's largest score and its column, [rows] each.
_Best = tuple[Tensor, Tensor]


class Sampler:
    """Draws for rows of local logits. `owned`: this rank's range of token ids; `vocab_size`: the whole."""

    def __init__(self, ranks: Ranks, owned: tuple[int, int], vocab_size: int) -> None:
        self.ranks = ranks
        self.start, self.stop = owned
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        """The token that each of `draws` chooses from its row of logits [n, own tokens]; the same on every rank.

        Without log-probabilities, NO_TOKEN where masks and bans leave none, NO_NUMBERS for a row whose logits aren't.
        """
        if not draws:
            return []
        if all(map(is_plainly_greedy, draws)):
            return [Sampled(token) for token in self._likeliest_tokens(logits)]
        logits = logits.float()
        tokens = self._winners(*self._best(edited(logits, draws, self.start), draws)).tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        rows = [row for row, draw in enumerate(draws) if draw.logprobs is not None and tokens[row] >= 0]
        if rows:
            counts = [draws[row].logprobs or 0 for row in rows]
            scored = self.score(_some(logits, rows), [tokens[row] for row in rows], counts)
            logprobs = dict(zip(rows, scored, strict=True))
        return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]

    def score(self, logits: Tensor, following: Sequence[int], logprobs: Sequence[int]) -> list[TokenLogprobs]:
        """Log-probabilities of one token and the logprobs[i] likeliest, for each row of logits [n, own tokens]."""
        return token_logprobs(logits, following, logprobs, self.start, self.vocab_size, self.ranks)

    def _best(self, scores: Tensor, draws: Sequence[Draw]) -> _Best:
        """Of each row after filters and noise, among this rank's tokens; rows of one kind are handled together."""
        value = torch.empty(len(draws), device=scores.device)
        column = torch.empty(len(draws), dtype=torch.int64, device=scores.device)
        kinds: dict[Callable[[Tensor, Sequence[Draw]], _Best], list[int]] = {}
        for row, draw in enumerate(draws):
            random = self._filtered if is_filtered(draw) else self._unfiltered
            kinds.setdefault(random if draw.temperature > 0 else _likeliest, []).append(row)
        for kind, rows in kinds.items():
            value[rows], column[rows] = kind(_some(scores, rows), [draws[row] for row in rows])
        return value, column

    def likeliest(self, logits: Tensor) -> Tensor:
        """What `sample` finds for plain greedy draws, int64 [n]: on the device, so that a recorded step has it."""
        return self._winners(*(likeliest(logits) or _likeliest(logits.float(), ())))

    def _likeliest_tokens(self, logits: Tensor) -> list[int]:
        """The same, on the host: with one rank, without a dozen operations on a few numbers."""
        found = likeliest(logits) if self.ranks.size == 1 else None
        if found is None:
            tokens: list[int] = self.likeliest(logits).tolist()
            return tokens
        values, columns = (each.tolist() for each in found)
        return [
            NO_NUMBERS if not value < math.inf else NO_TOKEN if value == -math.inf else column + self.start
            for value, column in zip(values, columns, strict=True)
        ]

    def _winners(self, value: Tensor, column: Tensor) -> Tensor:
        """The token id of each row's largest value over the ranks, the lowest id among equals: int64 [n]."""
        # float64 holds every id exactly, so that one message carries both.
        offers = self.ranks.gather(torch.stack((value.double(), (column + self.start).double())))
        values, tokens = offers.unbind(1)
        best, rank = values.max(dim=0, keepdim=True)  # NaN, if there is one
        chosen = tokens.gather(0, rank).masked_fill(best == -math.inf, NO_TOKEN)
        return chosen.masked_fill(~(best < math.inf), NO_NUMBERS)[0].long()

    def _unfiltered(self, scores: Tensor, draws: Sequence[Draw]) -> _Best:
        """With noise on every token."""
        tokens = torch.arange(self.start, self.stop, dtype=torch.int32, device=scores.device)
        words = key_words([draw.key for draw in draws], scores.device)
        scaled = _scaled(scores, draws)
        size = max(1, (_CPU_BLOCK if scores.device.type == "cpu" else _GPU_BLOCK) // scores.shape[1])
        for begin in range(0, len(draws), size):
            rows = slice(begin, begin + size)
            scaled[rows] += gumbel((words[0][rows, None], words[1][rows, None]), tokens)
        return _likeliest(scaled, draws)

    def _filtered(self, scores: Tensor, draws: Sequence[Draw]) -> _Best:
        """With noise on the tokens that filters keep."""
        count, width = scores.shape
        scaled = _scaled(scores, draws)
        lowest_kept = thresholds(scaled, draws, self.ranks, self.vocab_size)
        is_kept = scaled >= lowest_kept[:, None]
        kept = is_kept.view(-1).nonzero()[:, 0]
        row, column = kept // width, kept % width
        first, second = key_words([draw.key for draw in draws], scores.device)
        noisy = scaled.view(-1)[kept] + gumbel((first[row], second[row]), (column + self.start).int())
        best = noisy.new_full((count,), -math.inf).scatter_reduce_(0, row, noisy, "amax")
        is_best = noisy == best[row]
        lowest = column.new_full((count,), width - 1).scatter_reduce_(0, row[is_best], column[is_best], "amin")
        return best.masked_fill(lowest_kept.isnan(), math.nan), lowest


def is_plainly_greedy(draw: Draw) -> bool:
    """Whether nothing but the largest logit counts, and only the token is wanted."""
    return draw.temperature == 0 and draw[_LOGPROBS:] == _PLAIN


def _likeliest(scores: Tensor, _draws: Sequence[Draw]) -> _Best:
    """The first of the largest, or NaN. By blocks: on a CPU a maximum with its place takes ten times one without."""
    count, width = scores.shape
    if scores.device.type != "cpu" or width % _MAXIMUM_BLOCK or not count:
        value, place = scores.max(dim=-1)
        return value, place
    blocks = scores.view(count, -1, _MAXIMUM_BLOCK)
    block = blocks.amax(-1).max(-1).indices
    value, place = blocks[torch.arange(count), block].max(-1)
    return value, block * _MAXIMUM_BLOCK + place


def _scaled(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Scores over temperature, a new tensor."""
    temperatures = [min(max(draw.temperature, _COLDEST), _HOTTEST) for draw in draws]
    return scores / torch.tensor(temperatures, device=scores.device)[:, None]


def _some(rows_of: Tensor, rows: list[int]) -> Tensor:
    """The given rows, of which no one occurs twice, in order; without a copy if these are all."""
    return rows_of if len(rows) == len(rows_of) else rows_of[rows]
