"""What a function asks of our own C++ is recorded once and asked again, on the same memory, without its Python.

A decode step of one text makes some 150 calls of a few microseconds each, and what Python does between them takes
longer than all attention. The calls of a step of so many tokens are always the same, but for what a few tensors hold.
So they are made again by replay.cpp, by all threads together.

A C function that can be recorded takes the address of a structure, what is asked of it, and that of a `Team` (team.h).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpllama.native import library

_aten = torch.ops.aten
# They say where memory lies, and compute nothing.
_NEW = frozenset({_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default})
_VIEWS = frozenset({_aten.split_with_sizes.default, _aten.view.default, _aten.detach.default})
_LEAST_BYTES = 4096
_DONE = -1  # what a C function returns, unless it is to be called again


def fields(sizes: str, pointers: str, reals: str = "") -> tuple[tuple[str, Any], ...]:
    """Of a C structure that has sizes, then pointers, then floats."""
    kinds = (ctypes.c_ssize_t, sizes), (ctypes.c_void_p, pointers), (ctypes.c_float, reals)
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class _Team(ctypes.Structure):
    """`Team` of team.h."""

    _fields_ = fields("size rank turn shares", "arrivals taken")


class _Call(ctypes.Structure):
    """`Call` of replay.cpp."""

    _fields_ = fields("is_by_one", "function arguments")


class Waiter(Protocol):
    """Who looks after a call that waits for other ranks, and ends early now and then, to be made again."""

    def check(self, rank: int) -> None:
        """Raises an exception if that rank, which is late, won't come."""

    def give_up(self) -> None:
        """The call won't be made again."""


class Call(NamedTuple):
    """One call of a C function."""

    function: Any
    arguments: ctypes.Structure
    waiter: Waiter | None = None

    def __call__(self) -> None:
        address, team = ctypes.addressof(self.arguments), _alone(torch.get_num_threads())
        if (waiter := self.waiter) is None:
            self.function(address, team)
            return
        try:
            while (late := self.function(address, team)) != _DONE:
                waiter.check(late)
        except BaseException:
            waiter.give_up()
            raise


class Memory:
    """Memory of recordings that are never replayed at the same time, for tensors that live one after another.

    What is free when a tensor is made is so in each replay, too: calls are made in the order in which they were.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.bytes = 0

    def like(self, x: Tensor) -> Tensor:
        """A tensor like x, without gaps, in memory that is free again when it, and all views of it, are gone."""
        size = max(_LEAST_BYTES, 1 << max(x.nbytes - 1, 0).bit_length())
        if not self._free[size]:
            self.bytes += size
        block = self._free[size].pop() if self._free[size] else torch.empty(size, dtype=torch.uint8).numpy()
        lent = block[: x.nbytes]
        weakref.finalize(lent, self._free[size].append, block)
        return torch.from_numpy(lent).view(x.dtype).view(x.shape)


class Recording(TorchDispatchMode):
    """Calls in their order, of C and of Python, with the tensors that they make in `memory`.

    obstacle: what was computed that a replay would leave out, if so. It is no error: all was computed, once, and in
    step with other ranks, whose recordings may be whole.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call | Callable[[], object]] = []
        self.memory = memory
        self.obstacle: str | None = None
        self._steps: list[Callable[[], object]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _NEW:
            return self.memory.like(result)
        if function not in _VIEWS:
            self.obstacle = str(function)
        return result

    def finish(self) -> None:
        """Calls of C that follow each other become one."""
        together: list[Call] = []
        for call in (*self.calls, None):
            if isinstance(call, Call):
                together.append(call)
                continue
            if together:
                self._steps.append(_Program(together).run)
                together = []
            if call is not None:
                self._steps.append(call)

    def replay(self) -> None:
        for step in self._steps:
            step()


class _Program:
    """Calls of C, made by all threads of this process together."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._held = tuple(calls)
        self._waiters = [call.waiter for call in calls if call.waiter is not None]
        self._calls = (_Call * len(calls))()
        for made, call in zip(self._calls, calls, strict=True):
            made.is_by_one = call.waiter is not None
            made.function = ctypes.cast(call.function, ctypes.c_void_p).value
            made.arguments = ctypes.addressof(call.arguments)

    def run(self) -> None:
        count, at, late = len(self._held), 0, ctypes.c_ssize_t()
        calls, threads, address = ctypes.addressof(self._calls), torch.get_num_threads(), ctypes.addressof(late)
        try:
            while (at := _replay()(calls, at, count, threads, address)) < count:
                if (waiter := self._held[at].waiter) is not None:
                    waiter.check(late.value)
        except BaseException:
            for waiter in self._waiters:
                waiter.give_up()
            raise


@functools.cache
def _replay() -> Any:
    compiled = library(Path(__file__).with_name("replay.cpp"))
    assert isinstance(compiled, ctypes.CDLL)
    compiled.replay.argtypes = (ctypes.c_void_p, *(ctypes.c_ssize_t,) * 3, ctypes.c_void_p)
    compiled.replay.restype = ctypes.c_ssize_t
    return compiled.replay


@functools.cache
def _held_team(threads: int) -> _Team:
    return _Team(threads, -1)


def _alone(threads: int) -> int:
    """The address of a team of which one thread makes calls."""
    return ctypes.addressof(_held_team(threads))


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(memory: Memory) -> Iterator[Recording]:
    """Records what is called in the block."""
    made = Recording(memory)
    token = _current.set(made)
    try:
        with made:
            yield made
    finally:
        _current.reset(token)
    made.finish()


def callable_in(compiled: ctypes.CDLL, *names: str) -> None:
    """Has functions of a library be called with addresses of their structure and of a team."""
    for name in names:
        function = getattr(compiled, name)
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_ssize_t


def call(function: Any, arguments: ctypes.Structure, waiter: Waiter | None = None) -> None:
    """Calls a C function now and, if this is recorded, whenever it is replayed."""
    made = Call(function, arguments, waiter)
    made()
    if (current := _current.get()) is not None:
        current.calls.append(made)


def in_place(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), which computes in place: a sum over ranks. Where it doesn't, it is an obstacle to recordings."""
    current = _current.get()
    before = 0 if current is None else len(current.calls)
    result = function(x)
    if current is not None:
        if result is not x:
            current.obstacle = "a result that lies elsewhere each time"
        if len(current.calls) == before:  # else it was recorded as it was called
            current.calls.append(partial(function, x))
    return result
