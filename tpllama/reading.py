"""Reading weights in a stream: in blocks of rows, the next pages fetched by a thread, freed memory given back."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tpllama.checkpoint.open import Checkpoint
from tpllama.config import UserError

# A tensor's name and a slice for each of its dimensions.
Job = tuple[str, tuple[slice, ...]]
T = TypeVar("T")
# Jobs, and what their tensors are for.
Step = tuple[list[Job], T]

# Rows are read and quantized in blocks of about so many elements, as conversions take several times their size; a GPU
# wants fewer and larger steps.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
# Freed memory goes back to the system each time so many elements have been read: aligned temporaries don't fit the
# holes of earlier ones, so the heap grows. More often costs page faults.
GIVE_BACK_ELEMENTS = 1 << 28
# glibc's numbers for mallopt, and the largest value that it takes for the first.
_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP = -3, 32 << 20
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 128 << 20


class BlockReader:
    """Reads slices of a checkpoint's plain tensors in one dtype onto one device.

    bad: with `is_strict`, the first weight that was found to hold a value that is no finite number.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, is_strict: bool) -> None:
        keep_freed_memory()
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._is_strict = is_strict
        self._parts = {part for weight in checkpoint.quantized.values() for part in weight.parts.values()}
        self.bad: str | None = None

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """One slice, copied and converted in blocks of rows. The parts of quantized weights stay in their own dtype.

        Whether values are numbers is checked, but for those parts: together they are (see `check`).
        """
        if name in self._parts:
            return self._checkpoint.read(name, index).to(self._device, copy=True)
        rows, *columns = index
        shape = [part.stop - part.start for part in index]
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        for block in self.row_blocks(rows, math.prod(shape[1:])):
            part = whole[block.start - rows.start : block.stop - rows.start]
            self.check(name, part.copy_(self._checkpoint.read(name, (block, *columns))))
        return whole

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


def reading_ahead(
    checkpoint: Checkpoint, steps: Iterable[Step[T]], give_back_elements: int = GIVE_BACK_ELEMENTS
) -> Iterator[Step[T]]:
    """Each step, a list of jobs and what it is for, while a thread brings what the next one reads into memory.

    The thread copies nothing, and nobody waits for it: where all is in memory already it costs nearly nothing. An
    error there is dropped, as the read that follows meets it too.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        ahead: Future[None] | None = None
        current: Step[T] | None = None
        for following in itertools.chain(_giving_back(steps, give_back_elements), [None]):
            # A thread that is behind skips a step: it must not fetch what was read already.
            if following is not None and (ahead is None or ahead.done()):
                ahead = thread.submit(_prefetch, checkpoint, following[0])
            if current is not None:
                yield current
            current = following
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _giving_back(steps: Iterable[Step[T]], every: int) -> Iterator[Step[T]]:
    """The steps; after every so many elements, and at the end, memory that was freed goes back to the system."""
    since = 0
    for step in steps:
        since += sum(math.prod(part.stop - part.start for part in index) for _, index in step[0])
        if since >= every:
            give_back_memory()
            since = 0
        yield step
    give_back_memory()


def _prefetch(checkpoint: Checkpoint, jobs: list[Job]) -> None:
    for name, index in jobs:
        checkpoint.prefetch(name, index)


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
