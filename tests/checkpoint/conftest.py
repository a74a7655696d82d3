"""Small model files, written by the formats' own libraries, and what they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tpllama.checkpoint.open import Checkpoint
from tpllama.config import UserError

# The numbers that every form states.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY: dict[str, Any] = {**SIZES, "max_position_embeddings": 128}
# Of a GGUF file with the same numbers.
TINY_METADATA = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
}

State = dict[str, torch.Tensor]
WriteGguf = Callable[..., Path]
ReadWhole = Callable[[Checkpoint, str], torch.Tensor]


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return {"model_type": "llama", "eos_token_id": 2, **TINY}


@pytest.fixture
def tiny_metadata() -> dict[str, Any]:
    return dict(TINY_METADATA)


@pytest.fixture(scope="session")
def tiny_state() -> State:
    """Weights of a tiny Llama with biases, in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return {name: value.to(torch.bfloat16).clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="session")
def state(tiny_state: State) -> State:
    """Without biases, which Meta's models don't have."""
    return {name: value for name, value in tiny_state.items() if not name.endswith(".bias")}


@pytest.fixture
def directory(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """A directory with config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    return tmp_path


@pytest.fixture
def hf_directory(directory: Path, tiny_state: State) -> Path:
    """A directory with config.json and model.safetensors."""
    write_layout(directory, tiny_state, "safetensors")
    return directory


@pytest.fixture
def write_weights() -> Callable[[Path, State, str], None]:
    return write_layout


def write_layout(path: Path, state: State, layout: str) -> None:
    """Writes `state` into a directory, in one of the layouts in use."""
    match layout:
        case "safetensors":
            save_file(state, path / "model.safetensors")
        case "bin":
            torch.save(state, path / "pytorch_model.bin")
        case "legacy-bin":
            torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        case "sharded-safetensors":
            _write_shards(path, state, "model", "safetensors", save_file)
        case "sharded-bin":
            _write_shards(path, state, "pytorch_model", "bin", torch.save)


def _write_shards(path: Path, state: State, stem: str, suffix: str, save: Callable[[State, Path], None]) -> None:
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        shard = f"{stem}-0000{number}-of-00002.{suffix}"
        part = dict(list(state.items())[number - 1 :: 2])
        save(part, path / shard)
        weight_map |= dict.fromkeys(part, shard)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    return lambda *args, **kwargs: write_gguf_file(tmp_path / "model.gguf", *args, **kwargs)


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]] | None = None,
    architecture: str = "llama",
) -> Path:
    """`tensors` are arrays, bytes for quantized types, with the name of their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, (array, kind) in (tensors or {"token_embd.weight": (np.zeros((40, 64), np.float32), "F32")}).items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def fails() -> Callable[..., None]:
    """Checks that an action raises one line that says what was found and contains `parts`."""

    def check(action: Callable[[], object], *parts: str) -> None:
        with pytest.raises(UserError) as caught:
            action()
        message = str(caught.value)
        assert message.startswith("found ")
        assert "\n" not in message
        for part in ("expected", *parts):
            assert part in message

    return check


@pytest.fixture
def read_whole() -> ReadWhole:
    def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        return checkpoint.read(name, tuple(slice(0, size) for size in checkpoint.tensors[name].shape))

    return read
