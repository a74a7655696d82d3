"""Keys and values of a fixed group of sequences, and attention over them. The slot of a token is its position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpllama.engine.batch import Batch


@dataclass(frozen=True)
class _Decode:
    """A step in which each sequence has one token: rows and positions, int64 [n]; mask, bool [n, 1, 1, slots].

    `run`: the rows as a slice, where they follow each other, so that reading them makes no copy.
    """

    rows: Tensor
    run: slice | None
    positions: Tensor
    slots: int
    mask: Tensor


@dataclass(frozen=True)
class _Prefill:
    """One chunk of a step: its tokens' places in the step and in its row; mask, bool [queries * tokens, slots]."""

    tokens: slice
    row: int
    slots: slice
    mask: Tensor


class StaticCache:
    """One slab per layer, [rows, kv_heads, slots, head_dim], of the size that the local k and v have.

    `queries_per_kv`: query heads that share a key-value head on this rank.
    """

    def __init__(
        self, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, queries_per_kv: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (layers, rows, kv_heads, slots, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.queries_per_kv = queries_per_kv
        self.device = device
        self._step: _Decode | list[_Prefill] = []

    def begin(self, batch: Batch) -> None:
        """Prepares the step that computes `batch`, whose tokens follow each other in its order."""
        if all(len(chunk.tokens) == 1 for chunk in batch):
            self._step = self._decode(batch)
        else:
            self._step = self._prefill(batch)

    def _decode(self, batch: Batch) -> _Decode:
        rows = [chunk.row for chunk in batch]
        positions = torch.tensor([chunk.start for chunk in batch], device=self.device)
        slots = max(chunk.stop for chunk in batch)
        mask = torch.arange(slots, device=self.device) <= positions[:, None]
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        run = slice(rows[0], rows[-1] + 1) if is_run else None
        return _Decode(torch.tensor(rows, device=self.device), run, positions, slots, mask[:, None, None, :])

    def _prefill(self, batch: Batch) -> list[_Prefill]:
        step, first = [], 0
        for chunk in batch:
            count = len(chunk.tokens)
            positions = torch.arange(chunk.start, chunk.stop, device=self.device)
            visible = torch.arange(chunk.stop, device=self.device) <= positions[:, None]
            mask = visible.repeat(self.queries_per_kv, 1)
            step.append(_Prefill(slice(first, first + count), chunk.row, slice(chunk.start, chunk.stop), mask))
            first += count
        return step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k, v [tokens, kv_heads, head_dim]; attention of q [tokens, heads, head_dim] over what is stored."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(self._step, _Decode):
            return self._attend_decode(self._step, keys, values, q, k, v)
        out = torch.empty_like(q)
        for part in self._step:
            keys[part.row, :, part.slots] = k[part.tokens].transpose(0, 1)
            values[part.row, :, part.slots] = v[part.tokens].transpose(0, 1)
            stored = slice(0, part.slots.stop)
            attended = _attend_chunk(q[part.tokens], keys[part.row, :, stored], values[part.row, :, stored], part.mask)
            out[part.tokens] = attended
        return out

    def _attend_decode(self, step: _Decode, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[step.rows, :, step.positions] = k
        values[step.rows, :, step.positions] = v
        rows = step.rows if step.run is None else step.run
        stored_keys, stored_values = (x[:, :, : step.slots][rows] for x in (keys, values))
        # The query heads of a KV head become rows of one query matrix: keys and values are not repeated.
        grouped = q.unflatten(1, (-1, self.queries_per_kv))
        out = F.scaled_dot_product_attention(grouped, stored_keys, stored_values, step.mask)
        return out.flatten(1, 2)


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [tokens, heads, head_dim] over keys, values [kv_heads, slots, head_dim]; as above, grouped by KV head."""
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    grouped = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], mask)[0]
    return out.view(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
