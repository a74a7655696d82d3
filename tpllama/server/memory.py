"""Memory that a model leaves behind, back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back_memory() -> None:
    """Frees what is in cycles, and has the C library return what is free, where it is one that keeps it (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
