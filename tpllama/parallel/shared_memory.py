"""Collectives between the ranks of one host, through memory that they share.

A message lies in its sender's slot; a counter per rank says how many operations it has entered. An operation
copies its message in, counts up, waits for the others' counters and reads their slots in rank order, so that
all ranks compute the same bits. Two slots per rank alternate: a rank that enters operation n + 2 knows that
all have left operation n, so one wait per operation is enough.

The order of stores is that of the program on x86 (total store order); elsewhere gloo is used.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tpllama.parallel.collectives import RankLost

_SLOT_BYTES = 1 << 18
_COUNTER_STRIDE = 8  # int64 counters, one per cache line
# Waiting: spin while an answer may come within microseconds, then give way, then sleep.
_SPINS = 400
_YIELD_S = 0.005
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.0001, 0.002
_CHECK_EVERY_S = 0.05


def is_available(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of `group` can talk this way: all on one host, of a kind that keeps the order of stores."""
    can = hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
    mine = (can, socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text() if can else "")
    all_ranks = [mine] * group.size()
    dist.all_gather_object(all_ranks, mine, group=group)
    return can and all(each == mine for each in all_ranks)


class SharedMemoryRanks:
    """Ranks of one host. Constructed by all of them at once, over a group that can exchange objects."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        counters_bytes = self.size * _COUNTER_STRIDE * 8
        offset = -(-counters_bytes // 4096) * 4096
        memory = self._map(group, offset + self.size * 2 * _SLOT_BYTES)
        self._counters = memoryview(memory).cast("q")
        data = torch.frombuffer(memory, dtype=torch.uint8)[offset:]
        self._slots = data.view(self.size, 2, _SLOT_BYTES)
        self._operation = 0
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    def _map(self, group: dist.ProcessGroup, size: int) -> mmap.mmap:
        """The same nameless memory in every rank: nothing can be left over, however the run ends."""
        descriptor = -1
        if self.rank == 0:
            descriptor = os.memfd_create("tpllama")
            os.posix_fallocate(descriptor, 0, size)
        places: list[tuple[int, int, set[int]]] = [(0, 0, set())] * self.size
        dist.all_gather_object(places, (os.getpid(), descriptor, os.sched_getaffinity(0)), group=group)
        self._pids = [pid for pid, _, _ in places]
        # Spinning takes a core from the rank that is waited for, where there are more ranks than cores.
        self._spins = _SPINS if len(set().union(*(cores for _, _, cores in places))) >= self.size else 0
        leader_pid, leader_descriptor, _ = places[0]
        if self.rank != 0:
            descriptor = os.open(f"/proc/{leader_pid}/fd/{leader_descriptor}", os.O_RDWR)
        memory = mmap.mmap(descriptor, size)
        dist.barrier(group)
        os.close(descriptor)
        return memory

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.add)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.maximum)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _reduce(self, x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        flat = x.contiguous().view(-1)
        per_slot = _SLOT_BYTES // flat.element_size()
        for part in flat.split(per_slot):
            messages = self._exchange(part)
            combine(messages[0], messages[1], out=part)
            for message in messages[2:]:
                combine(part, message, out=part)
        return flat.view(x.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        gathered = torch.empty(self.size, flat.numel(), dtype=x.dtype)
        per_slot = _SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), per_slot):
            part = slice(start, start + per_slot)
            for row, message in zip(gathered, self._exchange(flat[part]), strict=True):
                row[part] = message
        return gathered.view(self.size, *x.shape)

    def broadcast(self, message: bytes | None) -> bytes:
        received, total = bytearray(), None
        framed = b"" if message is None else len(message).to_bytes(8, "little") + message
        while total is None or len(received) < total:
            if message is not None:
                part = framed[len(received) : len(received) + _SLOT_BYTES]
                self._own_slot()[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                received += part
            slots = self._enter()
            if message is None:
                if total is None:
                    total = 8 + int.from_bytes(slots[0, :8].numpy().tobytes(), "little")
                received += slots[0, : min(_SLOT_BYTES, total - len(received))].numpy().tobytes()
            total = total or len(framed)
        return bytes(received[8:])

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Every rank's `part`, as views that are valid until this rank's next operation."""
        count = part.numel() * part.element_size()
        self._own_slot()[:count].view(part.dtype).copy_(part)
        return list(self._enter()[:, :count].view(part.dtype))

    def _own_slot(self) -> Tensor:
        return self._slots[self.rank, (self._operation + 1) & 1]

    def _enter(self) -> Tensor:
        """Counts this rank in and waits for all others: their slots of this operation, [size, bytes]."""
        self._operation += 1
        counters, operation = self._counters, self._operation
        counters[self.rank * _COUNTER_STRIDE] = operation
        for other in self._others:
            place = other * _COUNTER_STRIDE
            spins = self._spins
            while counters[place] < operation and spins > 0:
                spins -= 1
            if counters[place] < operation:
                self._wait(other, place)
        return self._slots[:, operation & 1]

    def _wait(self, other: int, place: int) -> None:
        started = checked = time.monotonic()
        sleep_s = _SHORTEST_SLEEP_S
        while self._counters[place] < self._operation:
            now = time.monotonic()
            if now - started < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self._check_alive(other)

    def _check_alive(self, other: int) -> None:
        if not _is_alive(self._pids[other]):
            raise RankLost(f"rank {other} is gone")


def _is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, but whose parent has taken no note of it yet, does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")
