"""One file of weights: the shapes of its tensors, and one slice of one tensor.

Knows two containers, safetensors and torch.save's, and nothing of configs, indexes or Llamas.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from tpllama.checkpoint.open import first_line
from tpllama.config import UserError

if TYPE_CHECKING:
    import torch


# As safetensors and as torch spell them.
_FLOATING = ("f16", "bf16", "f32", "f64", "float16", "bfloat16", "float32", "float64")


class WeightFile(Protocol):
    """An opened file of named tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the file."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A copy of one slice."""


def open_weight_file(path: Path) -> WeightFile:
    """Reads the header of `path`. Raises UserError where the file is damaged."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path)


class SafetensorsFile:
    """A memory-mapped .safetensors file. Listing shapes does not import torch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torch_handle: Any = None
        try:
            # The numpy handle reads shapes of any dtype, bfloat16 included: it makes no arrays.
            with safe_open(path, framework="np") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
                dtypes = {name: part.get_dtype() for name, part in parts.items()}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        for name, dtype in dtypes.items():
            _check_dtype(path, name, dtype)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            if self._torch_handle is None:
                self._torch_handle = safe_open(self._path, framework="pt")
            # What the handle returns may be a view of the mapped file, hence the copy.
            part: torch.Tensor = self._torch_handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise _damaged(self._path, error) from error
        return part.clone()


class PickleFile:
    """A state dict written by torch.save, mapped where its container allows, never unpickling code."""

    def __init__(self, path: Path) -> None:
        state = _load_state_dict(path)
        self._state = state
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._state[name][index].clone()


def _load_state_dict(path: Path) -> dict[str, torch.Tensor]:
    import torch

    def load(mmap: bool) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        # Files in the form from before torch 1.6 are not zip archives, and can't be mapped.
        state = load(mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"found content in {path} that torch.load refuses with weights_only, expected a plain state dict, "
            f"convert it to safetensors"
        ) from error
    except Exception as error:  # A pickle that breaks off can fail in any way.
        raise _damaged(path, error) from error
    if not isinstance(state, dict):
        raise UserError(f"found {path} holding a {type(state).__name__}, expected a state dict, convert it")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"found {name!r} in {path} holding a {type(value).__name__}, expected a tensor, "
                f"save the model's state dict alone"
            )
        _check_dtype(path, name, str(value.dtype).removeprefix("torch."))
    return state


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Raises UserError for a tensor that is no plain floating-point weight."""
    if dtype.lower() not in _FLOATING and not name.endswith("inv_freq"):
        raise UserError(
            f"found tensor {name} of dtype {dtype} in {path}, expected a floating-point weight (float16, bfloat16, "
            f"float32 or float64), quantized checkpoints aren't read yet"
        )


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"found a damaged weight file {path} ({first_line(error)}), expected a complete {path.suffix[1:]} file, "
        f"download or convert it again"
    )
