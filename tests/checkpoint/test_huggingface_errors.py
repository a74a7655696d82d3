"""Directories in Hugging Face's form that can't work: each has its one line, which names the file or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpllama.checkpoint.open import open_checkpoint

State = dict[str, torch.Tensor]


@pytest.fixture
def fails_to_open(fails: Any) -> Callable[..., None]:
    return lambda directory, *parts: fails(lambda: open_checkpoint(str(directory)), *parts)


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "{}")]
)
def test_a_damaged_tokenizer_is_an_error(fails: Any, directory: Path, file: str, content: str) -> None:
    (directory / file).write_text(content)
    fails(lambda: open_checkpoint(str(directory), weights=False).tokenizer(), str(directory), "tokenizer files")


def test_no_config(fails_to_open: Any, tmp_path: Path) -> None:
    fails_to_open(tmp_path, "config.json", str(tmp_path), "it is empty")


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_invalid_config(fails_to_open: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    fails_to_open(tmp_path, "config.json")


def test_gguf_in_a_directory_is_named(fails_to_open: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    fails_to_open(tmp_path, "GGUF", str(tmp_path / "model.gguf"))


def test_quantized_checkpoint_is_named(fails_to_open: Any, directory: Path, tiny_config: dict[str, Any]) -> None:
    config = tiny_config | {"quantization_config": {"quant_method": "gptq"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"")
    fails_to_open(directory, "'gptq'")


def test_no_weights_lists_what_was_looked_for(fails_to_open: Any, directory: Path) -> None:
    fails_to_open(directory, "config.json", "model.safetensors,", "pytorch_model.bin", "consolidated.NN.pth")


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_invalid_index(fails_to_open: Any, directory: Path, content: str) -> None:
    (directory / "model.safetensors.index.json").write_text(content)
    fails_to_open(directory, "model.safetensors.index.json")


def test_missing_shard(fails_to_open: Any, directory: Path, write_weights: Any, tiny_state: State) -> None:
    write_weights(directory, tiny_state, "sharded-safetensors")
    (directory / "model-00002-of-00002.safetensors").unlink()
    fails_to_open(directory, "model-00002-of-00002.safetensors", "missing shard")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "a/../../b.safetensors", "..\\b"])
def test_shard_outside_the_directory(fails_to_open: Any, directory: Path, shard: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    fails_to_open(directory, repr(shard), "inside the directory")


def test_tensor_missing_in_its_shard(
    fails_to_open: Any, directory: Path, write_weights: Any, tiny_state: State
) -> None:
    write_weights(directory, tiny_state, "sharded-safetensors")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"extra": "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    fails_to_open(directory, "no tensor extra", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("layout", ["safetensors", "bin", "legacy-bin"])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_weights(
    fails_to_open: Any, directory: Path, tiny_state: State, write_weights: Any, layout: str, kept: float
) -> None:
    write_weights(directory, tiny_state, layout)
    file = next(path for path in directory.iterdir() if path.name != "config.json")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    fails_to_open(directory, file.name)


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_garbage_instead_of_weights(
    fails_to_open: Any, directory: Path, tiny_state: State, write_weights: Any, layout: str
) -> None:
    write_weights(directory, tiny_state, layout)
    file = next(path for path in directory.iterdir() if path.name != "config.json")
    file.write_bytes(b"<html>not found</html>" * 100)
    fails_to_open(directory, file.name)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"a": Path("code")}, "weights_only"),
        ([torch.ones(1)], "a list"),
        ({"model": {"a": torch.ones(1)}, "epoch": 3}, "'model'"),
        ({1: torch.ones(1)}, "found 1"),
    ],
)
def test_bin_holding_something_else(fails_to_open: Any, directory: Path, content: object, part: str) -> None:
    torch.save(content, directory / "pytorch_model.bin")
    fails_to_open(directory, "pytorch_model.bin", part)
