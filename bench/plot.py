"""Charts of the results in bench/results, as SVG or PNG by the suffix.

    python bench/plot.py latency --results bench/results/latency.jsonl --run-name S --out latency.svg
    python bench/plot.py throughput --results bench/results/throughput.jsonl --run-name S --out throughput.svg
        [--where FIELD=VALUE ...]

latency has a bar for each recipe and number of ranks, and a panel for each shape of request; other settings have to
be the same in all lines. throughput has a line for each recipe, number of ranks and whatever else differs, by how many
requests run at once. Lines of the same measurement are one point, their median. A chart is of one model on one machine:
--where chooses where a run has more. The same results make the same file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from plot_records import PANEL, Record, check_same, check_settings, distinct, read

from tpllama.cli import Parser, end, guarded
from tpllama.config import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")  # Okabe and Ito's
STROKES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
MOST_PANELS = 3
WIDTH_INCHES, DPI = 9.0, 144
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tpllama", "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#dddddd", "legend.frameon": False,
    "figure.constrained_layout.use": True,
}  # fmt: skip
ONE_CHART = ("model", "device", "cpu", "dtype")
# What tells lines of throughput apart, beside recipe and ranks, with the words for it.
VARIANTS: dict[str, dict[Any, str]] = {
    "quantize_lm_head": {True: "with lm_head"}, "batch_invariant": {True: "batch-invariant"},
    "prefix_caching": {False: "no prefix caching"}, "kv_cache_dtype": {}, "compile": {}, "chunked_prefill": {
    False: "prompts whole"}, "shared_prefix": {}, "input_len": {}, "output_len": {}, "num_prompts": {},
}  # fmt: skip


def title(records: list[Record], what: str) -> str:
    """What, of which model, where and when."""
    check_same(records, ONE_CHART)
    model, device, cpu, dtype = (records[0].get(field) for field in ONE_CHART)
    dates = sorted({str(record["date"]) for record in records})
    machine = cpu if device == "cpu" else f"{device}, {cpu}"
    return f"{what}: {model}, {dtype}, on {machine}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def middle(records: Iterable[Record], field: str) -> float | None:
    return median([record[field] for record in records if record.get(field) is not None] or [None])


def recipe(record: Record) -> str:
    return record["torchao_config"] + (" + lm_head" if record.get("quantize_lm_head") else "")


def latency(records: list[Record]) -> Figure:
    check_same(records, ONE_CHART)
    check_settings(records)
    panels = sorted(distinct(records, *PANEL))
    if len(panels) > MOST_PANELS:
        shapes = f"{len(panels)} shapes of request"
        raise UserError(f"found {shapes}, expected at most {MOST_PANELS}, choose by --where batch_size=...")
    recipes = list(dict.fromkeys(map(recipe, records)))
    tps = sorted({record["tp"] for record in records})
    figure = _figure(0.9 + max(2, len(recipes) * (0.24 * len(tps) + 0.16)), title(records, "Decode latency"))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        of_panel = [record for record in records if tuple(record[field] for field in PANEL) == panel]
        ax.set(title="batch {}, {} + {} tokens".format(*panel), xlabel="median decode step, ms")
        _bars(ax, of_panel, recipes, tps)
    names = axes[0].get_legend_handles_labels()
    what = "in brackets: share of the measured read bandwidth" if middle(records, "bandwidth_fraction") else None
    figure.legend(*names, loc="outside lower center", ncols=len(tps), fontsize=9, title=what, title_fontsize=9)
    return figure


def _bars(ax: Axes, records: list[Record], recipes: list[str], tps: list[int]) -> None:
    """Recipes from top to bottom, and in each the numbers of ranks."""
    height = 0.8 / len(tps)
    for number, tp in enumerate(tps):
        offsets = [row - 0.4 + (number + 0.5) * height for row in range(len(recipes))]
        cells = [[record for record in records if (recipe(record), record["tp"]) == (name, tp)] for name in recipes]
        values = [middle(cell, "median_decode_latency") for cell in cells]
        widths = [1e3 * (value or 0.0) for value in values]
        label = "1 rank" if tp == 1 else f"{tp} ranks"
        ax.barh(offsets, widths, 0.92 * height, color=COLOURS[number % len(COLOURS)], label=label)
        for offset, width, value, cell in zip(offsets, widths, values, cells, strict=True):
            share = middle(cell, "bandwidth_fraction")
            text = f"{width:#.3g}".rstrip(".") + (f"  ({share:.0%})" if share is not None else "")
            if value is None:
                text = "could not run" if any(record.get("error") for record in cell) else ""
            ax.annotate(text, (width, offset), xytext=(3, 0), va="center",
                        textcoords="offset points", fontsize=8, color="#333333")  # fmt: skip
    ax.set_yticks(range(len(recipes)), recipes)
    ax.set_ylim(len(recipes) - 0.4, -0.6)
    room = 1.15 + 0.12 * len(ax.figure.axes)  # for the figures beside the bars
    ax.set_xlim(0, room * (ax.dataLim.xmax or 1.0))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def throughput(records: list[Record]) -> Figure:
    differing = [field for field in VARIANTS if len(distinct(records, field)) > 1]
    keys = ("torchao_config", "tp", *differing)
    lines = _styled(records, keys)
    figure = _figure(4.2, title(records, "Throughput"))
    sizes = distinct(records, "num_prompts", "input_len", "output_len")
    name_of_x = "requests at once" + (", of {} with {} + {} tokens".format(*sizes[0]) if len(sizes) == 1 else "")
    panels = {"output_tokens_per_s": "from first request to last token", "median_decode_tokens_per_s": "decode steps"}
    for ax, (field, name) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for line, style in lines.items():
            of_line = [record for record in records if tuple(record.get(key) for key in keys) == line]
            _line(ax, of_line, field, _label(of_line[0], differing), style)
        ax.set_xscale("log", base=2)
        ticks = sorted({record["concurrency"] for record in records})
        ax.set_xticks(ticks, map(str, ticks))
        ax.minorticks_off()
        ax.set(title=name, xlabel=name_of_x, ylabel="new tokens/s, all requests together")
        ax.set_ylim(bottom=0)
        ax.grid()
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=min(4, len(lines)), fontsize=9, handlelength=3)
    return figure


def _styled(records: list[Record], keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """How each line looks: colour by recipe, strokes by number of ranks, marker by what else differs."""
    lines = distinct(records, *keys)
    styles: dict[tuple[Any, ...], dict[str, Any]] = {line: {} for line in lines}
    looks = {"color": (COLOURS, slice(0, 1)), "linestyle": (STROKES, slice(1, 2)), "marker": (MARKERS, slice(2, None))}
    for look, (choices, part) in looks.items():
        kinds = list(dict.fromkeys(line[part] for line in lines))
        if len(kinds) > len(choices):
            found = f"{len(kinds)} values of {', '.join(keys[part])}"
            raise UserError(f"found {found}, expected at most {len(choices)}, choose by --where {keys[part][0]}=...")
        for line in lines:
            styles[line][look] = choices[kinds.index(line[part])]
    return styles


def _line(ax: Axes, records: list[Record], field: str, label: str, style: dict[str, Any]) -> None:
    by_concurrency = {
        concurrency: middle((record for record in records if record["concurrency"] == concurrency), field)
        for concurrency in sorted({record["concurrency"] for record in records})
    }
    points = {x: y for x, y in by_concurrency.items() if y is not None}
    ax.plot(list(points), list(points.values()), label=label, markersize=5, **style)


def _label(record: Record, differing: list[str]) -> str:
    words = [VARIANTS[field].get(record.get(field), f"{field}={record.get(field)}") for field in differing]
    unusual = [word for word, field in zip(words, differing, strict=True) if not _is_usual(record, field)]
    return ", ".join([record["torchao_config"], f"TP {record['tp']}", *unusual])


def _is_usual(record: Record, field: str) -> bool:  # then it goes without saying
    return bool(VARIANTS[field]) and record.get(field) not in VARIANTS[field]


def _figure(height: float, name: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height))
    figure.suptitle(name, x=0.01, ha="left", fontsize=11)
    return figure


def draw(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    if out.suffix not in (".svg", ".png"):
        raise UserError(f"found --out {out}, expected a name that ends with .svg or .png")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"found --out {out} unwritable, expected a file in a folder there is, name another")
    records = read(Path(arguments.results), arguments.chart, arguments.run_name, arguments.where)
    try:
        import matplotlib
    except ImportError:
        raise UserError("found no matplotlib, expected it for charts, do: pip install 'tpllama[bench]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # and not what the user's own file says
        matplotlib.rcParams.update(STYLE)
        figure = {"latency": latency, "throughput": throughput}[arguments.chart](records)
        figure.savefig(out, dpi=DPI, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(out)


def main() -> None:
    parser = Parser(prog="plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chart", choices=("latency", "throughput"))
    parser.add_argument("--results", required=True, metavar="F", help="JSON lines of that bench")
    parser.add_argument("--run-name", default="default", metavar="S")
    parser.add_argument("--where", nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", required=True, metavar="FILE.svg")
    end(guarded("plot", lambda: draw(parser.parse_args()), is_debug=False))


if __name__ == "__main__":
    main()
