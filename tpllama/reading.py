"""Reading weights in a stream: in blocks of rows, the next pages fetched by a thread, freed memory given back."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tpllama.checkpoint.open import Checkpoint

# A tensor's name and a slice for each of its dimensions.
Job = tuple[str, tuple[slice, ...]]
# Jobs, and what is done with their tensors.
Step = tuple[list[Job], Any]

# Rows are read and quantized in blocks of about so many elements. On the CPU conversions, several times their size,
# stay in its caches (1 << 21 is as quick, and leaves larger holes in the heap); a GPU wants fewer and larger steps.
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
# Freed memory goes back to the system each time so many elements have been read: it costs page faults.
_GIVE_BACK_ELEMENTS = 1 << 26


class BlockReader:
    """Reads slices of a checkpoint's plain tensors in one dtype onto one device.

    bad: with `is_strict`, the first tensor that was found to hold a value that is no finite number.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, is_strict: bool) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._is_strict = is_strict
        self._parts = {part for weight in checkpoint.quantized.values() for part in weight.parts.values()}
        self.bad: str | None = None

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """One slice, copied and converted in blocks of rows. The parts of quantized weights stay in their own dtype."""
        if name in self._parts:
            return self._checked(name, self._checkpoint.read(name, index).to(self._device, copy=True))
        rows, *columns = index
        shape = [part.stop - part.start for part in index]
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        for block in self.row_blocks(rows, math.prod(shape[1:])):
            part = whole[block.start - rows.start : block.stop - rows.start]
            self._checked(name, part.copy_(self._checkpoint.read(name, (block, *columns))))
        return whole

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        is_checked = self._is_strict and self.bad is None and tensor.is_floating_point() and tensor.element_size() > 1
        if is_checked and not bool(tensor.isfinite().all()):
            self.bad = name
        return tensor

    def row_blocks(self, rows: slice, columns: int) -> list[slice]:
        """Rows in blocks of about _BLOCK_ELEMENTS, with borders at multiples of 256."""
        size = max(_BLOCK_ELEMENTS[self._device.type] // max(columns, 1) // 256, 1) * 256
        inner = range((rows.start // size + 1) * size, rows.stop, size)
        return [slice(*borders) for borders in itertools.pairwise((rows.start, *inner, rows.stop))]


def reading_ahead(checkpoint: Checkpoint, steps: Iterable[Step]) -> Iterator[Step]:
    """Each step, a list of jobs and what it is for, while a thread brings what the next one reads into memory.

    The thread copies nothing, and nobody waits for it: where all is in memory already it costs nearly nothing. Freed
    memory is given back to the system on the way.
    """
    since_give_back = 0
    ahead: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        current: Step | None = None
        for following in itertools.chain(steps, [None]):
            # A thread that is behind skips a step: it must not fetch what was read already.
            if following is not None and (ahead is None or ahead.done()):
                ahead = thread.submit(_prefetch, checkpoint, following[0])
            if current is not None:
                yield current
                since_give_back += sum(math.prod(part.stop - part.start for part in index) for _, index in current[0])
                if since_give_back >= _GIVE_BACK_ELEMENTS:
                    give_back_memory()
                    since_give_back = 0
            current = following
    give_back_memory()


def _prefetch(checkpoint: Checkpoint, jobs: list[Job]) -> None:
    for name, index in jobs:
        checkpoint.prefetch(name, index)


def give_back_memory() -> None:
    """Gives freed memory of the heap back to the system: glibc's would grow, as temporaries don't fit old holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
