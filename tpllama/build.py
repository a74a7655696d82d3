"""From a blueprint and files to a model that runs: shard, then load, quantize and pack one weight at a time.

Peak memory of a rank is its packed share and about one weight more.
"""

from __future__ import annotations

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
from tpllama.quantization.quantize import columns_to_read, quantize
from tpllama.quantization.recipes import HEAD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

    def load(self, model: Llama) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                model.set_submodule(name, self._linear(name, module, model))
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    loaded = self._read(f"{name}.{parameter_name}", owned_slices(parameter))
                    module.register_parameter(parameter_name, nn.Parameter(loaded, requires_grad=False))
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
        reading = columns_to_read(recipe, columns, self.blueprint.shapes[source][1])
        weight = self._read(source, (rows, reading))
        own = slice(columns.start - reading.start, columns.stop - reading.start)
        is_scale_shared = is_row_split or (self.ranks.size > 1 and recipe.family.extent == "tensor")
        neutral = quantize(weight, recipe, own, self.ranks.max if is_scale_shared else None)
        del weight
        return pack(neutral, bias, self.device.type, agree_max)

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        tensor = self.checkpoint.read(name, index).to(self.device, self.blueprint.dtype)
        if self.blueprint.engine.strict and self.bad is None and not bool(tensor.isfinite().all()):
            self.bad = name
        return tensor

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


def _connect(model: Llama, blueprint: Blueprint, ranks: Ranks) -> None:
    """Adds the collectives of split modules, which hold their local weights by now."""
    if ranks.size == 1:
        return
    for name, module in model.named_modules():
        style = style_of(blueprint.plan, name)
        if style is not None and style.connect is not None:
            style.connect(module, ranks, style.ranges[ranks.rank])


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
