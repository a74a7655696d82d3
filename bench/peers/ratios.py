"""What was measured, and the ratios of tpllama to its peers, round by round. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def speeds(found: Iterable[Measurement], precision: str, workload: Workload) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per second by contestant, recipe and round."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for each in found:
        if (each.precision, each.workload) == (precision, workload) and each.tokens_per_s:
            table.setdefault(each.peer, {}).setdefault(each.recipe, {})[each.round] = each.tokens_per_s
    return table


def best(recipes: dict[str, dict[int, float]]) -> str:
    """The recipe with the highest median over its rounds."""
    return max(recipes, key=lambda recipe: median(recipes[recipe].values()))


def ratios(found: Sequence[Measurement], precision: str, workload: Workload) -> Iterator[Ratio]:
    """Our best candidate to each peer's best recipe, round by round: heads are kept alike where we have such a one."""
    table = speeds(found, precision, workload)
    is_quantized = {(each.peer, each.recipe): each.head_quantized for each in found}
    ours = table.pop(OURS, {})
    for peer, recipes in table.items():
        theirs = best(recipes)
        alike = {name: each for name, each in ours.items() if is_quantized[OURS, name] == is_quantized[peer, theirs]}
        if not ours:
            continue
        mine = best(alike or ours)
        both = sorted(ours[mine].keys() & recipes[theirs].keys())
        if values := [ours[mine][number] / recipes[theirs][number] for number in both]:
            yield Ratio(peer, mine, theirs, median(values), min(values), max(values))
