"""Figures of whole next-token distributions, from logits float32 [places, vocab], computed in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpllama import LLM

_ROWS = 64  # places at once: in float64 a distribution over 128256 tokens takes 63 MiB for so many


def logits_of(llm: LLM, texts: Sequence[Sequence[int]], batch_size: int) -> Iterator[Tensor]:
    """Of each text, [tokens, vocab], computed `batch_size` texts at a time."""
    for start in range(0, len(texts), batch_size):
        yield from llm.logits(texts[start : start + batch_size]).cpu()


def losses(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Negative log-probability, in nats, of each of a text's tokens but the first: float64 [tokens - 1]."""
    following = torch.tensor(token_ids[1:])
    parts = zip(logits[:-1].split(_ROWS), following.split(_ROWS), strict=True)
    return torch.cat([-part.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for part, ids in parts])


@dataclass
class Distance:
    """How far distributions q are from p: a value for each place added so far.

    kl: KL(p || q) = sum over tokens of p (ln p - ln q), in nats. same: whether the likeliest token is, of several
    alike the one of lowest id. largest: absolute difference of two logits.
    """

    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    largest: float = 0.0

    def add(self, right: Tensor, own: Tensor) -> None:
        """The logits of p and of q."""
        for p, q in zip(right.split(_ROWS), own.split(_ROWS), strict=True):
            log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            self.kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
            self.same.append(p.argmax(-1) == q.argmax(-1))
            self.largest = max(self.largest, float((p - q).abs().max()))

    def figures(self) -> dict[str, float | None]:
        """Mean and 99th percentile of KL, share of places with the same likeliest token; None without any place."""
        if not self.kl:
            return dict.fromkeys(("kl_mean", "kl_p99", "top1", "max_difference"))
        kl, same = torch.cat(self.kl), torch.cat(self.same).double()
        return {
            "kl_mean": float(kl.mean()), "kl_p99": float(kl.quantile(0.99)), "top1": float(same.mean()),
            "max_difference": self.largest,
        }  # fmt: skip


class Kept:
    """Logits of texts under names, in files of one folder, of which only what is looked at is in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: int, logits: Tensor) -> None:
        torch.save(logits.clone(), self._folder / f"{name} {text}")

    def get(self, name: str, text: int) -> Tensor:
        return torch.load(self._folder / f"{name} {text}", mmap=True)
