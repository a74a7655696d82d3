"""One file of weights: the shapes and dtypes of its tensors, and one slice of one tensor.

Knows two containers, safetensors and torch.save's, and nothing of configs, indexes or Llamas. A tensor of torchao's,
which consists of several plain ones, is seen as these, by the names that torchao gives them in safetensors.
"""

from __future__ import annotations

import importlib
import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from tpllama.checkpoint.open import StoredWeight, first_line
from tpllama.checkpoint.paths import check_inside
from tpllama.config import UserError

if TYPE_CHECKING:
    import torch

# As safetensors and as torch spell them.
_FLOATING = ("f16", "bf16", "f32", "f64", "float16", "bfloat16", "float32", "float64")
# Tensors that old files hold and nobody reads.
_BUFFERS = ("rope.freqs", "rotary_emb.inv_freq")
_TORCHAO_TENSOR = re.compile(r"torchao\.quantization\.\w+Tensor")


class WeightFile(Protocol):
    """An opened file of named tensors."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every plain tensor in the file."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtype of every plain tensor, in lower case, as safetensors or torch spells it."""

    @property
    def stored(self) -> Mapping[str, StoredWeight]:
        """What the file says of weights that consist of several tensors, which may lie in other files."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A copy of one slice."""


def open_weight_file(path: Path, floats_only: bool = True) -> WeightFile:
    """Reads the header of `path`.

    Raises UserError where the file is damaged, or leads out of its directory, and with `floats_only` for a tensor
    that is no plain floating-point weight.
    """
    check_inside(path)
    file: WeightFile = SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path)
    if floats_only:
        if file.stored:
            raise UserError(
                f"found tensor {next(iter(file.stored))} quantized in {path}, expected plain weights, or a "
                f"quantization_config in config.json, restore the config"
            )
        for name in file.shapes:
            check_floating(file, name)
    return file


class SafetensorsFile:
    """A memory-mapped .safetensors file. Listing shapes does not import torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torch_handle: Any = None
        try:
            # The numpy handle reads shapes of any dtype, bfloat16 included: it makes no arrays.
            with safe_open(path, framework="np") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
                self.dtypes = {name: str(part.get_dtype()).lower() for name, part in parts.items()}
                self.stored = dict(_stored_weights(file.metadata() or {}, path))
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            if self._torch_handle is None:
                self._torch_handle = safe_open(self.path, framework="pt")
            # What the handle returns may be a view of the mapped file, hence the copy.
            part: torch.Tensor = self._torch_handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path, error) from error
        return part.clone()


def _stored_weights(metadata: Mapping[str, str], path: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Weights that consist of several tensors, from the header's metadata, as torchao writes it."""
    try:
        for name in json.loads(metadata.get("tensor_names", "[]")):
            said = json.loads(metadata[name])
            if said["_type"] == "Tensor":
                continue
            module, _, kind = name.rpartition(".")
            parts = {part: f"{module}._{kind}_{part}" for part in said["_tensor_data_names"]}
            yield name, StoredWeight(str(said["_type"]), dict(said["_data"]), parts)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from error


class PickleFile:
    """A state dict written by torch.save, mapped where its container allows, never unpickling code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: dict[str, torch.Tensor] = {}
        self.stored: dict[str, StoredWeight] = {}
        for name, value in _load_state_dict(path).items():
            if hasattr(value, "tensor_data_names"):
                self._take_apart(name, value)
            elif not name.endswith(_BUFFERS):
                self._state[name] = value
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._state.items()}

    def _take_apart(self, name: str, value: Any) -> None:
        part_names, attributes = value.__tensor_flatten__()
        module, _, kind = name.rpartition(".")
        parts = {part: f"{module}._{kind}_{part}" for part in part_names}
        self._state |= {parts[part]: getattr(value, part) for part in part_names}
        self.stored[name] = StoredWeight(type(value).__name__, attributes, parts)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._state[name][index].clone()


def _load_state_dict(path: Path) -> dict[str, torch.Tensor]:
    import torch

    # Files in the form from before torch 1.6 are not zip archives, and can't be mapped.
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            _check_archive(path)
            _know_torchao(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"found content in {path} that torch.load refuses with weights_only ({_refused(error)}), expected a plain "
            f"state dict, convert it to safetensors"
        ) from error
    except Exception as error:  # A pickle that breaks off can fail in any way.
        raise _damaged(path, error) from error
    if isinstance(state, dict) and state.keys() == {"model"} and isinstance(state["model"], dict):
        state = state["model"]
    if not isinstance(state, dict):
        raise UserError(f"found {path} holding a {type(state).__name__}, expected a state dict, convert it")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UserError(
                f"found {name!r} in {path} holding a {type(value).__name__}, expected a tensor, "
                f"save the model's state dict alone"
            )
        if type(value) is torch.Tensor:
            _check_storage(path, name, value)
    return state


def _check_archive(path: Path) -> None:
    """Raises UserError for a zip archive whose entries can't be mapped as they lie."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UserError(
            f"found a compressed archive {path}, expected one written by torch.save, convert it to safetensors"
        )
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise _damaged(path, ValueError("its entries are larger than the file"))


def _know_torchao(path: Path) -> None:
    """Lets torch.load make torchao's tensors, which it can once their module is imported, where the file has any."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    unknown = get_unsafe_globals_in_checkpoint(path)
    if unknown and all(_TORCHAO_TENSOR.fullmatch(name) for name in unknown):
        importlib.import_module("torchao.quantization")


def _refused(error: Exception) -> str:
    """The name of what a pickle wanted to call, out of torch's long message."""
    match = re.search(r"(?:Unsupported global: )?GLOBAL ([\w.]+)", str(error))
    return match[1] if match else first_line(error)


def _check_storage(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raises UserError for a tensor that says it is larger than its bytes."""
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise _damaged(path, ValueError(f"tensor {name} is larger than its bytes"))


def check_floating(file: WeightFile, name: str) -> None:
    """Raises UserError where tensor `name` is no plain floating-point weight."""
    dtype = file.dtypes[name]
    if dtype not in _FLOATING and not name.endswith(_BUFFERS):
        raise UserError(
            f"found tensor {name} of dtype {dtype} in {file.path}, expected a floating-point weight (float16, "
            f"bfloat16, float32 or float64), quantized ones only with torchao's quantization_config in config.json"
        )


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"found a damaged weight file {path} ({first_line(error)}), expected a complete {path.suffix[1:]} file, "
        f"download or convert it again"
    )
