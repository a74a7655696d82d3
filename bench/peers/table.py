"""What a comparison found, as text. All speeds are tokens per second, medians of the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from peers.ratios import OURS, Results, Rounds, Workload


def details(results: Results, precision: str, workloads: Sequence[Workload]) -> Iterator[str]:
    """Every recipe of every contestant, the fastest first, then what is divided by what."""
    yield f"{precision}: every recipe; * is the best of its contestant"
    for workload in workloads:
        yield f"  {workload}"
        for peer, recipes in results.speeds(precision, workload).items():
            top = results.best(recipes)
            for recipe, rounds in sorted(recipes.items(), key=lambda item: -median(item[1].values())):
                few = "" if len(rounds) == results.rounds else f"   ({_few(rounds, results)}, so it doesn't count)"
                yield f"    {median(rounds.values()):9.2f} {'*' if recipe == top else ' '} {peer}: {recipe}{few}"
        for ratio in results.ratios(precision, workload):
            yield f"    {OURS} / {ratio.peer}: {ratio}   {ratio.ours} / {ratio.theirs}"
        for peer, theirs, ours in results.pairs(precision, workload):
            if not ours:
                yield f"    {OURS} / {peer}: nothing of {OURS} in all rounds has a head kept like that of {theirs}"


def table(
    results: Results, precisions: Sequence[str], workloads: Sequence[Workload], is_markdown: bool = False
) -> Iterator[str]:
    """One row for each precision and workload: tpllama's best, then each peer's best and our ratio to it."""
    peers = list(dict.fromkeys(each.peer for each in results.found if each.peer != OURS and each.tokens_per_s))
    rows = [["", OURS, *peers]]
    for precision in precisions:
        for workload in workloads:
            rows.append([f"{precision} {workload}", *_cells(results, precision, workload, peers, is_markdown)])
    if is_markdown:
        rows.insert(1, ["---", *["---:"] * (len(peers) + 1)])
        yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(
    results: Results, precision: str, workload: Workload, peers: Sequence[str], is_with_recipes: bool
) -> Iterator[str]:
    """tpllama's, then each peer's: its speed, our ratio, and what of ours was divided where the first cell doesn't."""
    speeds = results.speeds(precision, workload)
    ours = speeds.get(OURS, {})
    mine = results.best(ours)
    yield _speed(results, ours, mine) + (f" ({mine})" if mine and is_with_recipes else "")
    over = {ratio.peer: ratio for ratio in results.ratios(precision, workload)}
    for peer in peers:
        recipes = speeds.get(peer, {})
        text = _speed(results, recipes, theirs := results.best(recipes))
        if ratio := over.get(peer):
            text += f": {ratio}"
            if ratio.ours != mine:
                which = f" ({ratio.ours})" if is_with_recipes else ""
                text += f" of {median(ours[ratio.ours].values()):.1f}{which}"
        elif theirs and ours:
            text += ": no like head"
        yield text


def _speed(results: Results, recipes: Mapping[str, Rounds], best: str | None) -> str:
    if best:
        return f"{median(recipes[best].values()):.1f}"
    return f"({_few(max(recipes.values(), key=len), results)})" if recipes else "-"


def _few(rounds: Rounds, results: Results) -> str:
    return f"{len(rounds)} of {results.rounds} rounds"
