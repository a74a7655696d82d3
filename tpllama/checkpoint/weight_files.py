"""One file of weights: the shapes and dtypes of its tensors, and one slice of one tensor.

Knows safetensors, leaves torch.save's form to pickle_file.py, and knows nothing of configs, indexes or Llamas. A
tensor of torchao's, which consists of several plain ones, is seen as these, by the names that torchao gives them in
safetensors.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from tpllama.checkpoint.names import part_name
from tpllama.checkpoint.open import StoredWeight
from tpllama.checkpoint.paths import check_inside
from tpllama.checkpoint.pickle_file import BUFFERS, PickleFile, damaged
from tpllama.config import UserError

if TYPE_CHECKING:
    import torch

# The system reads no more for one call of madvise than the disk's read_ahead_kb, 128 KiB unless it is set.
_FETCHED = 128 << 10
# As safetensors and as torch spell them.
_FLOATING = ("f16", "bf16", "f32", "f64", "float16", "bfloat16", "float32", "float64")


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
        """One slice, maybe a view of the mapped file."""


def open_weight_file(path: Path, floats_only: bool = True) -> WeightFile:
    """Reads the header of `path`.

    Raises UserError where the file is damaged, or leads out of its directory, and with `floats_only` for a tensor
    that is no plain floating-point weight.
    """
    check_inside(path)
    if not path.is_file():
        raise UserError(f"found {path}, which is no file, expected a file of weights, copy it there or remove this")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(
            f"found {path} unreadable ({error.strerror}), expected weights, check its permissions"
        ) from error
    file: WeightFile = SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path)
    names = (*file.shapes, *file.stored, *(part for weight in file.stored.values() for part in weight.parts.values()))
    if odd := next((name for name in names if not name.isprintable()), None):
        raise damaged(path, ValueError(f"a tensor's name is {odd[:80]!r}"))
    if floats_only:
        if file.stored:
            raise UserError(
                f"found tensor {next(iter(file.stored))} quantized in {path}, expected plain weights, or a "
                f"quantization_config in config.json, restore the config"
            )
        for name in file.shapes:
            check_floating(file, name)
    return file


def fetch_pages(view: torch.Tensor) -> None:
    """Has the system read the pages under a view of a mapped file, where they aren't in memory."""
    import torch

    if view.dim() == 2 and view.stride(1) != 1:  # .bin files may hold a matrix transposed
        view = view.T
    if view.is_contiguous() and view.numel() and hasattr(mmap, "MADV_WILLNEED"):
        madvise = _libc().madvise
        start, end = view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()
        for chunk in range(start // _FETCHED * _FETCHED, end, _FETCHED):
            first, last = max(chunk, start // mmap.PAGESIZE * mmap.PAGESIZE), min(chunk + _FETCHED, end)
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_WILLNEED)
    elif view.numel() and view.stride(-1) == 1:  # columns: a byte of each page, and none of the pages between
        view.view(torch.uint8)[..., :: mmap.PAGESIZE].sum()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


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
            raise damaged(path, error) from error

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            if self._torch_handle is None:
                self._torch_handle = safe_open(self.path, framework="pt")
            part: torch.Tensor = self._torch_handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise damaged(self.path, error) from error
        return part


def _stored_weights(metadata: Mapping[str, str], path: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Weights that consist of several tensors, from the header's metadata, as torchao writes it."""
    try:
        for name in json.loads(metadata.get("tensor_names", "[]")):
            said = json.loads(metadata[name])
            if said["_type"] == "Tensor":
                continue
            parts = {str(part): part_name(name, part) for part in said["_tensor_data_names"]}
            yield name, StoredWeight(str(said["_type"]), dict(said["_data"]), parts)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from error


def check_floating(file: WeightFile, name: str) -> None:
    """Raises UserError where tensor `name` is no plain floating-point weight."""
    dtype = file.dtypes[name]
    if dtype not in _FLOATING and not name.endswith(BUFFERS):
        raise UserError(
            f"found tensor {name} of dtype {dtype} in {file.path}, expected a floating-point weight (float16, "
            f"bfloat16, float32 or float64), quantized ones only with torchao's quantization_config in config.json"
        )
