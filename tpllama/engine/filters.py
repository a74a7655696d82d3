"""What top-k, top-p and min-p keep: a threshold on each row's scores, found from each rank's few largest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tpllama.engine.batch import Draw
from tpllama.parallel.collectives import Ranks

# Candidates a rank offers first; more follow for the rows where they don't suffice.
_FIRST_CANDIDATES = 64
_MORE = 8


def is_filtered(draw: Draw) -> bool:
    return draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0


def thresholds(scores: Tensor, draws: Sequence[Draw], ranks: Ranks, vocab_size: int) -> Tensor:
    """The lowest score that each row's filters keep, float32 [n], given scores [n, own tokens], over temperature.

    Top-k, then top-p among those, then min-p. Equal scores are kept or dropped together. NaN for a row whose scores
    are no numbers.
    """
    peak = common_peak(scores, ranks)
    is_broken = ~(peak < math.inf)
    scores, peak = scores.masked_fill(is_broken[:, None], 0), peak.masked_fill(is_broken, 0)
    min_p = torch.tensor([draw.min_p for draw in draws], dtype=torch.float64, device=scores.device)
    result = (peak.double() + min_p.log()).float()
    rows = [row for row, draw in enumerate(draws) if 0 < draw.top_k < vocab_size or draw.top_p < 1]
    if rows:
        index = torch.tensor(rows, device=scores.device)
        if len(rows) < len(draws):
            scores, peak = scores[index], peak[index]
        ranked = _Ranked(scores, [draws[row] for row in rows], peak, ranks, vocab_size)
        result[index] = torch.maximum(result[index], ranked.thresholds())
    return result.masked_fill(is_broken, math.nan)


def common_peak(scores: Tensor, ranks: Ranks) -> Tensor:
    """Each row's largest score over all ranks, float32 [n]; NaN or infinity where scores are no numbers."""
    return ranks.max(scores.amax(dim=-1))


def mass(scores: Tensor, peak: Tensor) -> Tensor:
    """Probabilities as multiples of the likeliest token's, float32 [n, tokens]; a row of -inf has none."""
    # Every rank subtracts the same, so the terms are the same however the vocabulary is split.
    return (scores - peak.clamp(min=torch.finfo(torch.float32).min)[:, None]).exp_()


class _Ranked:
    """Rows of scores [m, own tokens], each with a top-k or a top-p below 1."""

    def __init__(self, scores: Tensor, draws: Sequence[Draw], peak: Tensor, ranks: Ranks, vocab_size: int) -> None:
        self.scores = scores
        self.peak = peak
        self.ranks = ranks
        self.vocab_size = vocab_size
        top_k = [draw.top_k if draw.top_k < vocab_size else 0 for draw in draws]
        self.top_k = torch.tensor(top_k, device=scores.device)
        self.top_p = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=scores.device)
        # One more than top_k shows whether others tie with the last.
        self.wanted = max(_FIRST_CANDIDATES, max(top_k) + 1)
        self.total = torch.zeros_like(self.top_p)
        if any(k == 0 for k in top_k):
            # float64, so that the order of adding makes no difference that counts.
            self.total = ranks.sum(mass(scores, peak).sum(dim=-1, dtype=torch.float64))

    def thresholds(self) -> Tensor:
        """The lowest score that top-k and top-p keep, float32 [m]."""
        result = torch.empty_like(self.peak)
        pending = torch.arange(len(result), device=result.device)
        while True:
            candidates, complete_from = self._largest(pending)
            result[pending], suffices = self._from_candidates(pending, candidates, complete_from)
            pending = pending[~suffices]
            if not len(pending):
                return result
            self.wanted *= _MORE

    def _largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks' largest scores, [rows, up to ranks * wanted], falling; and the score above which none lacks."""
        scores = self.scores if len(rows) == len(self.scores) else self.scores[rows]
        wanted = min(self.wanted, self.vocab_size + 1)
        own = scores.topk(min(wanted, scores.shape[1]), dim=-1).values
        # A rank that offered all it has (the rest is -inf) hides nothing.
        offered = torch.nn.functional.pad(own, (0, wanted - own.shape[1]), value=-math.inf)
        gathered = self.ranks.gather(offered)
        complete_from = gathered[:, :, -1].amax(dim=0)
        merged = gathered.transpose(0, 1).flatten(1)
        return merged.sort(dim=-1, descending=True).values if self.ranks.size > 1 else merged, complete_from

    def _from_candidates(self, rows: Tensor, candidates: Tensor, complete_from: Tensor) -> tuple[Tensor, Tensor]:
        """Thresholds, and whether they are right: False where more candidates are needed to tell."""
        top_k, top_p = self.top_k[rows], self.top_p[rows]
        has_top_k, has_top_p = top_k > 0, top_p < 1
        at_k = candidates.gather(1, (top_k - 1).clamp(min=0)[:, None])
        at_k = at_k.masked_fill_(~has_top_k[:, None], -math.inf)
        is_in_k = candidates >= at_k
        # Added one after the other: a row's sums are the same bits, whatever number of candidates it has.
        sums = (mass(candidates, self.peak[rows]).double() * is_in_k).cumsum(dim=-1)
        wanted = top_p * torch.where(has_top_k, sums[:, -1], self.total[rows])
        before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
        last = ((before < wanted[:, None]) & is_in_k).sum(dim=-1, keepdim=True).sub(1).clamp(min=0)
        at_p = candidates.gather(1, last)[:, 0]
        at_k = at_k[:, 0]
        is_reached = (sums.gather(1, last)[:, 0] >= wanted) & (at_p >= complete_from)
        # Tokens that tie with the last of top-k belong to its mass; without top-k, all of the mass is known.
        is_complete = torch.where(has_top_k, (at_k > complete_from) | (at_k == -math.inf), is_reached)
        suffices = ~has_top_p | is_complete | (complete_from == -math.inf)
        return torch.where(has_top_p, torch.maximum(at_k, at_p), at_k), suffices
