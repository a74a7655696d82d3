"""What was measured, and the ratios of tpllama to its peers, round by round. Starts nothing.

Only a recipe that was measured in every round counts: else one lucky round before a crash could win. Of those the one
with the highest median does, on both sides, chosen on the rounds that are then divided: see compare.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OURS = "tpllama"


@dataclass(frozen=True)
class Workload:
    """What is measured: the first token of a prompt of `length` tokens, or the steps after prompts of that length."""

    kind: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"prefill {self.length}" if self.kind == "prefill" else f"decode x{self.batch}"


@dataclass(frozen=True)
class Sizes:
    """All workloads of a comparison, in tokens and texts."""

    prefill: Sequence[int]
    decode: Sequence[int]
    prompt_len: int
    new_tokens: int

    @property
    def workloads(self) -> list[Workload]:
        decodes = [Workload("decode", batch, self.prompt_len) for batch in self.decode]
        return [Workload("prefill", 1, length) for length in self.prefill] + decodes


@dataclass(frozen=True)
class Measurement:
    """Tokens per second (summed over the batch) of a workload in a round; None with the reason why there is none."""

    round: int
    peer: str
    precision: str
    recipe: str
    head_quantized: bool
    workload: Workload | None
    tokens_per_s: float | None
    fields: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def error(self) -> str | None:
        return self.fields.get("error")


@dataclass(frozen=True)
class Ratio:
    """Our tokens per second to a peer's: the median over the rounds, and the extremes."""

    peer: str
    ours: str
    theirs: str
    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


Rounds = dict[int, float]


@dataclass(frozen=True)
class Results:
    """What a comparison measured, in so many rounds."""

    found: Sequence[Measurement]
    rounds: int

    def speeds(self, precision: str, workload: Workload) -> dict[str, dict[str, Rounds]]:
        """Tokens per second by contestant, recipe and round."""
        table: dict[str, dict[str, Rounds]] = {}
        for each in self.found:
            if (each.precision, each.workload) == (precision, workload) and each.tokens_per_s:
                table.setdefault(each.peer, {}).setdefault(each.recipe, {})[each.round] = each.tokens_per_s
        return table

    def best(self, recipes: Mapping[str, Rounds]) -> str | None:
        """The recipe with the highest median, of those that have every round."""
        whole = [recipe for recipe, rounds in recipes.items() if len(rounds) == self.rounds]
        return max(whole, key=lambda recipe: median(recipes[recipe].values()), default=None)

    def pairs(self, precision: str, workload: Workload) -> Iterator[tuple[str, str, str | None]]:
        """Each peer with its best recipe and our best with a head of that kind, None where we have no such one."""
        table = self.speeds(precision, workload)
        is_quantized = {(each.peer, each.recipe): each.head_quantized for each in self.found}
        ours = table.pop(OURS, {})
        for peer, recipes in table.items():
            if theirs := self.best(recipes):
                kind = is_quantized[peer, theirs]
                yield peer, theirs, self.best({name: ours[name] for name in ours if is_quantized[OURS, name] == kind})

    def ratios(self, precision: str, workload: Workload) -> Iterator[Ratio]:
        """Of these pairs, round by round."""
        table = self.speeds(precision, workload)
        for peer, theirs, ours in self.pairs(precision, workload):
            if ours:
                mine, other = table[OURS][ours], table[peer][theirs]
                values = [mine[number] / other[number] for number in sorted(mine)]
                yield Ratio(peer, ours, theirs, median(values), min(values), max(values))
