"""What every line of bench/results says of when, on what and with what it was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpllama.config import UserError


def append(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Adds one JSON line."""
    with Path(path).open("a") as file:
        file.write(json.dumps(fields) + "\n")


def check_writable(path: str | Path | None) -> None:
    """Raises UserError, before any work, where results could not be written."""
    if path is None:
        return
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise UserError(
            f"found {path} unwritable ({error.strerror}), expected a file that can be appended to, name another"
        ) from None


def surroundings() -> dict[str, Any]:
    """Date, machine and versions."""
    cores = len(os.sched_getaffinity(0))
    return {"date": date.today().isoformat(), "cpu": cpu_model(), "cores": cores, "versions": versions()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "torchao", "safetensors")}


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
