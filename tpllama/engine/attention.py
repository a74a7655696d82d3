"""Attention of a step's tokens over the paged cache.

In bfloat16 on the CPU our own C++ computes that of texts, of one token each, on keys and values where they lie, and
with AMX that of prompts (see `native`). Otherwise each sequence is one call of torch's, whose keys and values are read
in one pass to where the arithmetic finds them in the processor's cache (figures: bench/attention.py). Neighbouring
blocks are read as one piece. A long run of blocks that several texts begin with is read once for all of them: there are
two softmaxes then, joined by the logarithms of their sums (Milakov and Gimelshein 2018, arXiv 1805.02867). The query
heads of a KV head become rows of one query matrix, so that keys and values are never repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpllama.engine.cache import Store

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class StepAttention(Protocol):
    """The attention of one step, the same in each layer."""

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        """Attention of q [tokens, heads, head_dim] over what the step's sequences have in these stores."""


class Place(NamedTuple):
    """Where consecutive tokens of a sequence lie: `size` slots from `start` on, or in `slots` where they lie apart."""

    start: int
    size: int
    slots: Tensor | None

    def read(self, store: Store) -> Tensor:
        """What a store has there, [1, kv_heads, size, head_dim]."""
        return store.read(self.start, self.size) if self.slots is None else store.take(self.slots)


class Text(NamedTuple):
    """One token of a text at place `row` of the step, which looks at everything that lies at `place`."""

    row: int
    place: Place


class Prompt(NamedTuple):
    """Several tokens of a prompt, from place `row` of the step on, over what lies at `place`.

    pieces: of so many tokens, which look at so many keys, under a mask [tokens * queries_per_kv, keys] of -inf and 0.
    """

    row: int
    place: Place
    pieces: list[tuple[int, int, Tensor]]


class Group(NamedTuple):
    """Texts that begin with what lies at `shared`, each of which goes on by itself."""

    shared: Place
    texts: list[Text]


class SequencesAttention:
    """Sequence by sequence, or group by group: see the module."""

    def __init__(
        self, texts: list[Text], prompts: list[Prompt], groups: list[Group], queries_per_kv: int, scale: float
    ) -> None:
        self._texts = texts
        self._prompts = prompts
        self._groups = groups
        self._queries_per_kv = queries_per_kv
        self._scale = scale

    def attend(self, q: Tensor, keys: Store, values: Store) -> Tensor:
        # [1, kv_heads, queries_per_kv, head_dim] each: a token's query heads as queries.
        rows = self._grouped(q).split(1) if self._texts else ()
        attended = [
            _attend(rows[row], place.read(keys), place.read(values), self._scale)[0] for row, place in self._texts
        ]
        if len(attended) == len(q):
            return torch.cat(attended).view_as(q)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for (row, _), text in zip(self._texts, attended, strict=True):
            self._grouped(out)[row] = text[0]
        self.attend_others(q, out, keys, values)
        return out

    def attend_others(self, q: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        """Prompts and groups, to their rows of `out`, which is of q's shape."""
        for each in self._prompts:
            self._prompt(each, self._grouped(q), self._grouped(out), keys, values)
        for group in self._groups:
            self._group(group, self._grouped(q), self._grouped(out), keys, values)

    def _grouped(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] as [tokens, kv_heads, queries_per_kv, head_dim]."""
        return x.unflatten(1, (-1, self._queries_per_kv))

    def _prompt(self, prompt: Prompt, grouped: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        k, v = prompt.place.read(keys), prompt.place.read(values)
        first = prompt.row
        for tokens, size, mask in prompt.pieces:
            queries = grouped[first : first + tokens].transpose(0, 1)  # [kv_heads, tokens, queries_per_kv, head_dim]
            attended, _ = _attend(queries.flatten(1, 2)[None], k[:, :, :size], v[:, :, :size], self._scale, mask)
            out[first : first + tokens] = attended.view(queries.shape).transpose(0, 1)
            first += tokens

    def _group(self, group: Group, grouped: Tensor, out: Tensor, keys: Store, values: Store) -> None:
        rows = [text.row for text in group.texts]
        queries = grouped[rows].transpose(0, 1)  # [kv_heads, texts, queries_per_kv, head_dim]
        shared = _attend(queries.flatten(1, 2)[None], group.shared.read(keys), group.shared.read(values), self._scale)
        shared_values = shared[0].view(queries.shape).transpose(0, 1).float()
        shared_logs = shared[1].view(queries.shape[:-1]).transpose(0, 1)
        own = [
            _attend(grouped[row, None], place.read(keys), place.read(values), self._scale) for row, place in group.texts
        ]
        own_values, own_logs = (torch.cat(each) for each in zip(*own, strict=True))
        # A softmax over both parts gives each the weight that its sum has in the sum of both.
        weight = (own_logs - shared_logs).sigmoid().unsqueeze(-1)
        out[rows] = torch.lerp(shared_values, own_values.float(), weight).to(out.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of its weights: q [1, kv_heads, n, head_dim], logs [1, kv_heads, n]."""
    if q.device.type == "cpu":
        attended, logs = _flash(q, k, v, attn_mask=mask, scale=scale)
        return attended, logs
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)
