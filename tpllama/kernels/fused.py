"""What a decoder layer computes beside its linears, in our own C++ (fused.cpp): a few calls for dozens of operations.

For bfloat16 on the CPU. Results are those of the model's plain modules but for the order of float32 sums and the last
bit of exp, and the same for a row whatever is beside it.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tpllama.native import library
from tpllama.recording import call, callable_in, fields

INTEGERS = "q"  # int64, as `array` calls it
Spans = list[tuple[int, int]]


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled functions, or why there are none."""
    compiled = library(Path(__file__).with_name("fused.cpp"))
    if isinstance(compiled, str):
        return compiled
    callable_in(compiled, "rms_norm", "gated", "attend", "add")
    return compiled


class _RmsNorm(ctypes.Structure):
    """`RmsNormCall` of fused.cpp."""

    _fields_ = fields("level rows columns", "x weight delta y", "eps")


class _Gated(ctypes.Structure):
    """`GatedCall` of fused.cpp."""

    _fields_ = fields("level rows columns gate_stride up_stride", "gate up y")


class _Add(ctypes.Structure):
    """`AddCall` of fused.cpp."""

    _fields_ = fields("level rows columns", "x y")


class _Attend(ctypes.Structure):
    """`AttendCall` of fused.cpp."""

    _fields_ = fields(
        "level heads kv_heads dim q_stride k_stride v_stride", "step q k v cos sin keys values out", "scale"
    )


@functools.cache
def _compiled() -> ctypes.CDLL:
    compiled = _native()
    assert isinstance(compiled, ctypes.CDLL)
    return compiled


@functools.cache
def _level() -> int:
    return int(_compiled().level())


def is_available() -> bool:
    """Whether this machine could compile them."""
    return not isinstance(_native(), str)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """The norm of x [n, features]. With `delta`, that of x + delta, which `delta` holds then."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    added = None if delta is None else delta.data_ptr()
    asked = _RmsNorm(_level(), *x.shape, x.data_ptr(), weight.data_ptr(), added, y.data_ptr(), eps)
    call(_compiled().rms_norm, asked)
    return y


def add(y: Tensor, x: Tensor) -> Tensor:
    """y += x, of [n, features] each without gaps."""
    call(_compiled().add, _Add(_level(), *y.shape, x.data_ptr(), y.data_ptr()))
    return y


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of [n, features] each, whose rows may lie apart."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    strides, addresses = (gate.stride(0), up.stride(0)), (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    call(_compiled().gated, _Gated(_level(), *gate.shape, *strides, *addresses))
    return y


class _Step(ctypes.Structure):
    """`Step` of fused.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p if name in ("slots", "rows", "lengths", "ends", "runs") else ctypes.c_ssize_t)
        for name in ("tokens", "slots", "texts", "rows", "lengths", "ends", "runs")
    )


def flattened(places: Iterable[Spans]) -> tuple[array[int], array[int], array[int]]:
    """Of sequences that lie in spans (first slot, number of slots): their lengths, where each one's spans end, and all
    spans behind each other, as the C++ reads them."""
    lengths, ends, runs = array(INTEGERS), array(INTEGERS), array(INTEGERS)
    for spans in places:
        lengths.append(sum(size for _, size in spans))
        for span in spans:
            runs.extend(span)
        ends.append(len(runs) // 2)
    return lengths, ends, runs


class Step:
    """A step's tokens and texts, made once for all layers.

    slots int64 [tokens]: of each token's keys and values. texts: tokens that look at all of their sequence: the row of
    the step, and (first slot, number of slots) of where the sequence lies. scale: of queries' products with keys.
    """

    def __init__(self, slots: Tensor, texts: Sequence[tuple[int, Spans]], scale: float) -> None:
        self.scale = scale
        self._slots = slots
        rows = array(INTEGERS, [row for row, _ in texts])
        self.texts = len(rows)
        self._held = rows, *flattened(spans for _, spans in texts)
        addresses = (each.buffer_info()[0] for each in self._held)
        self._step = _Step(len(slots), slots.data_ptr(), len(rows), *addresses)
        self.address = ctypes.addressof(self._step)

    def become(self, other: Step) -> None:
        """What `other` says stands at this one's address, too, from now on."""
        self._held, self._slots, self.texts = other._held, other._slots, other.texts
        ctypes.memmove(self.address, other.address, ctypes.sizeof(_Step))


def attend(
    step: Step, q: Tensor, k: Tensor, v: Tensor, head_dim: int, cos_sin: tuple[Tensor, Tensor] | None, keys: Tensor,
    values: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Keeps k, v [tokens, kv_heads * head_dim] in keys, values [slots, kv_heads, head_dim]; texts' attention to `out`.

    q, and out: [tokens, heads * head_dim]; rows of all but `out` may lie apart. With cos_sin, q and k are rotated
    before: q where it is.
    """
    heads = q.shape[1] // head_dim, k.shape[1] // head_dim, head_dim, q.stride(0), k.stride(0), v.stride(0)
    addresses = (None if x is None else x.data_ptr() for x in (q, k, v, *(cos_sin or (None, None)), keys, values, out))
    call(_compiled().attend, _Attend(_level(), *heads, step.address, *addresses, step.scale))


def rotate(q: Tensor, k: Tensor, head_dim: int, cos_sin: tuple[Tensor, Tensor]) -> None:
    """Rotates q and k [tokens, heads * head_dim] where they are; their rows may lie apart."""
    step = _Step(q.shape[0])
    heads = q.shape[1] // head_dim, k.shape[1] // head_dim, head_dim, q.stride(0), k.stride(0), 0
    addresses = (None if x is None else x.data_ptr() for x in (q, k, None, *cos_sin))
    call(_compiled().attend, _Attend(_level(), *heads, ctypes.addressof(step), *addresses))
