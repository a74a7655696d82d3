"""A base model with a LoRA adapter merged into its weights, slice by slice, as these are read.

Owns the sum W + scale * B @ A, with the same bits for an element whatever slice it is read in, and which adapters fit
which base. What an adapter holds is adapter.py's concern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.adapter import Adapter
from tpllama.checkpoint.open import Checkpoint, StoredWeight, TensorInfo
from tpllama.checkpoint.rotary_rows import from_interleaved
from tpllama.checkpoint.tiles import TILE, tiles
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


class AdaptedCheckpoint:
    """`base` with `adapter` merged into the weights. Raises UserError where the two don't fit.

    Where the base was opened without weights, nothing is compared.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base = base
        self._adapter = adapter
        # Weights are read in blocks of rows, one weight after the other.
        self._kept: tuple[tuple[str, torch.dtype], tuple[torch.Tensor, torch.Tensor]] | None = None
        self.path: Path = adapter.files.directory
        self.files: tuple[Path, ...] = (*base.files, adapter.files.weights)
        self.base_path: Path | None = base.path
        self.fields: Mapping[str, Any] = base.fields
        self.tensors: Mapping[str, TensorInfo] = base.tensors
        self.quantized: Mapping[str, StoredWeight] = base.quantized
        self.eos_token_ids: tuple[int, ...] = base.eos_token_ids
        self.notes: tuple[str, ...] = (*base.notes, _note(base, adapter))
        if any(weight.interleaved for weight in adapter.lora.values()):
            self._head_dim = LlamaConfig.from_hf(base.fields).head_dim
        if base.tensors:
            _check_fit(base, adapter)
            changed = {*adapter.lora, *adapter.replaced}  # their dtypes are no longer the base's
            self.tensors = {**base.tensors, **{name: TensorInfo(base.tensors[name].shape) for name in changed}}

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        if name not in self._adapter.replaced:
            self._base.prefetch(name, index)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._base.tokenizer()

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """The base's slice with the adapter's change added.

        A changed slice is float32 (float64 for a float64 base): rounded once, to the dtype that it is used in, it is
        what PEFT's merge_and_unload gives in that dtype on the CPU. A replaced slice is the adapter's, in its dtype.
        Called in one thread alone.
        """
        if name not in self._adapter.lora:
            return self._own(name, index) if name in self._adapter.replaced else self._base.read(name, index)
        part = self._base.read(name, index)
        if name in self._adapter.replaced:  # PEFT saves an embedding along with its LoRA
            part = self._own(name, index).to(part.dtype)
        return self._changed(part, name, index)

    def _own(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """The adapter's slice of a tensor that it replaces."""
        return self._adapter.weights.read(self._adapter.replaced[name], index)

    def _changed(self, stored: torch.Tensor, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """`stored` plus rows x columns of scale * B @ A, tile by tile."""
        import torch

        weight = self._adapter.lora[name]
        dtype = torch.promote_types(stored.dtype, torch.float32)
        changed = part = stored.to(dtype, copy=True)  # what was read may be a view of the file
        a, b = self._factors(name, dtype)
        if weight.transposed:
            part, index = part.T, index[::-1]
        rows, columns = index
        # In tiles of the whole weight: BLAS may round differently for other sizes of the same product.
        for (top, left), inside, target in tiles(rows, columns):
            tile = b[top : top + TILE[0]] @ a[:, left : left + TILE[1]] * weight.scale
            # PEFT rounds the change of an embedding before adding it, and that of no other weight.
            if weight.transposed:
                tile = tile.to(stored.dtype)
            part[target] += tile[inside]
        return changed

    def _factors(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a weight, whole: rotated rows are put in order across a head. Of the last weight they are kept."""
        if self._kept is None or self._kept[0] != (name, dtype):
            weight = self._adapter.lora[name]
            a, b = (self._read_factor(key).to(dtype) for key in (weight.a, weight.b))
            self._kept = (name, dtype), (a, from_interleaved(b, self._head_dim) if weight.interleaved else b)
        return self._kept[1]

    def _read_factor(self, key: str) -> torch.Tensor:
        shape = self._adapter.weights.shapes[key]
        return self._adapter.weights.read(key, tuple(slice(0, size) for size in shape))


def _check_fit(base: Checkpoint, adapter: Adapter) -> None:
    """Raises UserError for the first tensor of the adapter that doesn't fit the base."""
    for name in (*adapter.lora, *adapter.replaced):
        key = adapter.replaced[name] if name in adapter.replaced else adapter.lora[name].a
        if name in base.quantized:
            raise UserError(
                f"found {name} quantized in {base.path} and adapted by {key}, expected a plain weight, merge the "
                f"adapter into the original model before quantizing that"
            )
        if base.fields.get("tie_word_embeddings") and name in _EMBEDDINGS:
            raise UserError(
                f"found {key} for a model whose embedding and lm_head are one tensor, expected neither in the "
                f"adapter, as it would change both, merge it with PEFT into the model with untied weights"
            )
        if name not in base.tensors or (name in adapter.lora and len(base.tensors[name].shape) != 2):
            kind = "matrix" if name in adapter.lora else "tensor"
            raise UserError(
                f"found {key} in {adapter.files.weights}, expected a {kind} {name} in {base.path}, which has none, "
                f"use the base model that the adapter was trained on"
            )
    for name, weight in adapter.lora.items():
        shape = base.tensors[name].shape
        num_out, num_in = shape[::-1] if weight.transposed else shape
        _check_shape(base, adapter, name, weight.a, (weight.rank, num_in))
        _check_shape(base, adapter, name, weight.b, (num_out, weight.rank))
    for name, key in adapter.replaced.items():
        _check_shape(base, adapter, name, key, base.tensors[name].shape)


def _check_shape(base: Checkpoint, adapter: Adapter, name: str, key: str, expected: tuple[int, ...]) -> None:
    shape = adapter.weights.shapes[key]
    if shape == expected:
        return
    rank = f" and rank {adapter.lora[name].rank}" if key != adapter.replaced.get(name) else ""
    raise UserError(
        f"found tensor {key} of shape {list(shape)} in {adapter.files.weights}, expected {list(expected)} for {name} "
        f"of shape {list(base.tensors[name].shape)}{rank}, use the base model that the adapter was trained on and "
        f"the config that it was saved with"
    )


def _note(base: Checkpoint, adapter: Adapter) -> str:
    ranks = _values(f"{weight.rank}" for weight in adapter.lora.values())
    scales = _values(f"{round(weight.scale, 4)}" for weight in adapter.lora.values())
    replaced = f", tensors replaced: {len(adapter.replaced)}" if adapter.replaced else ""
    return (
        f"merged LoRA adapter {adapter.files.weights} (rank {ranks}, scale {scales}, {len(adapter.lora)} weights"
        f"{replaced}) into {base.path}"
    )


def _values(values: Iterator[str]) -> str:
    """The distinct values, in order of appearance."""
    return " or ".join(dict.fromkeys(values))
