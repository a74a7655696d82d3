"""The lines of a bench that a chart is made of: read, chosen, and refused where it would mix what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpllama.config import UserError

Record = dict[str, Any]

PANEL = ("batch_size", "input_len", "output_len")
# Words and whole numbers in latency's lines that are no settings of the measurement, or that its chart tells apart.
NO_SETTINGS = {
    "bench", "date", "error", "note", "repetitions", "prefill_steps", "decode_steps", "torchao_config",
    "quantize_lm_head", "tp", *PANEL,
}  # fmt: skip


def read(path: Path, bench: str, run_name: str, where: Sequence[str]) -> list[Record]:
    """The bench's and run's records that have these values."""
    wanted = {"bench": bench, "run_name": run_name} | dict(map(_condition, where))
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"found no readable {path} ({error.strerror}), expected the results of a bench") from None
    except UnicodeDecodeError:
        raise UserError(f"found no text in {path}, expected the results of a bench") from None
    records = [record for line in lines if line.strip() and _fits(record := _parse(line, path), wanted)]
    if not records:
        conditions = " ".join(f"{field}={value}" for field, value in wanted.items())
        raise UserError(f"found nothing with {conditions} in {path}, expected at least one line")
    return records


def _parse(line: str, path: Path) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"found {line[:40]!r} in {path}, expected a JSON object on each line")
    return record


def _condition(text: str) -> tuple[str, str]:
    field, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"found --where {text!r}, expected FIELD=VALUE, as in model=1b")
    return field, value


def _fits(record: Record, wanted: dict[str, str]) -> bool:
    return all(str(record.get(field)) == value for field, value in wanted.items())


def distinct(records: Iterable[Record], *fields: str) -> list[tuple[Any, ...]]:
    """Each combination of values once, in the order of the file."""
    return list(dict.fromkeys(tuple(record.get(field) for field in fields) for record in records))


def check_same(records: list[Record], fields: Iterable[str]) -> None:
    """Raises UserError for what a chart can't have two of."""
    for field in fields:
        if len(values := distinct(records, field)) > 1:
            found = ", ".join(str(value) for (value,) in values)
            raise UserError(f"found several values of {field}, {found}, expected one, choose by --where {field}=...")


def check_settings(records: list[Record]) -> None:
    """The same, for all that latency's lines say of how they were measured: what isn't a figure or a list of them.

    Numbers, such as a rank's threads or a step's tokens, may follow from the shape of request and the number of ranks.
    """
    pairs = [(name, value) for record in records for name, value in record.items() if name not in NO_SETTINGS]
    check_same(records, dict.fromkeys(name for name, value in pairs if isinstance(value, (str, bool))))
    numbers = dict.fromkeys(name for name, value in pairs if isinstance(value, int))
    for place in distinct(records, "tp", *PANEL):
        check_same([record for record in records if distinct([record], "tp", *PANEL) == [place]], numbers)
