"""What a function asks of our own C++ is recorded once and asked again, on the same memory, without its Python.

A decode step of one text makes some 150 calls of a few microseconds each, and what Python does between them takes
longer than all attention. The calls of a step of so many tokens are always the same, but for what a few tensors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# They say where memory lies, and compute nothing.
_WITHOUT_WORK = frozenset({
    _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.split_with_sizes.default,
    _aten.view.default, _aten.detach.default,
})  # fmt: skip


class Unrecordable(Exception):
    """Something was computed that a recording would leave out."""


class Recording(TorchDispatchMode):
    """Calls in their order, and the tensors that they are about."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.held: list[object] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is _aten.add_.Tensor:
            self.calls.append(partial(function, *args))
        elif function in _WITHOUT_WORK:
            self.held.append(result)
        else:
            raise Unrecordable(f"{function} is not recorded")
        return result

    def replay(self) -> None:
        for call in self.calls:
            call()


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what is called in the block. Raises Unrecordable, there, for what can't be."""
    made = Recording()
    token = _current.set(made)
    try:
        with made:
            yield made
    finally:
        _current.reset(token)


def call(function: Any, *arguments: Any) -> None:
    """Calls a C function with `argtypes`, whose arguments are numbers and addresses."""
    function(*arguments)
    if (current := _current.get()) is not None:
        converted = (kind(argument) for kind, argument in zip(function.argtypes, arguments, strict=True))
        current.calls.append(partial(function, *converted))


def in_place(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), which computes in place: a sum over ranks. Raises Unrecordable where it didn't."""
    result = function(x)
    if (current := _current.get()) is not None:
        if result is not x:
            raise Unrecordable("a result lies elsewhere each time")
        current.calls.append(partial(function, x))
    return result
