"""From a blueprint and files to a model that runs: shard, then load, quantize and pack one weight at a time.

The composition root is `prepare.py` (the leader's way to an engine), `follow.py` (a follower's), `start.py` (a
rank's start), `blueprint.py` (what will be built), this file and `export.py` (what is written): only there do the axes
meet.

Peak memory of a rank is its packed share and about one weight more (bench/load_memory.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpllama.blueprint import EMBEDDING, Blueprint, meta_model
from tpllama.checkpoint.dummy import DummyCheckpoint
from tpllama.checkpoint.open import Checkpoint
from tpllama.config import UserError
from tpllama.engine.executor import ModelMetadata
from tpllama.kernels.layer import FusedLayer, FusedNorm, RecordedLayers, fits
from tpllama.kernels.pack import pack, tied_embedding
from tpllama.kernels.pages import WeightMemory
from tpllama.model.llama import Decoder, Llama
from tpllama.parallel.collectives import Ranks
from tpllama.parallel.plan import style_of
from tpllama.parallel.shard import owned_slices, shard
from tpllama.quantization.neutral import parts_of
from tpllama.quantization.quantize import columns_to_read, cut_columns, join_rows, quantize
from tpllama.quantization.recipes import HEAD
from tpllama.reading import BlockReader, Job, no_finite_number, reading_ahead

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Passes on what it is given, and shows how much of it is done.
Progress = Callable[[list[Any]], Iterable[Any]]
# Installs one module, of the tensors that its jobs read.
Place = Callable[[Iterator[Tensor]], None]


class LlamaLoader:
    """A ModelLoader: this rank's share of a Llama. `progress` sees each module."""

    def __init__(
        self, blueprint: Blueprint, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: Ranks, device: torch.device,
        progress: Progress = list,
    ) -> None:  # fmt: skip
        self._blueprint = blueprint
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._ranks = ranks
        self._device = device
        self._progress = progress

    @property
    def metadata(self) -> ModelMetadata:
        return self._blueprint.metadata(self._ranks.rank)

    def load(self) -> Llama:
        """Raises UserError for damaged files and, with strict, for values that are no numbers."""
        blueprint, checkpoint = self._blueprint, self._checkpoint
        model = meta_model(blueprint.config)
        if self._mesh is not None:
            shard(model, self._mesh, blueprint.plan)
        if blueprint.engine.load_format == "dummy":
            checkpoint = DummyCheckpoint(checkpoint, blueprint.shapes, blueprint.engine.seed)
        _Loader(blueprint, checkpoint, self._ranks, self._device).load(model, self._progress)
        _connect(model, blueprint, self._ranks)
        model.model.rotary.to(self._device)
        if blueprint.engine.compile == "on":
            # Tuned, a product with one row is fused with what widens its weight; a GPU's alone.
            options = {"coordinate_descent_tuning": True} if self._device.type == "cuda" else None
            for layer in model.model.layers:
                layer.compile(dynamic=True, options=options)
        return model


class _Loader:
    """Fills one model, module by module in the order of its forward."""

    def __init__(self, blueprint: Blueprint, checkpoint: Checkpoint, ranks: Ranks, device: torch.device) -> None:
        self.blueprint = blueprint
        self.checkpoint = checkpoint
        self.ranks = ranks
        self.device = device
        self.memory = WeightMemory()
        is_strict, placed = blueprint.engine.strict, lambda: self.memory.placed_bytes
        self.reader = BlockReader(checkpoint, blueprint.dtype, device, is_strict, placed_bytes=placed)
        self.is_fused = fits(blueprint.dtype, device) and blueprint.engine.compile != "on"

    def load(self, model: Llama, progress: Progress) -> None:
        try:
            for jobs, place in reading_ahead(self.checkpoint, progress(list(self._steps(model)))):
                place(self.reader.read(*job) for job in jobs)
        except UserError as error:
            error.rank = self.ranks.rank
            raise
        self._agree_on_bad_values()

    def _steps(self, model: Llama) -> Iterator[tuple[list[Job], Place]]:
        """What to read for each module, and how it is installed then; a layer that is whole is fused."""
        decoder = model.model
        ends = {[*layer.modules()][-1]: index for index, layer in enumerate(decoder.layers)} if self.is_fused else {}
        for name, module in model.named_modules():
            if name == EMBEDDING and self._is_head_tied:
                yield self._tied_embedding(model)
            elif name == HEAD and self._is_head_tied:
                continue
            elif isinstance(module, nn.Linear):
                yield self._linear(name, module, model)
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    index = owned_slices(parameter)
                    place = functools.partial(self._place_parameter, module, parameter_name)
                    yield [(f"{name}.{parameter_name}", index)], place
            if module in ends:
                yield [], functools.partial(self._fuse, decoder.layers, ends[module])
            elif self.is_fused and module is decoder.norm:
                yield [], lambda _: self._fuse_rest(decoder)

    def _fuse(self, layers: nn.ModuleList, index: int, _: Iterator[Tensor]) -> None:
        layers[index] = self.memory.place(FusedLayer(layers[index], self.memory.place))

    def _fuse_rest(self, decoder: Decoder) -> None:
        decoder.set_submodule("norm", FusedNorm(decoder.norm))
        decoder.set_submodule("layers", RecordedLayers(decoder.layers))

    def _linear(self, name: str, linear: nn.Linear, model: Llama) -> tuple[list[Job], Place]:
        style = style_of(self.blueprint.plan, name)
        is_row_split = self.ranks.size > 1 and style is not None and style.dim == 1
        jobs, weight_of = self._weight(name, linear, model, is_row_split)
        bias = [] if linear.bias is None else [(f"{name}.bias", owned_slices(linear.bias))]

        def place(tensors: Iterator[Tensor]) -> None:
            own_bias = next(tensors) if bias else None
            agree_max = self.ranks.max if is_row_split else None
            packed = pack(weight_of(tensors), own_bias, self.device.type, agree_max)
            is_placed_later = self.is_fused and ".layers." in name
            model.set_submodule(name, packed if is_placed_later else self.memory.place(packed))

        return [*bias, *jobs], place

    @property
    def _is_head_tied(self) -> bool:
        """Whether head and embedding are one memory."""
        return self.blueprint.config.tie_word_embeddings and self.blueprint.decisions[HEAD].recipe is None

    def _tied_embedding(self, model: Llama) -> tuple[list[Job], Place]:
        """Packed as the head, which reads all of it in each step; of the embedding a few rows are looked up."""

        def place(tensors: Iterator[Tensor]) -> None:
            head = self.memory.place(pack(next(tensors), None, self.device.type))
            model.set_submodule(HEAD, head)
            model.set_submodule(EMBEDDING, tied_embedding(head))

        return [(f"{EMBEDDING}.weight", owned_slices(model.model.embed_tokens.weight))], place

    def _weight(
        self, name: str, linear: nn.Linear, model: Llama, is_row_split: bool
    ) -> tuple[list[Job], Callable[[Iterator[Tensor]], Tensor]]:
        """What to read for a linear's weight, and the plain or neutral tensor that becomes of it."""
        recipe = self.blueprint.decisions[name].recipe
        is_tied = name == HEAD and self.blueprint.config.tie_word_embeddings
        rows, columns = owned_slices(linear.weight)
        source = f"{EMBEDDING if is_tied else name}.weight"
        if recipe is None:
            return [(source, (rows, columns))], next
        in_features = linear.weight.shape[1]
        reading = columns_to_read(recipe, columns, in_features)
        own = slice(columns.start - reading.start, columns.stop - reading.start)
        if stored := self.blueprint.stored.get(source):
            parts = self.checkpoint.quantized[source].parts
            slices = stored.slices(rows, reading)

            def assembled(tensors: Iterator[Tensor]) -> Tensor:
                weight = stored.assemble(dict(zip(slices, tensors, strict=True)), self.blueprint.dtype)
                self.reader.check(source, *parts_of(weight).values())
                return cut_columns(weight, own)

            return [(parts[part], index) for part, index in slices.items()], assembled
        is_of_tensor = recipe.family.extent == "tensor"
        is_scale_shared = is_row_split or (self.ranks.size > 1 and is_of_tensor)
        agree_scale = self.ranks.max if is_scale_shared else None
        # Ranks that agree on scales have the same rows, and so the same blocks.
        blocks = [rows] if is_of_tensor else self.reader.row_blocks(rows, in_features)
        return [(source, (block, reading)) for block in blocks], lambda tensors: join_rows(
            (quantize(tensor, recipe, own, agree_scale) for tensor in tensors), rows.stop - rows.start
        )

    def _place_parameter(self, module: nn.Module, name: str, tensors: Iterator[Tensor]) -> None:
        module.register_parameter(name, nn.Parameter(next(tensors), requires_grad=False))
        self.memory.place(module)

    def _agree_on_bad_values(self) -> None:
        """Every rank raises alike, whichever found a value that is no finite number."""
        if not self.blueprint.engine.strict:
            return
        names = list(self.blueprint.shapes)
        bad = self.reader.bad
        place = names.index(bad) if bad in names else -1
        worst = int(self.ranks.max(torch.tensor([place], device=self.device)))
        if worst >= 0:
            raise no_finite_number(names[worst])


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
        size = tensor.numel() * tensor.element_size()
        seen[storage.data_ptr()] = max(size, seen.get(storage.data_ptr(), 0))  # of parts and their whole, the whole
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
