"""Collectives between the ranks of one host, through memory that they share.

A message lies in its sender's slot; a counter per rank says how many operations it has entered. An operation
copies its message in, counts up, waits for the others' counters and reads their slots in rank order, so that
all ranks compute the same bits. Two slots per rank alternate: a rank that enters operation n + 2 knows that
all have left operation n, so one wait per operation is enough.

shared_memory.cpp does all this in one call. Where it can't be compiled, the same is done in Python, with the same
bits, on processors that keep the order of stores (x86 does: total store order); elsewhere gloo is used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tpllama.native import library
from tpllama.parallel.collectives import RankLost
from tpllama.recording import call, callable_in, fields

_SOURCE = Path(__file__).with_suffix(".cpp")
_SLOT_BYTES = 1 << 18
_COUNTER_STRIDE = 8  # int64 counters, one per cache line
_FLAG = 1  # behind a rank's counter, in its cache line: not 0 once it has broken off
# Waiting: spin while an answer may come within microseconds, then give way, then sleep.
_SPINS, _NATIVE_SPINS = 400, 1000
_YIELD_S = 0.005
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.0001, 0.002
_CHECK_EVERY_S = 0.05
# What shared_memory.cpp adds and compares, in its order. The rest is left to torch.
_NATIVE_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip


class _State(ctypes.Structure):
    """`State` of shared_memory.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "size", "slot_bytes", "spins")),
        *((name, ctypes.c_void_p) for name in ("counters", "slots")),
        *((name, ctypes.c_int64) for name in ("operation", "done", "entered", "late")),
    )
    operation: int


class _Message(ctypes.Structure):
    """`Message` of shared_memory.cpp."""

    _fields_ = fields("bytes kind is_max", "state x out")


def is_available() -> bool:
    """Whether this process can talk this way to others on its host: stores keep their order, or C++ minds it."""
    return hasattr(os, "memfd_create") and (platform.machine() in ("x86_64", "AMD64") or _native() is not None)


def _native() -> ctypes.CDLL | None:
    """shared_memory.cpp, if this rank can have it."""
    native = library(_SOURCE)
    if isinstance(native, str):
        return None
    callable_in(native, "reduce", "gather", "exchange")
    return native


class SharedMemoryRanks:
    """Ranks of one host. Constructed by all of them at once, over a group that can exchange objects.

    Without `allow_native` on any of them, all do without C++.
    """

    def __init__(self, group: dist.ProcessGroup, allow_native: bool = True) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._native = _native() if allow_native else None
        offset = -(-(self.size + 1) * _COUNTER_STRIDE * 8 // 4096) * 4096  # C++ counts sleepers too
        memory = self._map(group, offset + self.size * 2 * _SLOT_BYTES)
        self._counters = memoryview(memory).cast("q")
        data = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = data[offset:].view(self.size, 2, _SLOT_BYTES)
        numbers = (self.rank, self.size, _SLOT_BYTES, _NATIVE_SPINS if self._spins else 0)
        self._state = _State(*numbers, data.data_ptr(), self._slots.data_ptr(), 0, 0, 0, -1)
        self._state_at = ctypes.addressof(self._state)
        self._reduce_in_graph = self._operator()
        self._kinds = {dtype: kind for kind, dtype in enumerate(_NATIVE_DTYPES)} if self._native else {}

    def _map(self, group: dist.ProcessGroup, size: int) -> mmap.mmap:
        """The same nameless memory in every rank: nothing can be left over, however the run ends."""
        descriptor = -1
        if self.rank == 0:
            descriptor = os.memfd_create("tpllama")
            os.posix_fallocate(descriptor, 0, size)
        mine = (os.getpid(), descriptor, os.sched_getaffinity(0), self._native is not None)
        places = [mine] * self.size
        dist.all_gather_object(places, mine, group=group)
        self._pids = [pid for pid, *_ in places]
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
        # Spinning takes a core from the rank that is waited for, where there are more ranks than cores.
        self._spins = _SPINS if len(set().union(*(cores for _, _, cores, _ in places))) >= self.size else 0
        if not all(is_native for *_, is_native in places):
            self._native = None
        leader_pid, leader_descriptor, *_ = places[0]
        if self.rank != 0:
            descriptor = os.open(f"/proc/{leader_pid}/fd/{leader_descriptor}", os.O_RDWR)
        memory = mmap.mmap(descriptor, size)
        dist.barrier(group)
        os.close(descriptor)
        return memory

    def _operator(self) -> Callable[[Tensor, bool], None]:
        """`_reduce` as one node of a compiled graph, which would end at a function that isn't compiled."""
        # The first free name: the compiler's cache on disk finds it again.
        name = next(name for n in count() if not hasattr(torch.ops.tpllama, name := f"reduce_{n}"))
        this = weakref.proxy(self)
        self._library = torch.library.Library("tpllama", "FRAGMENT")
        self._library.define(f"{name}(Tensor(a!) x, bool is_max) -> ()")

        def reduce(x: Tensor, is_max: bool) -> None:
            this._reduce(x, torch.maximum if is_max else torch.add)

        self._library.impl(name, reduce, "CPU")
        self._library.impl(name, lambda x, is_max: None, "Meta")
        return getattr(torch.ops.tpllama, name).default

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.add)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, torch.maximum)

    def _reduce(self, x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        x = x.contiguous()
        if torch.compiler.is_compiling():
            self._reduce_in_graph(x, combine is torch.maximum)
            return x
        kind = self._kinds.get(x.dtype)
        if kind is None or self._native is None:
            return self._reduce_by_torch(x, combine)
        asked = _Message(x.nbytes, kind, combine is torch.maximum, self._state_at, x.data_ptr())
        call(self._native.reduce, asked, waiter=self)
        return x

    def _reduce_by_torch(self, x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        flat = x.view(-1)
        for part in flat.split(_SLOT_BYTES // flat.element_size()):
            messages = self._exchange(part)
            combine(messages[0], messages[1], out=part)
            for message in messages[2:]:
                combine(part, message, out=part)
        return x

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype)
        if self._native is not None:
            asked = _Message(x.nbytes, 0, 0, self._state_at, x.data_ptr(), gathered.data_ptr())
            call(self._native.gather, asked, waiter=self)
            return gathered
        per_slot = _SLOT_BYTES // x.element_size()
        parts = gathered.view(self.size, x.numel()).split(per_slot, dim=1)
        for mine, part in zip(x.view(-1).split(per_slot), parts, strict=True):
            for row, message in zip(part, self._exchange(mine), strict=True):
                row.copy_(message)
        return gathered

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
        size = part.nbytes
        self._own_slot()[:size].view(part.dtype).copy_(part)
        return list(self._enter()[:, :size].view(part.dtype))

    def _own_slot(self) -> Tensor:
        return self._slots[self.rank, (self._state.operation + 1) & 1]

    def _enter(self) -> Tensor:
        """Counts this rank in and waits for all others: their slots of this operation, [size, bytes]."""
        if self._native is not None:
            call(self._native.exchange, _Message(0, 0, 0, self._state_at), waiter=self)
            return self._slots[:, self._state.operation & 1]
        self._state.operation += 1
        counters, operation = self._counters, self._state.operation
        counters[self.rank * _COUNTER_STRIDE] = operation
        for other in range(self.size):
            place, spins = other * _COUNTER_STRIDE, self._spins
            while counters[place] < operation and spins > 0:
                spins -= 1
            if counters[place] < operation:
                self._wait(other, place, operation)
        return self._slots[:, operation & 1]

    def _wait(self, other: int, place: int, operation: int) -> None:
        started = checked = time.monotonic()
        sleep_s = _SHORTEST_SLEEP_S
        while self._counters[place] < operation:
            now = time.monotonic()
            if now - started < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self.check(other)

    def break_off(self) -> None:
        """Has the others end with an error where they wait for this rank, whose process may go on without them."""
        self._counters[self.rank * _COUNTER_STRIDE + _FLAG] = 1

    def give_up(self) -> None:
        """A call of C was broken off: the next one begins anew."""
        self._state.done, self._state.entered, self._state.late = 0, 0, -1

    def check(self, rank: int) -> None:
        """Raises RankLost for a process that is gone, or has ended, but its parent has taken no note of it yet."""
        if self._counters[rank * _COUNTER_STRIDE + _FLAG]:
            raise RankLost(f"{self._names[rank]} broke off")
        try:
            state = Path(f"/proc/{self._pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "X"
        if state in ("X", "Z"):
            raise RankLost(f"{self._names[rank]} is gone")
