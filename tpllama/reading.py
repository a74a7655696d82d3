"""Reading weights in a stream: in blocks of rows, the next pages fetched by a thread, freed memory given back."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tpllama.checkpoint.open import Checkpoint, names_of_parts
from tpllama.config import UserError

# A tensor's name and a slice for each of its dimensions.
Job = tuple[str, tuple[slice, ...]]
T = TypeVar("T")
# Jobs, and what their tensors are for.
Step = tuple[list[Job], T]

# Rows are read and quantized in blocks of about so many elements, as conversions take several times their size; a GPU
# wants fewer and larger steps.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
# Freed memory goes back to the system each time so much of it is held: aligned temporaries don't fit the holes of
# earlier ones, so the heap grows. More often costs page faults.
HELD_BYTES = 96 << 20
# glibc's numbers for mallopt, and the largest value that it takes for the first.
_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP = -3, 32 << 20
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 128 << 20


class BlockReader:
    """Reads slices of a checkpoint's plain tensors in one dtype onto one device.

    Before each block, freed memory goes back to the system if the process holds `held_bytes` more of it than at first;
    what weights take beside glibc's heap, `placed_bytes`, is none of it.
    bad: with `is_strict`, the first weight that was found to hold a value that is no finite number.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, is_strict: bool,
        held_bytes: int = HELD_BYTES, placed_bytes: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        keep_freed_memory()
        self._placed_bytes = placed_bytes
        self._most_idle = _idle_bytes() - placed_bytes() + held_bytes
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._is_strict = is_strict
        self._parts = names_of_parts(checkpoint.quantized)
        self.bad: str | None = None

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """One slice, copied and converted in blocks of rows. The parts of quantized weights stay in their own dtype.

        Whether values are numbers is checked, but for those parts: together they are (see `check`).
        """
        if name in self._parts:
            self._bound_memory()
            return self._checkpoint.read(name, index).to(self._device, copy=True)
        rows, *columns = index
        shape = [part.stop - part.start for part in index]
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        for block in self.row_blocks(rows, math.prod(shape[1:])):
            self._bound_memory()
            part = whole[block.start - rows.start : block.stop - rows.start]
            self.check(name, part.copy_(self._checkpoint.read(name, (block, *columns))))
        return whole

    def _bound_memory(self) -> None:
        if _idle_bytes() - self._placed_bytes() > self._most_idle:
            give_back_memory()

    def check(self, name: str, *tensors: Tensor) -> None:
        """With `is_strict`, notes the weight `name` as bad where one of its tensors holds a value that is no number."""
        if self._is_strict and self.bad is None and not all(_is_finite(tensor) for tensor in tensors):
            self.bad = name

    def row_blocks(self, rows: slice, columns: int) -> list[slice]:
        """Rows in blocks of about _BLOCK_ELEMENTS, with borders at multiples of 256."""
        size = max(_BLOCK_ELEMENTS[self._device.type] // max(columns, 1) // 256, 1) * 256
        inner = range((rows.start // size + 1) * size, rows.stop, size)
        return [slice(*borders) for borders in itertools.pairwise((rows.start, *inner, rows.stop))]


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and as NaN all bits set but the sign's
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def reading_ahead(checkpoint: Checkpoint, steps: Iterable[Step[T]]) -> Iterator[Step[T]]:
    """Each step, a list of jobs and what it is for, while a thread brings what the next one reads into memory.

    What the steps freed is given back to the system after the last.

    The thread copies nothing, and nobody waits for it: where all is in memory already it costs nearly nothing. An
    error there is dropped, as the read that follows meets it too.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        ahead: Future[None] | None = None
        current: Step[T] | None = None
        for following in itertools.chain(steps, [None]):
            # A thread that is behind skips a step: it must not fetch what was read already.
            if following is not None and (ahead is None or ahead.done()):
                ahead = thread.submit(_prefetch, checkpoint, following[0])
            if current is not None:
                yield current
            current = following
        give_back_memory()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _prefetch(checkpoint: Checkpoint, jobs: list[Job]) -> None:
    for name, index in jobs:
        checkpoint.prefetch(name, index)


_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """glibc's account of its heap, in bytes (mallinfo(3)). hblkhd and uordblks: in use, mapped apart and not."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def _idle_bytes() -> int:
    """Resident anonymous memory (proc_pid_statm(5)) that glibc's heap doesn't use; 0 where there is no such account."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    used = mallinfo2()
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE - int(used.uordblks) - int(used.hblkhd)


def keep_freed_memory() -> None:
    """Has glibc keep what a block's temporaries leave for those of the next, which would be faulted in anew.

    Its own thresholds, at which large pieces are mapped apart and the heap's top is given back, are below their size
    (mallopt(3)). `give_back_memory` does that at fewer times.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_memory() -> None:
    """Gives freed memory of the heap back to the system: glibc's would grow, as temporaries don't fit old holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def no_finite_number(name: str) -> UserError:
    """What is said of a tensor under --strict."""
    return UserError(
        f"found a value that is no finite number in tensor {name}, expected none under --strict, get an undamaged "
        f"checkpoint"
    )
