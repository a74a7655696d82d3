"""Sums of small tensors over the GPUs of one host in one kernel, through memory that all of them see.

NCCL takes some 20 us for what fits into a decode step's message; here each GPU copies its summand to where the others
read, waits for theirs and adds all in rank order: the same bits on each. Everything else is NCCL's. A recorded step
(engine/graphs.py) may hold these sums, which only launch.

Not run on GPUs yet: bench/gpu.sh runs tests/test_gpu.py, which needs two for this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpllama.parallel.collectives import ProcessGroupRanks

# Up to here one shot beats a ring; both dtypes that torch's kernel adds have whole vectors of 16 bytes.
_MOST_BYTES = 256 << 10
_VECTOR_BYTES = 16
_DTYPES = (torch.bfloat16, torch.float32)
_CAPABILITY = (9, 0)


class SymmetricMemoryRanks:
    """Ranks on the GPUs of one host, over `others` for what isn't a small sum. Constructed by all of them at once."""

    def __init__(self, others: ProcessGroupRanks, buffers: dict[torch.dtype, Tensor]) -> None:
        self._others = others
        self._buffers = buffers
        self._group_name = others.group.group_name
        self.rank = others.rank
        self.size = others.size

    def sum(self, x: Tensor) -> Tensor:
        if not takes(x):
            return self._others.sum(x)
        x = x.contiguous()
        buffer = self._buffers[x.dtype].narrow(0, 0, x.numel())
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.view(-1), "sum", self._group_name).view(x.shape)

    def max(self, x: Tensor) -> Tensor:
        return self._others.max(x)

    def gather(self, x: Tensor) -> Tensor:
        return self._others.gather(x)

    def broadcast(self, message: bytes | None) -> bytes:
        return self._others.broadcast(message)

    def break_off(self) -> None:
        self._others.break_off()


def takes(x: Tensor) -> bool:
    """Whether the kernel adds such tensors: few bytes, in whole vectors from where they begin."""
    num_bytes = x.numel() * x.element_size()
    begins = int(x.storage_offset()) * x.element_size() if x.is_contiguous() else 0  # else it will be copied
    is_whole = num_bytes % _VECTOR_BYTES == begins % _VECTOR_BYTES == 0
    return x.dtype in _DTYPES and 0 < num_bytes <= _MOST_BYTES and is_whole


def fastest(nccl: ProcessGroupRanks, is_one_host: bool) -> ProcessGroupRanks | SymmetricMemoryRanks:
    """Ranks with symmetric memory, where all of them can have it; NCCL's otherwise. Called by all at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    can = torch.tensor([int(is_one_host and _sees_others(device, nccl.size))], device=device)
    if int(nccl.max(1 - can)):  # one can't
        return nccl
    try:
        buffers = {dtype: _shared(dtype, device, nccl.group) for dtype in _DTYPES}
        failed = 0
    except RuntimeError:  # no driver for it, or a sandbox forbids it
        buffers, failed = {}, 1
    return nccl if int(nccl.max(torch.tensor([failed], device=device))) else SymmetricMemoryRanks(nccl, buffers)


def _sees_others(device: torch.device, size: int) -> bool:
    """Whether this GPU can read what the ranks of its host have on theirs."""
    is_able = torch.cuda.get_device_capability(device) >= _CAPABILITY and size <= torch.cuda.device_count()
    others = (other for other in range(size) if other != device.index)
    return is_able and all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _shared(dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    from torch.distributed import _symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(_MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
    symmetric_memory.rendezvous(buffer, group)
    return buffer
