"""Decoder layers of few calls: joint linears, and between them what fused.cpp computes.

A fused layer has the children of the plain one that it takes the place of, under their names. Linears that read the
same tokens are multiplied as one: their weights lie behind each other, each of them a view of its part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpllama.kernels import fused, own
from tpllama.kernels.cpu import Int8DynamicLinear, RowScaledLinear, TilesLinear
from tpllama.kernels.int4 import OwnInt4Linear
from tpllama.kernels.linear import PlainLinear
from tpllama.recording import Memory, recording

_JOINABLE = (PlainLinear, RowScaledLinear, Int8DynamicLinear, TilesLinear, OwnInt4Linear)
# Tokens of a step that is recorded: of more, Python's part is small.
_MOST_RECORDED = 32
_CosSin = tuple[Tensor, Tensor]
Place = Callable[[nn.Module], nn.Module]


class Cache(Protocol):
    """One layer's keys and values of earlier tokens."""

    def rotate_and_attend(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: _CosSin) -> Tensor:
        """Stores k, rotated, and v; attention of q, rotated: [tokens, heads * head_dim] each."""

    def single_texts(self) -> fused.Step | None:
        """What all layers of this step look at, where it is a token of each of some texts and nothing else."""


class FusedNorm(nn.Module):
    """RMS norm of bfloat16."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = plain.weight
        self.eps: float = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return fused.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class JointLinears(nn.Module):
    """Linears of the same tokens: [n, features] to the outputs of each, whose rows may lie apart."""

    def __init__(self, linears: Sequence[Any], place: Place) -> None:
        super().__init__()
        self._linears = tuple(linears)
        self.joint: Any = join(linears, place)
        self.sizes = [outputs_of(linear) for linear in linears] if self.joint else []

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        if self.joint is None:
            return [linear(x) for linear in self._linears]
        return self.joint(x).split_with_sizes(self.sizes, -1)

    def silu_and_multiply(self, x: Tensor) -> Tensor:
        """silu of the first's outputs times the second's."""
        joint = self.joint
        weight = None if joint is None or joint.bias is not None else joint.own_weight()
        y = None if weight is None else own.gated(x, weight)
        return fused.silu_and_multiply(*self(x)) if y is None else y


class FusedLayer(nn.Module):
    """A decoder layer over tokens [n, features] and a cache of keys and values; without a cache, the plain one.

    place: puts the tensors of joint linears where weights are kept.
    """

    def __init__(self, plain: Any, place: Place = lambda module: module) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        # Not as children, and found at once: a step of one token asks for them a hundred times.
        self._plain: tuple[Any, ...] = (plain,)
        attention, mlp = plain.self_attn, plain.mlp
        norms = plain.input_layernorm, plain.post_attention_layernorm
        (self._first, self._first_eps), (self._second, self._second_eps) = ((x.weight.detach(), x.eps) for x in norms)
        self.qkv = JointLinears([attention.q_proj, attention.k_proj, attention.v_proj], place)
        self.gate_up = JointLinears([mlp.gate_proj, mlp.up_proj], place)
        self._calls = self.qkv, attention.o_proj, self.gate_up, mlp.down_proj
        self._activation: Callable[[Tensor], Tensor] = mlp.activation

    def forward(self, x: Tensor, cos_sin: _CosSin, cache: Cache | None) -> Tensor:
        if cache is None:
            return self._plain[0](x, cos_sin, None)
        qkv, output, gate_up, down = self._calls
        q, k, v = qkv(fused.rms_norm(x, self._first, self._first_eps))
        summed: Tensor = output(cache.rotate_and_attend(q, k, v, cos_sin))
        normed = fused.rms_norm(x, self._second, self._second_eps, summed)
        if self._activation is F.silu:
            inner = gate_up.silu_and_multiply(normed)
        else:
            gate, up = gate_up(normed)
            inner = self._activation(gate) * up
        return fused.add(down(inner), summed)


class RecordedLayers(nn.ModuleList):
    """Fused layers, one after another. Steps of few texts are recorded, so that only the first costs Python's time."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        self._recorded: dict[int, _RecordedStep] = {}
        self._memory = Memory()
        self._caches: Sequence[Cache] | None = None  # in which the recorded steps store
        self._most = _MOST_RECORDED

    def forward(self, x: Tensor, cos_sin: _CosSin, caches: Sequence[Cache] | None) -> Tensor:
        step = caches[0].single_texts() if caches and len(x) <= self._most else None
        if caches is None or step is None:
            return self._run(x, cos_sin, caches)
        if self._caches is not caches:
            self.forget()
            self._caches = caches
        if (recorded := self._recorded.get(len(x))) is not None:
            return recorded.run(x, cos_sin, step)
        recorded = _RecordedStep(self._run, self._memory, x, cos_sin, caches, step)
        if recorded.is_whole:
            self._recorded[len(x)] = recorded
        else:
            self._most = 0
        return recorded.result

    def forget(self) -> None:
        """Has steps recorded anew."""
        self._recorded, self._memory = {}, Memory()

    def _run(self, x: Tensor, cos_sin: _CosSin, caches: Sequence[Cache] | None) -> Tensor:
        for index, layer in enumerate(self):
            x = layer(x, cos_sin, None if caches is None else caches[index])
        return x


class _RecordedStep:
    """The layers of a step, computed and recorded. `result`: of the last run, until the next one.

    is_whole: whether it can be run again.
    """

    def __init__(
        self, compute: Callable[..., Tensor], memory: Memory, x: Tensor, cos_sin: _CosSin, caches: Sequence[Cache],
        step: fused.Step,
    ) -> None:  # fmt: skip
        self._inputs = x.clone(), *(each.contiguous().clone() for each in cos_sin)
        self._step = step
        with recording(memory) as self._recording:
            self.result = compute(self._inputs[0], self._inputs[1:], caches)
        self.is_whole = self._recording.obstacle is None

    def run(self, x: Tensor, cos_sin: _CosSin, step: fused.Step) -> Tensor:
        for held, given in zip(self._inputs, (x, *cos_sin), strict=True):
            held.copy_(given)
        self._step.become(step)
        self._recording.replay()
        return self.result


def fits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are fused layers for a model."""
    return dtype == torch.bfloat16 and device.type == "cpu" and fused.is_available()


def join(linears: Sequence[Any], place: Place) -> nn.Module | None:
    """One linear with the outputs of all, whose tensors then become views of its own; None where kinds differ."""
    first = linears[0]
    kinds = {(type(each), *_settings(each)) for each in linears}
    has_hooks = any(each._forward_hooks or each._forward_pre_hooks for each in linears)
    if len(kinds) > 1 or has_hooks or type(first) not in _JOINABLE or getattr(first, "agree_max", None):
        return None
    lengths_per_output = {tuple(len(x) / outputs_of(each) for x in _tensors(each).values()) for each in linears}
    if len(lengths_per_output) > 1:
        return None  # each is padded by itself
    joint = copy.copy(first)
    joint._parameters, joint._buffers = dict(first._parameters), dict(first._buffers)
    if hasattr(first, "least_scale"):
        joint.least_scale = min(each.least_scale for each in linears)
    if hasattr(first, "out_features"):
        joint.out_features = sum(map(outputs_of, linears))
    for name in _tensors(first):
        _set(joint, name, torch.cat([_tensors(each)[name] for each in linears]))
    place(joint)
    for name, whole in _tensors(joint).items():
        sizes = [len(_tensors(each)[name]) for each in linears]
        for linear, part in zip(linears, whole.split(sizes), strict=True):
            _set(linear, name, part)
    return joint


def outputs_of(linear: Any) -> int:
    """How many outputs a joinable linear has; where it doesn't say, its first tensor has a row for each."""
    return getattr(linear, "out_features", None) or len(next(iter(_tensors(linear).values())))


def _settings(linear: Any) -> tuple[Any, ...]:
    """What linears must have in common to be one."""
    tensors = tuple((name, tensor.dtype, tensor.shape[1:]) for name, tensor in sorted(_tensors(linear).items()))
    return tensors, *(getattr(linear, name, None) for name in ("kind", "group_size", "dynamic"))


def _tensors(linear: Any) -> dict[str, Tensor]:
    return {name: x for name, x in (*linear._parameters.items(), *linear._buffers.items()) if x is not None}


def _set(linear: Any, name: str, tensor: Tensor) -> None:
    if name in linear._parameters:
        tensor = nn.Parameter(tensor, requires_grad=False)
    setattr(linear, name, tensor)
