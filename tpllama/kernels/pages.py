"""Weights of a CPU in huge pages, one after another in the order in which they are placed.

Each token reads all of them, and with pages of 2 MiB instead of 4 KiB a processor looks up fewer addresses: that is
worth a tenth to a quarter of the memory's bandwidth (bench/linears.py). Linux gives such pages on request, before
memory is written, so tensors are copied into it once.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor, nn

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20  # of addresses; memory is taken page by page
_ALIGNMENT = 64


def are_there() -> bool:
    """Whether this system gives huge pages on request."""
    return hasattr(mmap, "MADV_HUGEPAGE") and _SETTING.exists() and "[never]" not in _SETTING.read_text()


def new_memory(num_bytes: int) -> mmap.mmap:
    """Zeros, which take memory only where they are written: huge pages, where these are given."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if are_there():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WeightMemory:
    """Where one model's weights are placed, until its tensors are gone."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self.placed_bytes = 0
        self._placed: set[int] = set()  # where storages are that lie here already

    def place(self, module: nn.Module) -> nn.Module:
        """The module, with its tensors of host memory moved here."""
        if not are_there():
            return module
        for each in module.modules():
            for group in (each._parameters, each._buffers):
                for name, tensor in group.items():
                    if tensor is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
                        group[name] = self._moved(tensor)  # type: ignore[assignment]
        return module

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._placed:
            return tensor
        moved = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor)
        self._placed.add(moved.data_ptr())
        return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved

    def _take(self, size: int) -> Tensor:
        """So many bytes, a storage by themselves."""
        if self._chunk is None or self._used + size > len(self._chunk):
            whole = (-(-max(size, _CHUNK_BYTES) // _PAGE_BYTES) + 1) * _PAGE_BYTES  # one more: it may begin within one
            self._chunk = new_memory(whole)
            self._used = -ctypes.addressof(ctypes.c_char.from_buffer(self._chunk)) % _PAGE_BYTES
        start = self._used
        self.placed_bytes += size
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=start)
