"""A comparison's JSON lines: written while it runs, and read back to print its tables again."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.ratios import OURS, Measurement, Results, Workload
from record import append, surroundings

from tpllama.config import UserError


class Log:
    """Prints what happens and, where a file is wanted, appends it as JSON lines."""

    def __init__(self, arguments: argparse.Namespace, skipped: dict[str, str]) -> None:
        self.path: Path | None = arguments.result_filename
        same = ("threads", "rounds", "prompt_len", "new_tokens")
        model = str(arguments.model) if arguments.model else arguments.shape
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.facts = {"bench": "compare", "started": started, "model": model, **surroundings(), "skipped": skipped}
        self.facts |= {name: getattr(arguments, name) for name in same}
        self.out: dict[str, str] = {}

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


@dataclass(frozen=True)
class Run:
    """What the lines of a run say. facts: those of every line. out: who didn't take part or not to the end, and why."""

    facts: dict[str, Any]
    results: Results
    out: dict[str, str]

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(each.precision for each in self.results.found))

    @property
    def workloads(self) -> list[Workload]:
        return list(dict.fromkeys(each.workload for each in self.results.found if each.workload))


def saved_run(path: Path, started: str | None) -> Run:
    """The run that started then, or the last one. Raises UserError where there is none."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        records = [record for line in lines if _is_ours(record := json.loads(line))]
    except (OSError, ValueError) as error:  # among the latter: no text, no JSON
        raise UserError(f"found --from {path} unreadable ({error}), expected compare's JSON lines") from None
    times = list(dict.fromkeys(record["started"] for record in records))
    if not times or started not in (None, *times):
        found = f"runs of {', '.join(times)}" if times else "no run"
        raise UserError(f"found {found} in {path}, expected {started or 'one of compare'}, see --started")
    return _run([record for record in records if record["started"] == (started or times[-1])])


def _is_ours(record: Any) -> bool:
    return isinstance(record, dict) and record.get("bench") == "compare"


def _run(records: Iterable[dict[str, Any]]) -> Run:
    found, out, facts = [], {}, {}
    for record in records:
        facts = record
        if record["what"] == "out":
            out[f"{record['contestant']} at {record['precision']}"] = record["error"]
        elif record["what"] == "measurement":
            workload = Workload(record["kind"], record["batch"], record["length"]) if "kind" in record else None
            same = (record[name] for name in ("round", "peer", "precision", "recipe", "head_quantized"))
            found.append(Measurement(*same, workload, record["tokens_per_s"], record["fields"]))
    return Run(facts, Results(found, facts["rounds"]), facts["skipped"] | out)
