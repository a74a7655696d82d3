"""tpllama and its peers on the same shapes at the same precision: tokens per second, and ratios with their spread.

    python bench/compare.py [--list] [--peers llamacpp vllm ..] [--precisions bf16 int8 int4] [--prefill 128 512]
        [--decode 1 8 32] [--prompt-len 32] [--new-tokens 32] [--rounds 3] [--threads 2] [--model DIR | --shape 1b]
        [--recipes R ..] [--tp 1 2] [--heads plain quantized] [--result-filename F]

Each peer lives in its own environment under ${TPLLAMA_PEERS:-~/.cache/tpllama-peers}, made by peers/setup_NAME.sh, and
is measured by peers/measure_NAME.py; one that is absent is skipped by name. tpllama is measured by latency.py: each
recipe of the precision, with and without --quantize-lm-head, on each placement of the threads (TP x threads a rank).

Within a round every contestant runs once, in fresh processes, one after another; the rounds follow each other, so that
what the machine does meanwhile hits all alike. A contestant that gave no figure in a round is out.

    prefill N   tokens of one prompt of N, by the seconds until its first new token
    decode xB   tokens of B texts that go on after prompts of --prompt-len, by the seconds of a step
    ratio       tpllama's best candidate to the peer's best recipe, in each round: median (lowest to highest). Best is
                the highest median; only candidates whose output head is quantized if the peer's is are compared
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peers.contest import Contestant, Ours, Peer
from peers.model import SHAPES, shared_model
from peers.ratios import OURS, Measurement, Sizes, ratios
from peers.table import details, table
from record import append, surroundings

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
    add("--timeout-s", type=float, default=900, help="of one contestant in one round, or of preparing it")
    add("--workers", type=Path, default=HERE / "peers", metavar="DIR", help="where the measure_NAME.py are")
    add("--latency", type=Path, default=HERE / "latency.py", metavar="FILE", help="what measures tpllama")
    add("--result-filename", type=Path, metavar="F", help="JSON lines are appended to it")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"found {text[:20]!r}, expected whole numbers from 1 to {1 << 20}")
    return int(text)


def work(arguments: argparse.Namespace) -> None:
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
    log = Log(arguments, {"skipped": skipped})
    sizes = Sizes(arguments.prefill, arguments.decode, arguments.prompt_len, arguments.new_tokens)
    found: list[Measurement] = []
    for precision in arguments.precisions:
        contestants: list[Contestant] = [*candidates(arguments, precision, model), *present]
        found += compare(contestants, precision, sizes, arguments.rounds, log)
    print("\nbest tokens per second; after a peer's, tpllama's ratio to it: median (lowest to highest round)")
    print("\n".join(table(found, arguments.precisions, sizes.workloads)))
    for name, reason in [*skipped.items(), *log.out.items()]:
        print(f"skipped {name}: {reason}")


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
    if arguments.result_filename and not arguments.result_filename.absolute().parent.is_dir():
        raise UserError(f"found --result-filename {arguments.result_filename}, expected a file in a directory there is")


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


class Log:
    """Prints what happens and, where a file is wanted, appends it as JSON lines."""

    def __init__(self, arguments: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.path: Path | None = arguments.result_filename
        same = ("threads", "rounds", "prompt_len", "new_tokens")
        model = str(arguments.model) if arguments.model else arguments.shape
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.facts = {"bench": "compare", "started": started, "model": model, **surroundings(), **facts}
        self.out: dict[str, str] = {}
        self.facts |= {name: getattr(arguments, name) for name in same}

    def write(self, what: str, **fields: Any) -> None:
        if self.path:
            append(self.path, {**self.facts, "what": what, **fields})

    def leaves(self, name: str, precision: str, reason: str) -> None:
        """A contestant is out at a precision."""
        self.out[f"{name} at {precision}"] = reason
        print(f"  {name} is out: {reason}", flush=True)
        self.write("out", precision=precision, contestant=name, error=reason)

    def measured(self, name: str, each: Measurement) -> None:
        speed = each.error or f"{each.tokens_per_s:.2f} token/s"
        who = name if each.peer == OURS or not each.recipe else f"{name}: {each.recipe}"
        print(f"  round {each.round}, {who}, {each.workload or 'no figure'}: {speed}", flush=True)
        shape = vars(each.workload) if each.workload else {}
        same = {"round": each.round, "peer": each.peer, "precision": each.precision, "recipe": each.recipe}
        self.write(
            "measurement", **same, head_quantized=each.head_quantized, **shape, tokens_per_s=each.tokens_per_s,
            error=each.error, fields=each.fields,
        )  # fmt: skip


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
    print("\n".join(details(found, precision, sizes.workloads)), flush=True)
    for workload in sizes.workloads:
        for ratio in ratios(found, precision, workload):
            log.write("ratio", precision=precision, **vars(workload), **vars(ratio))
    return found


def _stated(home: Path) -> str:
    ready = home / "ready"
    return ready.read_text().strip() if ready.exists() else f"not set up, run bench/peers/setup_{home.name}.sh"


if __name__ == "__main__":
    end(guarded("compare", lambda: work(parser().parse_args()), is_debug=False))
