"""What a comparison found, as text. All speeds are tokens per second, medians of the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from peers.ratios import OURS, Measurement, Workload, best, ratios, speeds


def details(found: Sequence[Measurement], precision: str, workloads: Sequence[Workload]) -> Iterator[str]:
    """Every recipe of every contestant, the fastest first, then what is divided by what."""
    yield f"{precision}: every recipe; * is the best of its contestant"
    for workload in workloads:
        yield f"  {workload}"
        for peer, recipes in speeds(found, precision, workload).items():
            top = best(recipes)
            for recipe, rounds in sorted(recipes.items(), key=lambda item: -median(item[1].values())):
                yield f"    {median(rounds.values()):9.2f} {'*' if recipe == top else ' '} {peer}: {recipe}"
        for ratio in ratios(found, precision, workload):
            yield f"    {OURS} / {ratio.peer}: {ratio}   {ratio.ours} / {ratio.theirs}"


def table(found: Sequence[Measurement], precisions: Sequence[str], workloads: Sequence[Workload]) -> Iterator[str]:
    """One row for each precision and workload: tpllama's best, then each peer's best and our ratio to it."""
    peers = list(dict.fromkeys(each.peer for each in found if each.peer != OURS and each.tokens_per_s))
    rows = [["", OURS, *peers]]
    for precision in precisions:
        for workload in workloads:
            speed = speeds(found, precision, workload)
            over = {ratio.peer: str(ratio) for ratio in ratios(found, precision, workload)}
            middle = {peer: f"{median(recipes[best(recipes)].values()):.1f}" for peer, recipes in speed.items()}
            cells = [f"{middle[peer]}: {over.get(peer, '-')}" if peer in middle else "-" for peer in peers]
            rows.append([f"{precision} {workload}", middle.get(OURS, "-"), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
