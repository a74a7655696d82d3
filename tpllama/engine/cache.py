"""Keys and values of all sequences in blocks of a fixed size, and attention over them through block tables.

The place of a token is a slot: its block's number times the block size, and its place in the block.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from tpllama.engine.attention import StepAttention
from tpllama.engine.attention_plan import Planner, spans_of
from tpllama.engine.batch import Batch, Copy, Run
from tpllama.engine.memory import SCALED_FORMS, CacheShape
from tpllama.engine.native import NativeAttention
from tpllama.kernels import fused
from tpllama.kernels.cpu import widen
from tpllama.kernels.pages import new_memory

_WIDENED_SLOTS = 512


class Store(Protocol):
    """Vectors [kv_heads, head_dim] by slot, of one layer's keys or values."""

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Puts x [n, kv_heads, head_dim] into slots [n]."""

    def read(self, start: int, size: int) -> Tensor:
        """A copy of neighbouring slots, [1, kv_heads, size, head_dim] in the dtype of computation."""

    def take(self, slots: Tensor) -> Tensor:
        """The same of any slots [n]."""

    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored, each [slots, ...]."""


class PlainStore:
    """As they are. `data` [slots, kv_heads, head_dim]."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        _, self._heads, self._dim = data.shape

    def write(self, slots: Tensor, x: Tensor) -> None:
        self.data.index_copy_(0, slots, x)

    def read(self, start: int, size: int) -> Tensor:
        return self.data[start : start + size].clone().transpose(0, 1).unsqueeze(0)

    def take(self, slots: Tensor) -> Tensor:
        return self.data.index_select(0, slots).transpose(0, 1).unsqueeze(0)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.data,)


class ScaledStore:
    """In one byte a value, with a scale for each vector: its largest magnitude becomes `largest`.

    `dtype`: the one of computation.
    """

    def __init__(self, data: Tensor, scales: Tensor, largest: float, dtype: torch.dtype) -> None:
        self._largest = largest
        self._stored = data.dtype
        self.data = PlainStore(data.view(torch.int8))  # for few operations know float8
        self.scales = PlainStore(scales)  # float32 [slots, kv_heads, 1]
        self._dtype = dtype

    def write(self, slots: Tensor, x: Tensor) -> None:
        wide = x.float()
        scales = (wide.abs().amax(-1, keepdim=True) / self._largest).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = wide / scales
        rounded = scaled.round() if self._stored == torch.int8 else scaled
        self.data.write(slots, rounded.to(self._stored).view(torch.int8))
        self.scales.write(slots, scales)

    def read(self, start: int, size: int) -> Tensor:
        return self._widen(self.data.data[start : start + size], self.scales.data[start : start + size])

    def take(self, slots: Tensor) -> Tensor:
        return self._widen(self.data.data.index_select(0, slots), self.scales.data.index_select(0, slots))

    def _widen(self, data: Tensor, scales: Tensor) -> Tensor:
        """Some slots at a time, for the processor's cache; on a GPU all at once."""
        wide = torch.empty(data.shape, dtype=self._dtype, device=data.device)
        size = _WIDENED_SLOTS if data.is_cpu else max(1, len(data))
        for part, values, scale in zip(*(each.split(size) for each in (wide, data, scales)), strict=True):
            torch.mul(widen(values.view(self._stored), torch.float32), scale, out=part)
        return wide.transpose(0, 1).unsqueeze(0)

    def parts(self) -> tuple[Tensor, ...]:
        return (*self.data.parts(), *self.scales.parts())


class LayerCache:
    """The model's `KVCache` of one layer."""

    def __init__(self, step: CurrentStep, keys: Store, values: Store) -> None:
        self.keys = keys
        self.values = values
        self._step = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k, v [tokens, kv_heads, head_dim]; attention of q [tokens, heads, head_dim] over what is stored."""
        step, keys, values = self._step, self.keys, self.values
        if isinstance(step.attention, NativeAttention):
            assert isinstance(keys, PlainStore)
            assert isinstance(values, PlainStore)
            flat = q.flatten(1), k.flatten(1), v.flatten(1)
            return step.attention.keep_and_attend(*flat, None, keys, values).view(q.shape)
        keys.write(step.slots, k)
        values.write(step.slots, v)
        return step.attention.attend(q, keys, values)

    def rotate_and_attend(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """The same of bfloat16 on the CPU: [tokens, heads * head_dim], not rotated yet. May rotate q and k in place."""
        attention, keys, values = self._step.attention, self.keys, self.values
        if isinstance(attention, NativeAttention) and isinstance(keys, PlainStore) and isinstance(values, PlainStore):
            return attention.keep_and_attend(q, k, v, cos_sin, keys, values)
        head_dim = cos_sin[0].shape[-1]
        fused.rotate(q, k, head_dim, cos_sin)
        return self.attend(*(each.unflatten(1, (-1, head_dim)) for each in (q, k, v))).flatten(1)

    def single_texts(self) -> fused.Step | None:
        """See `kernels.layer.Cache`."""
        attention = self._step.attention
        return attention.single_texts if isinstance(attention, NativeAttention) else None

    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored, each [slots, ...]."""
        return (*self.keys.parts(), *self.values.parts())


class CurrentStep:
    """What all layers of a step have in common: where its tokens are kept, int64 [tokens], and what they look at."""

    slots: Tensor
    attention: StepAttention | NativeAttention


class PagedCache:
    """Layers of keys and values in blocks, on the device and, for preempted requests, on the host.

    The block after the last one takes the tokens that only fill up a step to its size. is_alone: see `Planner`.
    """

    def __init__(
        self, shape: CacheShape, queries_per_kv: int, scale: float, dtype: torch.dtype, device: torch.device,
        is_alone: bool = False,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.device = device
        self._dtype = dtype
        self._planner = Planner(shape, queries_per_kv, scale, dtype, device, is_alone)
        self._step = CurrentStep()
        slots = (shape.num_blocks + 1) * shape.block_size
        self.layers = [self._layer(slots, device) for _ in range(shape.num_layers)]
        host_slots = shape.num_host_blocks * shape.block_size
        self._host = [self._layer(host_slots, torch.device("cpu")) for _ in range(shape.num_layers) if host_slots]

    def _layer(self, slots: int, device: torch.device) -> LayerCache:
        return LayerCache(self._step, self._store(slots, device), self._store(slots, device))

    def _store(self, slots: int, device: torch.device) -> Store:
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        data = _zeros((slots, heads, dim), getattr(torch, self.shape.dtype), device)
        form = SCALED_FORMS.get(self.shape.dtype)
        if form is None:
            return PlainStore(data)
        return ScaledStore(data, _zeros((slots, heads, 1), torch.float32, device), form.largest, self._dtype)

    def begin(self, batch: Batch, size: int) -> None:
        """Moves blocks as `batch` says, and prepares the step that computes it, filled up to `size` tokens."""
        self.move(batch)
        slots = [slot for chunk in batch.chunks for slot in slots_of(chunk.runs, chunk.start, chunk.stop, self.shape)]
        filling = self.shape.num_blocks * self.shape.block_size
        slots += [filling] * (size - len(slots))
        self._step.slots = torch.tensor(slots, device=self.device)
        self._step.attention = self._planner.plan(batch.chunks, self._step.slots)

    def begin_over_tables(self, slots: Tensor, keys: Tensor, tables: Tensor) -> None:
        """Prepares a step of one token of each text, of what these tensors will hold (see `Planner.over_tables`)."""
        self._step.slots = slots
        self._step.attention = self._planner.over_tables(keys, tables)

    @property
    def reads_tables(self) -> bool:
        """Whether there is a kernel for `begin_over_tables`; without, all that is looked at is copied first."""
        return self._planner.has_kernel

    def move(self, batch: Batch) -> None:
        """Moves blocks as `batch` says."""
        for cache, source, blocks in (
            (self._host, self.layers, batch.to_host),
            (self.layers, self.layers, batch.copies),
            (self.layers, self._host, batch.from_host),
        ):
            if blocks:
                self._move(cache, source, list(blocks))

    def _move(self, to: list[LayerCache], source: list[LayerCache], blocks: list[Copy]) -> None:
        size = self.shape.block_size
        for to_layer, from_layer in zip(to, source, strict=True):
            for to_part, from_part in zip(to_layer.parts(), from_layer.parts(), strict=True):
                for from_block, to_block in blocks:
                    block = from_part[from_block * size : (from_block + 1) * size]
                    to_part[to_block * size : (to_block + 1) * size] = block


def slots_of(runs: tuple[Run, ...], start: int, stop: int, shape: CacheShape) -> list[int]:
    """The slots of positions start..stop of a sequence in these blocks."""
    spans = spans_of(runs, start, stop, shape.block_size)
    return [slot for first, size in spans for slot in range(first, first + size)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on the CPU take memory only where they are written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(new_memory(num_bytes), dtype=torch.uint8).view(dtype).view(shape)
