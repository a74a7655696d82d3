"""`tpllama quantize`: from a blueprint and files to a quantized checkpoint, one block of rows at a time.

Part of the composition root (see `build.py`). What is written is torchao's neutral tensors in safetensors, as
transformers reads them: the integers and scales that every TP degree has after loading the original here.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpllama import __version__
from tpllama.blueprint import EMBEDDING, Blueprint
from tpllama.build import Progress
from tpllama.checkpoint.manifest import source_identity, write_manifest
from tpllama.checkpoint.names import part_name
from tpllama.checkpoint.open import Checkpoint, overridden
from tpllama.checkpoint.paths import check_inside
from tpllama.checkpoint.save import Entry, TensorFile, new_directory
from tpllama.checkpoint.weight_set import read_json
from tpllama.config import UserError
from tpllama.quantization.neutral import blank, description, layout_of, parts_of
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import HEAD, Recipe
from tpllama.quantization.saved_config import quantization_config
from tpllama.reading import BlockReader, Job, no_finite_number, reading_ahead

# As large as a shard may become; a single larger weight has its own.
_SHARD_BYTES = 2 << 30
# Nothing stays in memory here, so page faults are cheap beside the writing, and what is freed goes back soon.
_HELD_BYTES = 16 << 20


@dataclass(frozen=True)
class _Weight:
    """A weight to write. like: of what kind it is, without values. source: the tensor that it is made from."""

    name: str
    source: str
    like: Tensor
    recipe: Recipe | None

    def entries(self) -> dict[str, Entry]:
        """The plain tensors in the file."""
        if self.recipe is None:
            return {self.name: Entry(tuple(self.like.shape), self.like.dtype)}
        return {self.part(name): Entry(tuple(part.shape), part.dtype) for name, part in parts_of(self.like).items()}

    def part(self, name: str) -> str:
        """torchao's name for a part of a weight in safetensors."""
        return part_name(self.name, name)


def export(blueprint: Blueprint, checkpoint: Checkpoint, out: Path, progress: Progress = list) -> None:
    """Writes the checkpoint that `blueprint` describes into the new directory `out`.

    Raises UserError: nothing would be quantized, `out` can't be made, damaged source files.
    """
    if checkpoint.quantized:
        raise UserError(
            f"found {checkpoint.path} quantized already, expected an original, give the one it was made from"
        )
    if blueprint.engine.load_format == "dummy":
        raise UserError("found --load-format dummy, expected weights to quantize, leave it out")
    weights = list(_weights(blueprint))
    if not any(weight.recipe for weight in weights):
        raise UserError("found torchao config none, expected a recipe to quantize to, give --torchao-config")
    metadata = {weight.name: description(weight.like) for weight in weights}
    # Each shard says it all: transformers joins the metadata of all, where the list of names of one replaces another's.
    metadata |= {"format": "pt", "tensor_names": json.dumps(list(metadata))}
    shards = list(_shards(weights))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    num_bytes = sum(entry.num_bytes for weight in weights for entry in weight.entries().values())
    with new_directory(out, num_bytes) as folder:
        _write_small_files(blueprint, checkpoint, folder)  # first: what can't be read is an error before hours of work
        reader = BlockReader(checkpoint, blueprint.dtype, torch.device("cpu"), blueprint.engine.strict, _HELD_BYTES)
        steps = [(_jobs(reader, weight), weight) for weight in weights]
        todo = iter(reading_ahead(checkpoint, progress(steps)))
        for name, shard in zip(names, shards, strict=True):
            entries = {key: entry for weight in shard for key, entry in weight.entries().items()}
            with TensorFile(folder / name, entries, metadata) as file:
                for jobs, weight in itertools.islice(todo, len(shard)):
                    _write(file, weight, jobs, reader)
        assert next(todo, None) is None, "every weight is in a shard"
        if len(shards) > 1:
            _write_index(folder / "model.safetensors.index.json", dict(zip(names, shards, strict=True)))
        write_manifest(folder, _facts(blueprint, checkpoint, weights), [folder / name for name in names])
        # The config makes it a checkpoint, so it comes last.
        _write_json(folder / "config.json", _config(blueprint, checkpoint, weights))


def _weights(blueprint: Blueprint) -> Iterator[_Weight]:
    """Every weight to write, biases and norms included, in the order of the model's forward."""
    for name, shape in blueprint.shapes.items():
        yield _weight(blueprint, name, name, shape)
    decision = blueprint.decisions.get(HEAD)
    if blueprint.config.tie_word_embeddings and decision is not None and decision.recipe is not None:
        source = f"{EMBEDDING}.weight"
        yield _weight(blueprint, f"{HEAD}.weight", source, blueprint.shapes[source])


def _weight(blueprint: Blueprint, name: str, source: str, shape: tuple[int, ...]) -> _Weight:
    decision = blueprint.decisions.get(name.removesuffix(".weight"))
    if decision is None or decision.recipe is None:
        return _Weight(name, source, torch.empty(shape, dtype=blueprint.dtype, device="meta"), None)
    rows, columns = shape
    return _Weight(name, source, blank(decision.recipe, rows, columns, blueprint.dtype), decision.recipe)


def _shards(weights: list[_Weight]) -> Iterator[list[_Weight]]:
    """The weights in files of at most _SHARD_BYTES."""
    shard: list[_Weight] = []
    total = 0
    for weight in weights:
        size = sum(entry.num_bytes for entry in weight.entries().values())
        if shard and total + size > _SHARD_BYTES:
            yield shard
            shard, total = [], 0
        shard.append(weight)
        total += size
    yield shard


def _jobs(reader: BlockReader, weight: _Weight) -> list[Job]:
    index = tuple(slice(0, size) for size in weight.like.shape)
    if weight.recipe is not None and weight.recipe.family.extent == "tensor":
        return [(weight.source, index)]
    rows, *columns = index
    blocks = reader.row_blocks(rows, math.prod(weight.like.shape[1:]))
    return [(weight.source, (block, *columns)) for block in blocks]


def _write(file: TensorFile, weight: _Weight, jobs: list[Job], reader: BlockReader) -> None:
    """Quantizes one weight block by block, and writes it."""
    layout = layout_of(type(weight.like).__name__)
    for name, index in jobs:
        block, rows = reader.read(name, index), index[0]
        if reader.bad:
            raise no_finite_number(reader.bad)
        if weight.recipe is None:
            file.write(weight.name, block, rows.start)
            continue
        quantized = quantize(block, weight.recipe, slice(0, block.shape[1]))
        for part, values in parts_of(quantized).items():
            file.write(weight.part(part), values, rows.start, layout.row_dim(part))


def _write_index(path: Path, shards: dict[str, list[_Weight]]) -> None:
    entries = {
        key: (name, entry) for name, shard in shards.items() for each in shard for key, entry in each.entries().items()
    }
    size = sum(entry.num_bytes for _, entry in entries.values())
    weight_map = {key: name for key, (name, _) in entries.items()}
    _write_json(path, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_small_files(blueprint: Blueprint, checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer and generation config."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    folders = (checkpoint.path, *([checkpoint.base_path] if checkpoint.base_path else []))
    path = next((path for each in folders if (path := each / "generation_config.json").is_file()), None)
    generation = read_json(check_inside(path)) if path else {}
    eos = checkpoint.eos_token_ids or blueprint.config.eos_token_ids
    _write_json(folder / "generation_config.json", generation | ({"eos_token_id": list(eos)} if eos else {}))


def _config(blueprint: Blueprint, checkpoint: Checkpoint, weights: list[_Weight]) -> dict[str, Any]:
    """config.json as transformers expects it."""
    fields = overridden(checkpoint, blueprint.engine.json_model_override_args)
    fields = {key: value for key, value in fields.items() if key not in ("torch_dtype", "dtype", "architectures")}
    recipes = {name: decision.recipe for name, decision in blueprint.decisions.items()}
    is_head_own = any(weight.name == f"{HEAD}.weight" for weight in weights)
    return {
        "architectures": ["LlamaForCausalLM"],
        **fields,
        "model_type": "llama",
        "dtype": blueprint.engine.dtype,
        "tie_word_embeddings": blueprint.config.tie_word_embeddings and not is_head_own,
        "quantization_config": quantization_config(recipes),
    }


def _facts(blueprint: Blueprint, checkpoint: Checkpoint, weights: list[_Weight]) -> dict[str, Any]:
    """What the manifest says beside the files: where this came from, and what became of each weight."""
    packages = ("torch", "torchao", "safetensors", "transformers")
    return {
        "source": {"model": blueprint.name, "files": {file.name: source_identity(file) for file in checkpoint.files}},
        "recipe": blueprint.recipes.name,
        "dtype": blueprint.engine.dtype,
        "layers": {weight.name: weight.recipe.name if weight.recipe else "none" for weight in weights},
        "versions": {"tpllama": __version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
