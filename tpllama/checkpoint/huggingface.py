"""Directories in Hugging Face's form: config.json, safetensors or .bin weights, tokenizer files.

Owns the reading of config, tokenizer and tensors that such a directory holds, quantized ones (torchao's) taken apart.
Which files these are is weight_set.py's concern, how one is read weight_files.py's, and what the config means
LlamaConfig's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.manifest import check_manifest
from tpllama.checkpoint.open import StoredWeight, TensorInfo, first_line, names_of_parts
from tpllama.checkpoint.paths import check_inside
from tpllama.checkpoint.weight_files import WeightFile, check_floating, fetch_pages, open_weight_file
from tpllama.checkpoint.weight_set import WeightSet, check_once, read_json
from tpllama.config import UserError
from tpllama.llama_config import token_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SMALL_FILES = ("*config.json", "*token*", "vocab.json", "merges.txt", "chat_template*", "*manifest.json")


class HuggingFaceCheckpoint:
    """A directory with config.json, or with `fields`, the config of its base model. Without `weights` of these alone.

    Raises UserError for a config that can't be read, weights quantized by another library than torchao, and files
    that are damaged or not those that the index or the manifest names.
    """

    base_path: Path | None = None

    def __init__(self, path: Path, weights: WeightSet | None = None, fields: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.files: tuple[Path, ...] = weights.files if weights else ()
        self.fields = _read_config(path) if fields is None else fields
        generation = path / "generation_config.json"
        generation_fields = read_json(check_inside(generation)) if generation.is_file() else {}
        both = (*token_ids(generation_fields.get("eos_token_id")), *token_ids(self.fields.get("eos_token_id")))
        self.eos_token_ids = tuple(dict.fromkeys(both))
        self._files: dict[str, WeightFile] = {}
        self.quantized: Mapping[str, StoredWeight] = {}
        if weights is not None:
            check_manifest(path, weights.files)
            is_quantized = bool(self.fields.get("quantization_config"))
            files = [open_weight_file(file, floats_only=not is_quantized) for file in weights.files]
            self._files = _by_tensor(files, weights.weight_map)
            self.quantized = _quantized(files, self._files)
        self.notes: tuple[str, ...] = ()
        if self.fields.get("quantization_config") and not self.quantized:
            which = "those in the files" if weights else "made-up ones"
            self.notes = (f"the config in {path} says that weights are quantized; {which} are not",)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(file.shapes[name], file.dtypes[name]) for name, file in self._files.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._files[name].read(name, index)

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        fetch_pages(self._files[name].read(name, index))

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(self.path)


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has a tokenizer's files."""
    return any((path / file).is_file() for file in _TOKENIZER_FILES)


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a directory, None where it has none. Raises UserError for one that is damaged."""
    files = [path / file for file in _TOKENIZER_FILES if (path / file).is_file()]
    if not files:
        return None
    for file in files:
        check_inside(file)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # The tokenizers library raises plain Exception for a damaged file.
        raise UserError(
            f"found tokenizer files in {path} that can't be read ({first_line(error)}), "
            f"expected those of a Llama, download them again"
        ) from error
    return tokenizer


def hub_snapshot(model_id: str, weights: bool = True) -> Path:
    """The local directory of a hub model, downloaded unless cached. Prefers safetensors to .bin."""
    from huggingface_hub import snapshot_download

    def download(*patterns: str) -> Path:
        wanted = [*_SMALL_FILES, *patterns]
        # A pattern's * matches / too; folders hold the same model in other forms.
        return Path(snapshot_download(model_id, allow_patterns=wanted, ignore_patterns=["*/*"]))

    try:
        if not weights:
            return download()
        path = download("model*.safetensors", "model.safetensors.index.json")
        if (path / "adapter_config.json").is_file():
            path = download("adapter_model.safetensors", "adapter_model.bin")
        elif not any(path.glob("model*.safetensors")):
            path = download("pytorch_model*.bin", "pytorch_model.bin.index.json")
    except Exception as error:  # Its failures share no base class, and all mean: no model.
        raise UserError(
            f"found no model {model_id!r} here or on the hub ({type(error).__name__}: {first_line(error)}), "
            f"expected a public or authorized hub id, check its spelling and the network, or pass a directory"
        ) from error
    return path


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise UserError(f"found no config.json in {path}, expected Hugging Face's form, check the path")
    fields = read_json(check_inside(path / "config.json"))
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method != "torchao":
            raise UserError(
                f"found weights quantized with {method!r} in {path}, expected torchao's or unquantized weights, use "
                f"the original model with --torchao-config"
            )
    return fields


def _by_tensor(files: list[WeightFile], weight_map: Mapping[str, Path] | None) -> dict[str, WeightFile]:
    """The file of every tensor: the one that the index names, where there is an index."""
    opened = {file.path: file for file in files}
    if weight_map is None:
        return {name: opened[path] for name, path in check_once((n, f.path) for f in files for n in f.shapes).items()}
    named: dict[str, WeightFile] = {}
    for name, path in weight_map.items():
        file = opened[path]
        # torchao's tensors may be in the index by the name of the whole or, in safetensors, by those of their parts.
        parts = file.stored[name].parts.values() if name in file.stored and name not in file.shapes else [name]
        for part in parts:
            if part not in file.shapes:
                raise UserError(
                    f"found no tensor {name} in {path}, expected it by the index beside it, download both again"
                )
            named[part] = file
    return named


def _quantized(files: list[WeightFile], by_tensor: Mapping[str, WeightFile]) -> dict[str, StoredWeight]:
    """Weights of several tensors. Raises UserError where one is missing, and for whole numbers that belong to none."""
    stored: dict[str, StoredWeight] = {}
    for file in files:
        for name, weight in file.stored.items():
            if stored.setdefault(name, weight) != weight or name in by_tensor:
                raise UserError(
                    f"found {name} described in two ways, once by {file.path.name}, expected it stored once, download "
                    f"the checkpoint again"
                )
    for name, weight in stored.items():
        if missing := [part for part in weight.parts.values() if part not in by_tensor]:
            raise UserError(
                f"found no tensor {missing[0]}, a part of the quantized {name}, expected all of "
                f"{sorted(weight.parts)}, download the checkpoint again"
            )
    parts = names_of_parts(stored)
    for name, file in by_tensor.items():
        if name not in parts:
            check_floating(file, name)
    return stored
