"""Directories in Hugging Face's form: config.json, safetensors or .bin weights, tokenizer files.

Owns where these files lie and how they refer to one another. How one file of weights is read is
weight_files.py's concern; what the config means is LlamaConfig's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import TensorInfo, first_line
from tpllama.checkpoint.weight_files import WeightFile, open_weight_file
from tpllama.config import UserError, token_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# In order of preference: a whole file, or an index of shards, of each kind.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SMALL_FILES = ("*config.json", "*token*", "vocab.json", "merges.txt", "chat_template*")


class HuggingFaceCheckpoint:
    """A directory with config.json. With `weights=False`, of the config and tokenizer alone."""

    def __init__(self, path: Path, weights: bool = True) -> None:
        self.path = path
        self.fields = _read_config(path)
        generation = path / "generation_config.json"
        generation_fields = _read_json(generation) if generation.is_file() else {}
        both = (*token_ids(generation_fields.get("eos_token_id")), *token_ids(self.fields.get("eos_token_id")))
        self.eos_token_ids = tuple(dict.fromkeys(both))
        self._files: dict[str, WeightFile] = _locate(path) if weights else {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(file.shapes[name]) for name, file in self._files.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._files[name].read(name, index)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        if not any((self.path / file).is_file() for file in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # The tokenizers library raises plain Exception for a damaged file.
            raise UserError(
                f"found tokenizer files in {self.path} that can't be read ({first_line(error)}), "
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
        if not any(path.glob("model*.safetensors")):
            path = download("pytorch_model*.bin", "pytorch_model.bin.index.json")
    except Exception as error:  # Its failures share no base class, and all mean: no model.
        raise UserError(
            f"found no model {model_id!r} here or on the hub ({type(error).__name__}: {first_line(error)}), "
            f"expected a public or authorized hub id, check its spelling and the network, or pass a directory"
        ) from error
    return path


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise UserError(f"found no config.json in {path}, {_what_instead(path)}")
    fields = _read_json(path / "config.json")
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"found weights quantized with {method!r} in {path}, expected unquantized weights (pre-quantized "
            f"checkpoints are not read yet), use the original model with --torchao-config"
        )
    return fields


def _what_instead(path: Path) -> str:
    """What a directory without config.json holds, and what to do about it."""
    if (path / "adapter_config.json").is_file():
        return "only a LoRA adapter, expected a full model, merge the adapter into its base model and save that"
    if (path / "params.json").is_file() or any(path.glob("consolidated.*.pth")):
        return "but Meta's form, which is not read yet, expected Hugging Face's form, convert it"
    files = sorted(path.glob("*.gguf"))
    if files:
        return f"but a GGUF file, expected Hugging Face's form, pass the file itself: {files[0]}"
    return "expected a model in Hugging Face's form, check the path"


def _locate(path: Path) -> dict[str, WeightFile]:
    """The opened file of every tensor in the directory."""
    found = next((name for name in _WEIGHTS if (path / name).is_file()), None)
    if found is None:
        meta = " (Meta's form, which is not read yet, is there)" if any(path.glob("consolidated.*.pth")) else ""
        raise UserError(
            f"found no weights in {path}{meta}, expected one of {', '.join(_WEIGHTS)}, download or convert them"
        )
    if found.endswith(".index.json"):
        return _locate_shards(path / found)
    file = open_weight_file(path / found)
    return dict.fromkeys(file.shapes, file)


def _locate_shards(index: Path) -> dict[str, WeightFile]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(
            f"found {index} without a weight_map, expected tensor names with their files, download it again"
        )
    shards = {shard: open_weight_file(_shard_path(index, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard].shapes:
            raise UserError(
                f"found no tensor {name} in {index.parent / shard}, expected it by {index}, download both again"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def _shard_path(index: Path, shard: str) -> Path:
    relative = PurePosixPath(shard)
    # The hub's cache links files to a folder beside it, so the path as written is what must stay inside.
    if relative.is_absolute() or ".." in relative.parts or "\\" in shard:
        raise UserError(f"found the shard path {shard!r} in {index}, expected a file inside the directory, correct it")
    path = index.parent / relative
    if not path.is_file():
        raise UserError(f"found no file {path}, expected it by {index.name}, download the missing shard")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"found invalid JSON in {path} ({error}), expected an object, download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"found a {type(value).__name__} in {path}, expected a JSON object, download it again")
    return value
