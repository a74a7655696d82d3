"""From a blueprint and files to a model that runs: shard, then load, quantize and pack one weight at a time.

The composition root is `prepare.py` (the leader's way to an engine), `follow.py` (a follower's), `start.py` (a
rank's start), `blueprint.py` (what will be built) and this file: only there do the axes meet.

Peak memory of a rank is its packed share and about one weight more (bench/load_memory.py).
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpllama.blueprint import EMBEDDING, Blueprint, meta_model
from tpllama.checkpoint.dummy import DummyCheckpoint
from tpllama.checkpoint.open import Checkpoint
from tpllama.config import UserError
from tpllama.engine.runner import Runner
from tpllama.kernels.pack import pack
from tpllama.model.llama import Llama
from tpllama.parallel.collectives import Ranks
from tpllama.parallel.plan import style_of
from tpllama.parallel.shard import owned_slices, shard
from tpllama.quantization.quantize import columns_to_read, join_rows, quantize
from tpllama.quantization.recipes import HEAD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Rows are read and quantized in blocks of about so many elements: conversions take several times their bytes.
# On the CPU they stay in its caches; a GPU wants fewer and larger steps.
_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}
# Freed memory goes back to the system each time so many elements have been read.
_GIVE_BACK_ELEMENTS = 1 << 23


def build(
    blueprint: Blueprint, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: Ranks, device: torch.device
) -> Runner:
    """Loads this rank's share. Raises UserError for damaged files and, with strict, for values that are no numbers."""
    model = meta_model(blueprint.config)
    if mesh is not None:
        shard(model, mesh, blueprint.plan)
    if blueprint.engine.load_format == "dummy":
        checkpoint = DummyCheckpoint(checkpoint, blueprint.shapes, blueprint.engine.seed)
    _Loader(blueprint, checkpoint, ranks, device).load(model)
    _connect(model, blueprint, ranks)
    model.model.rotary.to(device)
    if blueprint.engine.compile == "on":
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    return Runner(
        model, ranks, blueprint.heads(ranks.rank), blueprint.owned_tokens(ranks.rank), blueprint.dtype, device
    )


class _Loader:
    """Fills one model, module by module in the order of its forward."""

    def __init__(self, blueprint: Blueprint, checkpoint: Checkpoint, ranks: Ranks, device: torch.device) -> None:
        self.blueprint = blueprint
        self.checkpoint = checkpoint
        self.ranks = ranks
        self.device = device
        self.names = list(blueprint.shapes)
        self.bad: str | None = None
        self.read_since_give_back = 0

    def load(self, model: Llama) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                model.set_submodule(name, self._linear(name, module, model))
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    loaded = self._read(f"{name}.{parameter_name}", owned_slices(parameter))
                    module.register_parameter(parameter_name, nn.Parameter(loaded, requires_grad=False))
        _give_back_memory()
        self._agree_on_bad_values()

    def _linear(self, name: str, linear: nn.Linear, model: Llama) -> nn.Module:
        recipe = self.blueprint.decisions[name].recipe
        bias = None if linear.bias is None else self._read(f"{name}.bias", owned_slices(linear.bias))
        is_tied = name == HEAD and self.blueprint.config.tie_word_embeddings
        if is_tied and recipe is None:
            return pack(model.model.embed_tokens.weight.detach(), bias, self.device.type)
        rows, columns = owned_slices(linear.weight)
        source = f"{EMBEDDING if is_tied else name}.weight"
        style = style_of(self.blueprint.plan, name)
        is_row_split = self.ranks.size > 1 and style is not None and style.dim == 1
        agree_max = self.ranks.max if is_row_split else None
        if recipe is None:
            return pack(self._read(source, (rows, columns)), bias, self.device.type, agree_max)
        in_features = self.blueprint.shapes[source][1]
        reading = columns_to_read(recipe, columns, in_features)
        own = slice(columns.start - reading.start, columns.stop - reading.start)
        is_of_tensor = recipe.family.extent == "tensor"
        is_scale_shared = is_row_split or (self.ranks.size > 1 and is_of_tensor)
        agree_scale = self.ranks.max if is_scale_shared else None
        # Ranks that agree on scales have the same rows, and so the same blocks.
        blocks = [rows] if is_of_tensor else self._row_blocks(rows, in_features)
        parts = (quantize(self._read(source, (block, reading)), recipe, own, agree_scale) for block in blocks)
        return pack(join_rows(parts, rows.stop - rows.start), bias, self.device.type, agree_max)

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of a weight, or all of it, in the model's dtype on this rank's device."""
        rows, *columns = index
        blocks = self._row_blocks(rows, columns[0].stop - columns[0].start if columns else 1)
        if len(blocks) == 1:
            return self._read_block(name, index)
        shape = [part.stop - part.start for part in index]
        whole = torch.empty(shape, dtype=self.blueprint.dtype, device=self.device)
        for block in blocks:
            whole[block.start - rows.start : block.stop - rows.start] = self._read_block(name, (block, *columns))
        return whole

    def _read_block(self, name: str, index: tuple[slice, ...]) -> Tensor:
        if self.read_since_give_back >= _GIVE_BACK_ELEMENTS:
            _give_back_memory()
            self.read_since_give_back = 0
        self.read_since_give_back += math.prod(part.stop - part.start for part in index)
        tensor = self.checkpoint.read(name, index).to(self.device, self.blueprint.dtype)
        if self.blueprint.engine.strict and self.bad is None and not bool(tensor.isfinite().all()):
            self.bad = name
        return tensor

    def _row_blocks(self, rows: slice, columns: int) -> list[slice]:
        """Rows in blocks of about _BLOCK_ELEMENTS, with borders at multiples of 256."""
        size = max(_BLOCK_ELEMENTS[self.device.type] // columns // 256, 1) * 256
        inner = range((rows.start // size + 1) * size, rows.stop, size)
        return [slice(*borders) for borders in itertools.pairwise((rows.start, *inner, rows.stop))]

    def _agree_on_bad_values(self) -> None:
        """Every rank raises alike, whichever found a value that is no finite number."""
        if not self.blueprint.engine.strict:
            return
        place = self.names.index(self.bad) if self.bad else -1
        worst = int(self.ranks.max(torch.tensor([place], device=self.device)))
        if worst >= 0:
            raise UserError(
                f"found a value that is no finite number in tensor {self.names[worst]}, expected none under --strict, "
                f"get an undamaged checkpoint"
            )


def _give_back_memory() -> None:
    """Gives memory freed by conversions back to the system; glibc would keep it in pieces that the next don't fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _connect(model: Llama, blueprint: Blueprint, ranks: Ranks) -> None:
    """Adds the collectives of split modules, which hold their local weights by now."""
    if ranks.size == 1:
        return
    for name, module in list(model.named_modules()):
        style = style_of(blueprint.plan, name)
        if style is not None and style.connect is not None:
            model.set_submodule(name, style.connect(module, ranks, style.ranges[ranks.rank]))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a loaded model holds on this rank, each shared storage once."""
    seen: dict[int, int] = {}
    for tensor in _plain_tensors(model):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    rope = {id(buffer) for module in model.modules() if hasattr(module, "inv_freq") for buffer in module.buffers()}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in rope:
            continue
        if hasattr(tensor, "tensor_data_names"):
            yield from (getattr(tensor, name) for name in tensor.tensor_data_names)
        else:
            yield tensor
