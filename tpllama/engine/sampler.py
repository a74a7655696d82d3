"""Choosing tokens from logits that are split by vocabulary over the ranks, without gathering them.

Every filter is a threshold on a row's scaled logits: found from each rank's few largest, then applied where
the logits are. The draw is a Gumbel maximum (Gumbel 1954; arXiv 1611.01144): the largest logit after adding
noise that is a function of (seed, sample, step, token) alone. So a text is the same alone or in a batch,
at any number of ranks, and a difference can only come from logits that nearly tie.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from tpllama.engine.batch import Draw, Sampled
from tpllama.engine.request import TokenLogprobs
from tpllama.parallel.collectives import Ranks

_Ids = TypeVar("_Ids", int, Tensor)

# Candidates a rank offers first when a filter by probability mass is on; more follow if they don't suffice.
_FIRST_CANDIDATES = 64
# Below this, scaled logits would overflow; the likeliest token is drawn already.
_COLDEST = 1e-30


class Sampler:
    """Draws for rows of local logits. `owned`: this rank's range of token ids; `vocab_size`: the whole."""

    def __init__(self, ranks: Ranks, owned: tuple[int, int], vocab_size: int) -> None:
        self.ranks = ranks
        self.start, self.stop = owned
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, draws: list[Draw]) -> list[Sampled]:
        """The token drawn for each row of logits [n, own tokens]; the same on every rank."""
        logits = logits.float()
        scores = self._penalize(logits, draws)
        is_random = [draw.temperature > 0 for draw in draws]
        if any(is_random):
            divisors = [max(draw.temperature, _COLDEST) if draw.temperature > 0 else 1.0 for draw in draws]
            temperature = torch.tensor(divisors, device=logits.device)
            scores = scores / temperature[:, None]
            scores = scores.masked_fill(scores < self._threshold(scores, draws)[:, None], -math.inf)
            scores = scores + self._noise(draws, logits.device)
        tokens = self._argmax(scores)
        logprobs = self._logprobs(logits, tokens, draws)
        return [Sampled(int(token), logprob) for token, logprob in zip(tokens.tolist(), logprobs, strict=True)]

    def _penalize(self, logits: Tensor, draws: list[Draw]) -> Tensor:
        """Repetition penalty (arXiv 1909.05858): positive logits of seen tokens divided by it, negative multiplied."""
        if all(draw.repetition_penalty == 1 for draw in draws):
            return logits
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            own = [token - self.start for token in draw.seen if self.start <= token < self.stop]
            index = torch.tensor(own, dtype=torch.long, device=logits.device)
            seen = row[index]
            row[index] = torch.where(seen > 0, seen / draw.repetition_penalty, seen * draw.repetition_penalty)
        return logits

    def _argmax(self, scores: Tensor) -> Tensor:
        """The token id of each row's largest score, the lowest id among equals."""
        value, index = scores.max(dim=-1)
        # float64 holds every id exactly, so that one message carries both.
        offers = self.ranks.gather(torch.stack((value.double(), (index + self.start).double())))
        _refuse_nan(offers[:, 0])
        best = offers[:, 0].argmax(dim=0, keepdim=True)
        return offers[:, 1].gather(0, best)[0].long()

    def _noise(self, draws: list[Draw], device: torch.device) -> Tensor:
        """Gumbel noise [n, own tokens] for random rows, zero for greedy ones."""
        tokens = torch.arange(self.start, self.stop, device=device)
        rows = [
            gumbel(draw.key, tokens) if draw.temperature > 0 else torch.zeros_like(tokens).float() for draw in draws
        ]
        return torch.stack(rows)

    def _threshold(self, scores: Tensor, draws: list[Draw]) -> Tensor:
        """The lowest score that each row's filters keep, [n]: top-k, then top-p among those, then min-p."""
        active = [draw for draw in draws if draw.temperature > 0]
        if all(draw.top_k == 0 and draw.top_p == 1 and draw.min_p == 0 for draw in active):
            return torch.full((len(draws),), -math.inf, device=scores.device)
        # One more than top_k shows whether others tie with the last.
        wanted = max(_FIRST_CANDIDATES, *(draw.top_k + 1 for draw in active))
        total = self._logsumexp(scores)
        while True:
            candidates, complete_from = self._largest(scores, min(wanted, self.vocab_size + 1))
            thresholds = [
                _row_threshold(row, float(total_row), float(floor), draw)
                for row, total_row, floor, draw in zip(candidates, total, complete_from, draws, strict=True)
            ]
            if all(threshold is not None for threshold in thresholds):
                return torch.tensor(thresholds, device=scores.device)
            wanted *= 8

    def _largest(self, scores: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """The ranks' largest scores, [n, up to ranks * wanted], falling; and the score from which none is missing."""
        own = scores.topk(min(wanted, scores.shape[1]), dim=-1).values
        offered = torch.full((scores.shape[0], wanted), -math.inf, device=scores.device)
        offered[:, : own.shape[1]] = own
        gathered = self.ranks.gather(offered)
        # A rank that offered all it has (the rest is -inf) hides nothing.
        floor = gathered[:, :, -1].amax(dim=0)
        return gathered.transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values.double(), floor

    def _logsumexp(self, scores: Tensor) -> Tensor:
        """Over the whole vocabulary, [n], in float64, so that how it is split makes no difference that counts."""
        parts = self.ranks.gather(scores.double().logsumexp(dim=-1))
        _refuse_nan(parts)
        return parts.logsumexp(dim=0)

    def _logprobs(self, logits: Tensor, tokens: Tensor, draws: list[Draw]) -> list[TokenLogprobs | None]:
        counts = [draw.logprobs for draw in draws]
        most = max((count for count in counts if count is not None), default=None)
        if most is None:
            return [None] * len(draws)
        most = min(most, self.vocab_size)
        total = self._logsumexp(logits)
        own = logits.topk(min(most, logits.shape[1]), dim=-1)
        offers = torch.full((2, logits.shape[0], most), -1.0, dtype=torch.float64, device=logits.device)
        offers[0, :, : own.values.shape[1]] = own.values.double()
        offers[1, :, : own.values.shape[1]] = (own.indices + self.start).double()
        gathered = self.ranks.gather(offers).movedim(0, 2).flatten(2)
        gathered = gathered[..., gathered[1, 0] >= 0]  # some ranks have fewer tokens than were asked for
        values, order = gathered[0].sort(dim=-1, descending=True, stable=True)
        ids = gathered[1].gather(-1, order)
        is_own = (tokens >= self.start) & (tokens < self.stop)
        index = (tokens - self.start).clamp(0, logits.shape[1] - 1)
        mine = logits.gather(-1, index[:, None])[:, 0].masked_fill(~is_own, -math.inf)
        chosen = self.ranks.max(mine) - total
        return [
            None
            if count is None
            else TokenLogprobs(
                int(tokens[row]),
                float(chosen[row]),
                tuple((int(ids[row, i]), float(values[row, i] - total[row])) for i in range(min(count, most))),
            )
            for row, count in enumerate(counts)
        ]


def _refuse_nan(gathered: Tensor) -> None:
    """Every rank sees the same, so that all raise alike."""
    if bool(gathered.isnan().any()):
        raise RuntimeError("the model's logits are no numbers: a weight is damaged (--strict names it) or overflows")


def _row_threshold(candidates: Tensor, total: float, complete_from: float, draw: Draw) -> float | None:
    """The lowest score that `draw` keeps, given falling candidates; None if more of them are needed."""
    threshold = -math.inf
    if draw.temperature == 0:
        return threshold
    if 0 < draw.top_k <= candidates.shape[0]:
        threshold = float(candidates[draw.top_k - 1])
        if draw.top_p < 1 and -math.inf < threshold <= complete_from:
            return None
        candidates = candidates[candidates >= threshold]
        total = float(candidates.logsumexp(dim=-1))
    if draw.top_p < 1:
        mass_before = (candidates - total).exp().cumsum(-1).roll(1)
        mass_before[0] = 0
        kept = int((mass_before < draw.top_p).sum()) - 1
        last = float(candidates[kept])
        is_reached = float(mass_before[kept]) + math.exp(last - total) >= draw.top_p and last >= complete_from
        if not is_reached and threshold == -math.inf and complete_from > -math.inf:
            return None
        threshold = max(threshold, last)
    if draw.min_p > 0:
        threshold = max(threshold, float(candidates[0]) + math.log(draw.min_p))
    return threshold


def gumbel(key: tuple[int, int, int], tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id, float32, a pure function of key and id."""
    state = 0
    for part in key:
        state = _mix(state ^ (part & 0xFFFFFFFF))
        state = _mix(state ^ (part >> 32 & 0xFFFFFFFF))
    bits = _mix(_mix(tokens ^ state) + state)
    uniform = (bits.double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: _Ids) -> _Ids:
    """The 32-bit finalizer of MurmurHash3 (Appleby, public domain), on an integer or an int64 tensor."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
