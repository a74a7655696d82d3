"""tpllama and its peers on the same shapes at the same precision: tokens per second, and ratios with their spread.

    python bench/compare.py [--list] [--peers llamacpp vllm ..] [--precisions bf16 int8 int4] [--prefill 128 512]
        [--decode 1 8 32] [--prompt-len 32] [--new-tokens 32] [--rounds 3] [--threads 2] [--model DIR | --shape 1b]
        [--recipes R ..] [--tp 1 2] [--heads plain quantized] [--markdown] [--result-filename F]
    python bench/compare.py --from F [--started S] [--markdown]     prints the tables of a run, by default F's last

Each peer lives in its own environment under ${TPLLAMA_PEERS:-~/.cache/tpllama-peers}, made by peers/setup_NAME.sh, and
is measured by peers/measure_NAME.py; one that is absent is skipped by name. tpllama is measured by latency.py: each
recipe of the precision, with and without --quantize-lm-head, on each placement of the threads (TP x threads a rank).

Within a round every contestant runs once, in fresh processes, one after another; the rounds follow each other, so that
what the machine does meanwhile hits all alike. A contestant that gave no figure in a round is out, and a recipe
without a figure in every round is neither anybody's best nor divided.

    prefill N   tokens of one prompt of N, by the seconds until its first new token, the median of 3 repetitions
    decode xB   tokens of B texts that go on after prompts of --prompt-len, by the seconds of a step, the median of the
                --new-tokens - 1 steps of one run (llama.cpp, which times them together: the mean)
    ratio       tpllama's best candidate to the peer's best recipe, in each round: median (lowest to highest). Best is
                the highest median; only candidates whose output head is quantized if the peer's is are compared. Where
                that candidate isn't the one of tpllama's own column its speed follows, "of X"; "no like head": none is

A best is chosen on the rounds that it is judged by, which flatters whoever has more candidates: of equals with 5 %
noise, the best of 6 is to a single one as 1.037 to 1 (simulated, 3 rounds). Both sides choose by the same rule.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from peers.contest import Contestant, Ours, Peer
from peers.model import SHAPES, shared_model
from peers.ratios import Measurement, Results, Sizes, Workload
from peers.results import Log, saved_run
from peers.table import details, table
from record import check_writable

from tpllama.cli import Parser, end, guarded
from tpllama.config import UserError

HERE = Path(__file__).parent
HOME = Path(os.environ.get("TPLLAMA_PEERS") or Path.home() / ".cache/tpllama-peers")
RECIPES = {"bf16": ["none"], "int8": ["int8dq", "int8wo"], "int4": ["int4wo-32", "int4wo-128", "8da4w-32"]}


def parser() -> Parser:
    parser = Parser(prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="say which peers are set up")
    add("--peers", nargs="*", metavar="NAME", help="default: all")
    add("--precisions", nargs="+", choices=RECIPES, default=list(RECIPES))
    add("--prefill", type=_count, nargs="*", default=[128, 512], metavar="N", help="tokens of a prompt")
    add("--decode", type=_count, nargs="*", default=[1, 8, 32], metavar="B", help="texts at once")
    add("--prompt-len", type=_count, default=32, metavar="I", help="tokens of each prompt before decode")
    add("--new-tokens", type=_count, default=32, metavar="O", help="tokens of each text of decode")
    add("--rounds", type=_count, default=3)
    add("--threads", type=_count, default=2, help="of each contestant, over all its ranks")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint in Hugging Face form")
    model.add_argument("--shape", choices=SHAPES, default="1b", help="random weights of this shape, made once")
    add("--recipes", nargs="*", metavar="R", help="tpllama's, of those that a precision has; none: peers alone")
    add("--tp", type=_count, nargs="+", default=[1, 2])
    add("--heads", nargs="+", choices=("plain", "quantized"), default=["plain", "quantized"])
    add("--timeout-s", type=_seconds, default=900.0, help="of one contestant in one round, or of preparing it")
    add("--workers", type=Path, default=HERE / "peers", metavar="DIR", help="where the measure_NAME.py are")
    add("--latency", type=Path, default=HERE / "latency.py", metavar="FILE", help="what measures tpllama")
    add("--markdown", action="store_true", help="the last table is in Markdown, with tpllama's recipes")
    add("--from", type=Path, dest="saved", metavar="F", help="measure nothing, print the tables of a run in this file")
    add("--started", metavar="S", help="with --from: that run, as its lines name it")
    add("--result-filename", type=Path, metavar="F", help="JSON lines are appended to it")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"found {text[:20]!r}, expected whole numbers from 1 to {1 << 20}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"found {text[:20]!r}, expected a number of seconds above 0")
    return number


def work(arguments: argparse.Namespace) -> None:
    if arguments.saved:
        print_saved(arguments.saved, arguments.started, arguments.markdown)
        return
    if arguments.started:
        raise UserError("found --started without --from, expected both, name the file")
    signal.signal(signal.SIGTERM, _terminate)
    scripts = {path.stem.removeprefix("measure_"): path for path in sorted(arguments.workers.glob("measure_*.py"))}
    names = list(scripts) if arguments.peers is None else arguments.peers
    if unknown := [name for name in names if name not in scripts]:
        raise UserError(f"found --peers {' '.join(unknown)}, expected some of {', '.join(scripts)}, see --list")
    if arguments.list:
        for name in names:
            print(f"{name}: {_stated(HOME / name)}")
        return
    check(arguments)
    model = arguments.model or shared_model(HOME, arguments.shape)
    peers = [
        Peer(name, scripts[name], HOME / name, model, arguments.threads, arguments.timeout_s) for name in names
    ]  # fmt: skip
    skipped = {peer.name: reason for peer in peers if (reason := peer.missing())}
    present = [peer for peer in peers if peer.name not in skipped]
    log = Log(arguments, skipped)
    sizes = Sizes(arguments.prefill, arguments.decode, arguments.prompt_len, arguments.new_tokens)
    found: list[Measurement] = []
    for precision in arguments.precisions:
        contestants: list[Contestant] = [*candidates(arguments, precision, model), *present]
        found += compare(contestants, precision, sizes, arguments.rounds, log)
    results = Results(found, arguments.rounds)
    print_table(results, arguments.precisions, sizes.workloads, skipped | log.out, arguments.markdown)


def _terminate(*_: object) -> NoReturn:
    """Ends by way of every `finally`, so that what was started ends too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def print_table(
    results: Results, precisions: Sequence[str], workloads: Sequence[Workload], out: Mapping[str, str], markdown: bool
) -> None:
    """Raises RuntimeError, at the end, where there is no figure at all."""
    print("\nbest tokens per second; after a peer's, tpllama's ratio to it: median (lowest to highest round)\n")
    print("\n".join(table(results, precisions, workloads, markdown)) + "\n")
    for name, reason in out.items():
        print(f"skipped {name}: {reason}")
    if not any(each.tokens_per_s for each in results.found):
        raise RuntimeError("nothing was measured, expected at least one contestant with a figure")


def print_saved(path: Path, started: str | None, markdown: bool) -> None:
    run = saved_run(path, started)
    print("{model} on {cpu}, threads {threads}, rounds {rounds}, {started}".format(**run.facts))
    for precision in run.precisions:
        print("\n".join(details(run.results, precision, run.workloads)))
    print_table(run.results, run.precisions, run.workloads, run.out, markdown)


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what can't be measured."""
    if not arguments.prefill and not arguments.decode:
        raise UserError("found neither --prefill nor --decode, expected lengths or batches, name some")
    if arguments.new_tokens < 2:
        raise UserError(f"found --new-tokens {arguments.new_tokens}, expected at least 2, the first is prefill's")
    if odd := [tp for tp in arguments.tp if arguments.threads % tp]:
        raise UserError(f"found --tp {odd[0]} on {arguments.threads} threads, expected a divisor, change --threads")
    known = [recipe for recipes in RECIPES.values() for recipe in recipes]
    if unknown := [recipe for recipe in arguments.recipes or () if recipe not in known]:
        raise UserError(f"found --recipes {' '.join(unknown)}, expected some of {', '.join(known)}")
    if arguments.model and not (arguments.model / "config.json").exists():
        raise UserError(f"found no config.json in --model {arguments.model}, expected a checkpoint's directory")
    check_writable(arguments.result_filename)


def candidates(arguments: argparse.Namespace, precision: str, model: Path) -> Iterator[Ours]:
    """tpllama's own: recipes of a precision, heads and placements. A head is quantized with the rest or not at all."""
    for recipe in RECIPES[precision]:
        if arguments.recipes is not None and recipe not in arguments.recipes:
            continue
        for head in arguments.heads if recipe != "none" else ["plain"]:
            for tp in arguments.tp:
                yield Ours(
                    arguments.latency, model, recipe, head == "quantized", tp, arguments.threads, arguments.timeout_s
                )


def compare(
    contestants: Sequence[Contestant], precision: str, sizes: Sizes, rounds: int, log: Log
) -> list[Measurement]:
    """Measures a precision in rounds, and says what each recipe gave."""
    found: list[Measurement] = []
    print(f"{precision}: preparing", flush=True)
    taking_part = []
    for each in contestants:
        if reason := each.prepare(precision):
            log.leaves(each.name, precision, reason)
        else:
            taking_part.append(each)
    for number in range(1, rounds + 1):
        for each in list(taking_part):
            taken = []
            for one in each.run(precision, sizes, number):
                log.measured(each.name, one)
                taken.append(one)
            found += taken
            if not any(one.tokens_per_s for one in taken):
                reason = next((one.error for one in taken if one.error), None)
                log.leaves(each.name, precision, reason or "printed no figure")
                taking_part.remove(each)
    results = Results(found, rounds)
    print("\n".join(details(results, precision, sizes.workloads)), flush=True)
    for workload in sizes.workloads:
        for ratio in results.ratios(precision, workload):
            log.write("ratio", precision=precision, **vars(workload), **vars(ratio))
    return found


def _stated(home: Path) -> str:
    ready = home / "ready"
    return ready.read_text().strip() if ready.exists() else f"not set up, run bench/peers/setup_{home.name}.sh"


if __name__ == "__main__":
    end(guarded("compare", lambda: work(parser().parse_args()), is_debug=False))
