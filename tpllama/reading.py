"""Reading weights in a stream: in blocks of rows, the next one in a thread, freed memory given back to the system."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tpllama.checkpoint.open import Checkpoint

# A tensor's name and a slice for each of its dimensions.
Job = tuple[str, tuple[slice, ...]]

# Rows are read and quantized in blocks of about so many elements. On the CPU conversions, several times their size,
# stay in its caches (1 << 21 is as quick, and leaves larger holes in the heap); a GPU wants fewer and larger steps.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
# Freed memory goes back to the system each time so many elements have been read: it costs page faults.
_GIVE_BACK_ELEMENTS = 1 << 27


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
        """One slice. The parts of quantized weights stay in their own dtype."""
        tensor = self._checkpoint.read(name, index)
        tensor = tensor.to(self._device, None if name in self._parts else self._dtype)
        is_checked = self._is_strict and self.bad is None and tensor.is_floating_point() and tensor.element_size() > 1
        if is_checked and not bool(tensor.isfinite().all()):
            self.bad = name
        return tensor

    def row_blocks(self, rows: slice, columns: int) -> list[slice]:
        """Rows in blocks of about _BLOCK_ELEMENTS, with borders at multiples of 256."""
        size = max(_BLOCK_ELEMENTS[self._device.type] // columns // 256, 1) * 256
        inner = range((rows.start // size + 1) * size, rows.stop, size)
        return [slice(*borders) for borders in itertools.pairwise((rows.start, *inner, rows.stop))]

    def jobs(self, name: str, index: tuple[slice, ...]) -> list[Job]:
        """A slice in blocks of rows."""
        rows, *columns = index
        width = columns[0].stop - columns[0].start if columns else 1
        return [(name, (block, *columns)) for block in self.row_blocks(rows, width)]


def read_ahead(read: Callable[[str, tuple[slice, ...]], Tensor], jobs: Iterable[Job]) -> Iterator[Tensor]:
    """What `read` gives for each job, in order; a thread reads the next one while the last is in use."""
    since_give_back = 0
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        current: Future[Tensor] | None = None
        for job in jobs:
            following = thread.submit(read, *job)
            if current is not None:
                yield current.result()
            current = following
            since_give_back += math.prod(part.stop - part.start for part in job[1])
            if since_give_back >= _GIVE_BACK_ELEMENTS:
                give_back_memory()
                since_give_back = 0
        if current is not None:
            yield current.result()
    give_back_memory()


def concatenated(blocks: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """One tensor of `shape`, of blocks of rows that come from top to bottom and aren't kept."""
    whole: Tensor | None = None
    top = 0
    for block in blocks:
        if tuple(block.shape) == shape:
            return block
        whole = block.new_empty(shape) if whole is None else whole
        whole[top : top + block.shape[0]] = block
        top += block.shape[0]
    assert whole is not None, "a tensor has at least one block"
    return whole


def give_back_memory() -> None:
    """Gives freed memory of the heap back to the system: glibc's would grow, as temporaries don't fit old holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
