"""LoRA adapters: which of a folder's files are one, and which of its tensors change which weight.

Owns where an adapter's files lie and how its tensors pair up. What the tensors are called is adapter_names.py's
concern, rank and scale are adapter_config.py's, how they change the base's weights is adapted.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpllama.checkpoint.adapter_config import CONFIG_NAME, LoraScaling, base_model_of, read_scaling
from tpllama.checkpoint.adapter_names import AdapterTensor, parse_adapter_name
from tpllama.checkpoint.weight_files import WeightFile, open_weight_file
from tpllama.config import UserError

# In order of preference; torchtune writes the same adapter as the first and the third.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt", "adapter.pth")
_EPOCH_WEIGHTS = re.compile(r"adapter_(?P<epoch>\d+)\.pt")


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
