"""Ranks that are threads of one process: real collectives, in lockstep, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadRanks:
    """One thread's part in a group. Each operation: everybody puts its value, all wait, everybody reads all."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(values)
        self._values = values
        self._barrier = barrier

    def sum(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(dim=0)

    def max(self, x: Tensor) -> Tensor:
        return self.gather(x).amax(dim=0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x.clone()))

    def broadcast(self, message: bytes | None) -> bytes:
        return self._exchange(message)[0]

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # nobody puts its next value before all have read this one
        return values


def on_ranks(size: int, work: Callable[[ThreadRanks], T], timeout_s: float = 30) -> list[T]:
    """What `work` returns on each of `size` ranks. A rank that fails ends the others; its error is the one raised."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=timeout_s)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, values, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
