"""Our C++ on Intel's AMX (tiles.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tpllama.native import library


def with_tiles(name: str) -> ctypes.CDLL | str:
    """A file of this folder, compiled, or why it can't run here. Asks the system for AMX, for the whole process."""
    compiled = library(Path(__file__).with_name(name))
    if isinstance(compiled, str):
        return compiled
    compiled.why_not.restype = ctypes.c_char_p
    reason = compiled.why_not()
    return compiled if reason is None else str(reason.decode())
