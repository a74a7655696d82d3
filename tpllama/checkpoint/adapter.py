"""LoRA adapters, merged into their base model's weights slice by slice, as these are read.

Owns where an adapter's files lie, how its tensors pair up, and the sum W + scale * B @ A, with the same bits for an
element whatever slice it is read in. What the tensors are called is adapter_names.py's concern, rank and scale are
adapter_config.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.adapter_config import CONFIG_NAME, LoraScaling, base_model_of, read_scaling
from tpllama.checkpoint.adapter_names import AdapterTensor, parse_adapter_name
from tpllama.checkpoint.open import Checkpoint, StoredWeight, TensorInfo
from tpllama.checkpoint.rotary_rows import from_interleaved
from tpllama.checkpoint.weight_files import WeightFile, open_weight_file
from tpllama.config import LlamaConfig, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# In order of preference; torchtune writes the same adapter as the first and the third.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt", "adapter.pth")
_EPOCH_WEIGHTS = re.compile(r"adapter_(?P<epoch>\d+)\.pt")
# B @ A is computed in tiles of the whole weight: BLAS may round differently for other sizes of the same product.
_TILE = (256, 1024)
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class AdapterFiles:
    """The folder that was asked for, and the adapter's files in it or in its subfolder `adapter`."""

    directory: Path
    weights: Path
    config: Path | None


@dataclass(frozen=True)
class LoraWeight:
    """The change of one base weight: names of A [rank, in] and B [out, rank] in the file, and the factor.

    Of an embedding [vocab, hidden], whose factors are `transposed`, A is [rank, vocab] and B [hidden, rank].
    """

    a: str
    b: str
    rank: int
    scale: float
    transposed: bool
    interleaved: bool


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: weights that LoRA changes and tensors that it replaces, by Hugging Face's names."""

    files: AdapterFiles
    weights: WeightFile
    lora: Mapping[str, LoraWeight]
    replaced: Mapping[str, str]


def find_adapter(directory: Path) -> AdapterFiles | None:
    """The adapter in `directory`, or in its subfolder `adapter`; of several epochs the last. None where is none."""
    for folder in (directory, directory / "adapter"):
        weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None) or _last_epoch(folder)
        if weights is not None:
            config = folder / CONFIG_NAME
            return AdapterFiles(directory, weights, config if config.is_file() else None)
    return None


def _last_epoch(folder: Path) -> Path | None:
    matches = (_EPOCH_WEIGHTS.fullmatch(path.name) for path in folder.glob("adapter_*.pt") if path.is_file())
    last = max((match for match in matches if match), key=lambda match: int(match["epoch"]), default=None)
    return folder / last.string if last else None


def base_model(files: AdapterFiles) -> str | None:
    """The base model as the adapter names it, a path or hub id; None where it names none. UserError: damaged JSON."""
    return base_model_of(files.config) if files.config else None


def open_adapter(files: AdapterFiles) -> Adapter:
    """Reads the names of the tensors, and each weight's rank and scale.

    Raises UserError: a damaged file, anything but plain LoRA, a missing rank or scale, an A without its B.
    """
    scaling = read_scaling(files.weights, files.config)
    weights = open_weight_file(files.weights)
    tensors: dict[tuple[str, str], tuple[str, AdapterTensor]] = {}
    for name in weights.shapes:
        tensor = parse_adapter_name(name)
        if (tensor.weight, tensor.part) in tensors:
            twin = tensors[tensor.weight, tensor.part][0]
            raise UserError(f"found {twin} and {name} in {files.weights}, expected one of them, remove the other")
        tensors[tensor.weight, tensor.part] = (name, tensor)
    lora = dict(_pairs(tensors, scaling, files.weights))
    if not lora:
        raise UserError(
            f"found no LoRA tensors in {files.weights}, expected lora_A and lora_B of at least one weight, "
            f"pass the base model alone or another adapter"
        )
    replaced = {weight: name for (weight, part), (name, _) in tensors.items() if part == "whole"}
    return Adapter(files, weights, lora, replaced)


def _pairs(
    tensors: Mapping[tuple[str, str], tuple[str, AdapterTensor]], scaling: LoraScaling, path: Path
) -> Iterator[tuple[str, LoraWeight]]:
    """Each changed weight with its two factors."""
    for (weight, part), (name, tensor) in tensors.items():
        if part == "whole":
            continue
        other = "B" if part == "A" else "A"
        if (weight, other) not in tensors:
            raise UserError(f"found {name} in {path}, expected its other factor {other} beside it, save both")
        if part == "A":
            b, b_tensor = tensors[weight, "B"]
            rank, scale = scaling.of(weight.removesuffix(".weight"))
            yield weight, LoraWeight(name, b, rank, scale, tensor.transposed, b_tensor.interleaved)


class AdaptedCheckpoint:
    """`base` with `adapter` merged into the weights. Raises UserError where the two don't fit.

    Where the base was opened without weights, nothing is compared.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base = base
        self._adapter = adapter
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

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        self._base.prefetch(name, index)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._base.tokenizer()

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """The base's slice with the adapter's change added.

        A changed slice is float32 (float64 for a float64 base): rounded once, to the dtype that it is used in, it is
        what PEFT's merge_and_unload gives in that dtype on the CPU.
        """
        part = self._base.read(name, index)
        if name in self._adapter.replaced:
            part = self._adapter.weights.read(self._adapter.replaced[name], index).to(part.dtype)
        return self._changed(part, name, index) if name in self._adapter.lora else part

    def _changed(self, stored: torch.Tensor, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """`stored` plus rows x columns of scale * B @ A, tile by tile."""
        import torch

        weight = self._adapter.lora[name]
        dtype = torch.promote_types(stored.dtype, torch.float32)
        changed = part = stored.to(dtype, copy=True)  # what was read may be a view of the file
        # The factors are small, so they are read whole: rotated rows are put in order across a head.
        a, b = (self._read_factor(key).to(dtype) for key in (weight.a, weight.b))
        if weight.interleaved:
            b = from_interleaved(b, self._head_dim)
        if weight.transposed:
            part, index = part.T, index[::-1]
        rows, columns = index
        for top in range(rows.start // _TILE[0] * _TILE[0], rows.stop, _TILE[0]):
            for left in range(columns.start // _TILE[1] * _TILE[1], columns.stop, _TILE[1]):
                tile = b[top : top + _TILE[0]] @ a[:, left : left + _TILE[1]] * weight.scale
                # PEFT rounds the change of an embedding before adding it, and that of no other weight.
                if weight.transposed:
                    tile = tile.to(stored.dtype)
                in_rows, to_rows = _overlap(rows, top, _TILE[0])
                in_columns, to_columns = _overlap(columns, left, _TILE[1])
                part[to_rows, to_columns] += tile[in_rows, in_columns]
        return changed

    def _read_factor(self, key: str) -> torch.Tensor:
        shape = self._adapter.weights.shapes[key]
        return self._adapter.weights.read(key, tuple(slice(0, size) for size in shape))


def _overlap(wanted: slice, start: int, size: int) -> tuple[slice, slice]:
    """Where a tile at `start` and `wanted` overlap: within the tile, and within the result."""
    first, last = max(wanted.start, start), min(wanted.stop, start + size)
    return slice(first - start, last - start), slice(first - wanted.start, last - wanted.start)


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
