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
from tpllama.recording import call

INTEGERS = "q"  # int64, as `array` calls it
Spans = list[tuple[int, int]]


@functools.cache
def _native() -> ctypes.CDLL | str:
    """The compiled functions, or why there are none."""
    compiled = library(Path(__file__).with_name("fused.cpp"))
    if isinstance(compiled, str):
        return compiled
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float
    compiled.rms_norm.argtypes = (number, size, size, pointer, pointer, pointer, real, pointer, number)
    compiled.gated.argtypes = (number, size, size, pointer, size, pointer, size, pointer, number)
    heads, strided = (number, pointer, size, size, size), (pointer, size) * 3
    compiled.attend.argtypes = (*heads, *strided, *(pointer,) * 4, real, pointer, number)
    compiled.rms_norm.restype = compiled.gated.restype = compiled.attend.restype = None
    return compiled


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
    arguments = x.data_ptr(), added, weight.data_ptr(), eps, y.data_ptr(), torch.get_num_threads()
    call(_compiled().rms_norm, _level(), *x.shape, *arguments)
    return y


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of [n, features] each, whose rows may lie apart."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    parts = gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), y.data_ptr()
    call(_compiled().gated, _level(), *gate.shape, *parts, torch.get_num_threads())
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
    cos, sin = (None, None) if cos_sin is None else (cos_sin[0].data_ptr(), cos_sin[1].data_ptr())
    call(
        _compiled().attend, _level(), step.address,
        q.shape[1] // head_dim, k.shape[1] // head_dim, head_dim, q.data_ptr(), q.stride(0),
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos, sin, keys.data_ptr(), values.data_ptr(), step.scale,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, head_dim: int, cos_sin: tuple[Tensor, Tensor]) -> None:
    """Rotates q and k [tokens, heads * head_dim] where they are; their rows may lie apart."""
    step = _Step(q.shape[0])
    cos, sin = cos_sin
    call(
        _compiled().attend, _level(), ctypes.addressof(step),
        q.shape[1] // head_dim, k.shape[1] // head_dim, head_dim, q.data_ptr(),
        q.stride(0), k.data_ptr(), k.stride(0), None, 0, cos.data_ptr(), sin.data_ptr(), None, None, 1.0, None,
        torch.get_num_threads(),
    )  # fmt: skip
