"""Changes to logits that come before sampling: masks, bias, penalties. Each rank changes its own tokens' columns.

All draws' changes of one kind are one indexed operation, and a kind that no draw uses costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpllama.engine.batch import Draw

# Changed logits stay within this, whatever a request asks for: divided by the lowest temperature they are finite.
_LARGEST = 1e8


def edited(logits: Tensor, draws: Sequence[Draw], start: int) -> Tensor:
    """Logits float32 [n, own tokens from `start` on] with the changes of each row's draw; the same tensor without any.

    In `Draw`'s order. A logit of -inf stays that, whatever follows.
    """
    scores = logits
    for is_used, change in _CHANGES:
        rows = [row for row, draw in enumerate(draws) if is_used(draw)]
        if rows:
            scores = logits.clone() if scores is logits else scores
            change(_Rows(scores, rows, start), [draws[row] for row in rows])
    return scores


class _Rows:
    """Some rows of scores [n, own tokens from `start` on], float32, which are changed in place."""

    def __init__(self, scores: Tensor, rows: list[int], start: int) -> None:
        self.scores = scores
        self.rows = rows
        self.start = start

    def places(self, tokens: NDArray[np.int64], lengths: list[int]) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """Of ids, `lengths` of them for each row in turn: flat indices and rows of those that are here; which are."""
        width = self.scores.shape[1]
        columns = tokens - self.start
        is_own = (columns >= 0) & (columns < width)
        order = np.repeat(np.arange(len(self.rows)), lengths)[is_own]
        flat = np.array(self.rows, dtype=np.int64)[order] * width + columns[is_own]
        device = self.scores.device
        return torch.from_numpy(flat).to(device), torch.from_numpy(order).to(device), is_own

    def change(self, places: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Puts what float64 `change` makes of the scores at flat indices, except of those that are -inf."""
        flat = self.scores.view(-1)
        old = flat[places].double()
        flat[places] = torch.where(old == -math.inf, old, change(old).clamp(-_LARGEST, _LARGEST)).float()

    def each(self, values: Sequence[float]) -> Tensor:
        """One value for each row, float64."""
        return torch.tensor(values, dtype=torch.float64, device=self.scores.device)


def _allow(rows: _Rows, draws: Sequence[Draw]) -> None:
    """Masks all but the tokens whose bits are set; bits that are missing count as not set."""
    width, device = rows.scores.shape[1], rows.scores.device
    first, last = rows.start // 8, (rows.start + width + 7) // 8
    parts = [(draw.allowed or b"")[first:last].ljust(last - first, b"\0") for draw in draws]
    packed = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
    # What each byte adds to the logits of its eight tokens: looked up, for masking takes three times as long.
    table = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    added = table.float().log()[packed.int()].view(len(draws), -1)[:, rows.start - 8 * first :][:, :width]
    if len(draws) == len(rows.scores):
        rows.scores.add_(added)
    else:
        rows.scores[rows.rows] += added


def _ban(rows: _Rows, draws: Sequence[Draw]) -> None:
    tokens, lengths = _flat([draw.banned for draw in draws], np.int64)
    places, _, _ = rows.places(tokens, lengths)
    rows.scores.view(-1)[places] = -math.inf


def _add_bias(rows: _Rows, draws: Sequence[Draw]) -> None:
    tokens, amounts, lengths = _pairs([draw.bias for draw in draws])
    places, _, is_own = rows.places(tokens, lengths)
    bias = torch.from_numpy(amounts[is_own].clip(-_LARGEST, _LARGEST)).to(places.device)
    rows.change(places, lambda old: old + bias)


def _penalize_seen(rows: _Rows, draws: Sequence[Draw]) -> None:
    """Repetition penalty (arXiv 1909.05858): positive logits of seen tokens divided by it, negative multiplied."""
    bits = [np.unpackbits(np.frombuffer(draw.seen, np.uint8), bitorder="little") for draw in draws]
    seen = [row.nonzero()[0] for row in bits]
    tokens, lengths = np.concatenate(seen), [len(row) for row in seen]
    places, order, _ = rows.places(tokens, lengths)
    penalty = rows.each([draw.repetition_penalty for draw in draws])[order]
    rows.change(places, lambda old: torch.where(old > 0, old / penalty, old * penalty))


def _penalize_counts(rows: _Rows, draws: Sequence[Draw]) -> None:
    """Presence penalty (OpenAI's formula) for tokens that were drawn, frequency penalty as often as they were."""
    tokens, amounts, lengths = _pairs([draw.counts for draw in draws])
    places, order, is_own = rows.places(tokens, lengths)
    counts = torch.from_numpy(amounts[is_own]).to(places.device)
    presence = rows.each([draw.presence_penalty for draw in draws]).clamp_(-_LARGEST, _LARGEST)[order]
    frequency = rows.each([draw.frequency_penalty for draw in draws]).clamp_(-_LARGEST, _LARGEST)[order]
    rows.change(places, lambda old: old - counts * frequency - (counts > 0) * presence)


def _flat(lists: Sequence[Sequence[Any]], dtype: type[Any]) -> tuple[NDArray[Any], list[int]]:
    """All of them in one array, and their lengths."""
    lengths = [len(each) for each in lists]
    return np.fromiter(chain.from_iterable(lists), dtype, sum(lengths)), lengths


def _pairs(lists: Sequence[Sequence[tuple[int, float]]]) -> tuple[NDArray[np.int64], NDArray[np.float64], list[int]]:
    """Ids and amounts of all pairs, each in one array, and the lists' lengths. float64 holds every id exactly."""
    lengths = [len(each) for each in lists]
    numbers = chain.from_iterable(chain.from_iterable(lists))
    table = np.fromiter(numbers, np.float64, 2 * sum(lengths)).reshape(-1, 2)
    return table[:, 0].astype(np.int64), table[:, 1].copy(), lengths


# Whether a draw needs each change, and the change, in their order.
_CHANGES: tuple[tuple[Callable[[Draw], bool], Callable[[_Rows, Sequence[Draw]], None]], ...] = (
    (lambda draw: draw.allowed is not None, _allow),
    (lambda draw: bool(draw.banned), _ban),
    (lambda draw: bool(draw.bias), _add_bias),
    (lambda draw: draw.repetition_penalty != 1 and bool(draw.seen), _penalize_seen),
    (lambda draw: bool(draw.counts) and (draw.presence_penalty != 0 or draw.frequency_penalty != 0), _penalize_counts),
)
