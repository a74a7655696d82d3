"""Quantized checkpoints for tests: written here, and read as loading on one rank reads them, without the packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpllama import export as composition
from tpllama.checkpoint.open import open_for
from tpllama.config import EngineConfig
from tpllama.export import export
from tpllama.quantization.neutral import parts_of
from tpllama.quantization.quantize import quantize
from tpllama.start import draw_blueprint

# Every class of torchao's that is written.
MIXED = {"*.q_proj": "int8dq", "*.o_proj": "8da4w-32", "*.mlp.*": "int4wo-32", "*.k_proj": "int8wo", "*": "fp8wo"}


def quantize_to(
    out: Path, model: str | Path, recipe: str | dict[str, str], shard_bytes: int = 0, **engine: Any
) -> Path:
    """`tpllama quantize`, in this process; in shards of `shard_bytes` if given."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(recipe, dict):
        path = out.with_suffix(".map.json")
        path.write_text(json.dumps(recipe))
        recipe = f"@{path}"
    config = EngineConfig(str(model), **{"torchao_config": recipe, "device": "cpu", "dtype": "float32", **engine})
    checkpoint = open_for(config)
    usual = composition._SHARD_BYTES
    composition._SHARD_BYTES = shard_bytes or usual
    try:
        export(draw_blueprint(config, checkpoint), checkpoint, out)
    finally:
        composition._SHARD_BYTES = usual
    return out


def weights_of(model: str | Path, **engine: Any) -> dict[str, dict[str, Tensor]]:
    """The parts of each weight after loading, quantized at load where asked. Raises UserError as loading does."""
    config = EngineConfig(str(model), **{"device": "cpu", "dtype": "float32", **engine})
    checkpoint = open_for(config)
    blueprint = draw_blueprint(config, checkpoint)
    dtype, weights = blueprint.dtype, {}
    for name, shape in blueprint.shapes.items():
        whole = tuple(slice(0, size) for size in shape)
        decision = blueprint.decisions.get(name.removesuffix(".weight"))
        if form := blueprint.stored.get(name):
            parts = checkpoint.quantized[name].parts
            read = {part: checkpoint.read(parts[part], index) for part, index in form.slices(*whole).items()}
            weights[name] = parts_of(form.assemble(read, dtype))
        elif decision is not None and decision.recipe is not None:
            weights[name] = parts_of(quantize(checkpoint.read(name, whole).to(dtype), decision.recipe, whole[1]))
        else:
            weights[name] = {"plain": checkpoint.read(name, whole).to(dtype)}
    return weights


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_equal_weights(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        assert found[name].keys() == parts.keys()
        for part, values in parts.items():
            assert found[name][part].dtype == values.dtype, (name, part)
            assert found[name][part].shape == values.shape, (name, part)
            assert torch.equal(bits(found[name][part]), bits(values)), (name, part)
