"""The shapes that are measured where no weights of that size are at hand, and checkpoints of random weights."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.2-1B.
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    # Llama-3.1-8B.
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    # A quarter of a billion weights, most of them in the layers.
    "small": {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
    },
    # For tests: uneven at 2 and 3 ranks.
    "tiny": {
        "vocab_size": 211, "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
    },
}  # fmt: skip


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    """A config.json of a shape: enough for --load-format dummy."""
    config = {"model_type": "llama", "max_position_embeddings": 8192, **fields}
    (folder / "config.json").write_text(json.dumps(config))


def write_checkpoint(folder: Path, fields: dict[str, Any]) -> None:
    """A checkpoint in Hugging Face form, one shard for each layer, written without ever holding more than one."""
    import torch
    from safetensors.torch import save_file

    from tpllama.blueprint import meta_model
    from tpllama.llama_config import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, fields)
    tile = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    shards: dict[str, dict[str, Any]] = {}
    for name, parameter in meta_model(LlamaConfig.from_hf(fields)).named_parameters():
        layer = name.split(".")[2] if name.startswith("model.layers.") else name
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = parameter.shape
    for shard, shapes in shards.items():
        tensors = {}
        for name, shape in shapes.items():
            count = math.prod(shape)
            start = zlib.crc32(name.encode()) % tile.numel()  # no two alike: some programs keep equal tensors once
            tensors[name] = tile.roll(-start).repeat(-(-count // tile.numel()))[:count].view(shape).clone()
        save_file(tensors, folder / shard, {"format": "pt"})
    weight_map = {name: shard for shard, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
