"""torch.save's files of weights, read without running anything in them and without believing what they claim.

A pickle is a program. torch runs the few calls that weights need; refused here is what among these takes memory that
the file does not have: compressed archives, arrays made from a number, tensors larger than their bytes.
"""

from __future__ import annotations

import importlib
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpllama.checkpoint.names import part_name
from tpllama.checkpoint.open import StoredWeight, first_line
from tpllama.config import UserError

if TYPE_CHECKING:
    import torch

# Tensors that old files hold and nobody reads.
BUFFERS = ("rope.freqs", "rotary_emb.inv_freq")
_TORCHAO = re.compile(r"torchao\.quantization\.[\w.]+")
# Pickles at the start of a file from before torch 1.6: two numbers, facts of the machine, the state, names of storages.
_NUM_LEGACY_PICKLES = 5


class PickleFile:
    """A state dict written by torch.save, mapped where its container allows, never unpickling code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: dict[str, torch.Tensor] = {}
        self.stored: dict[str, StoredWeight] = {}
        for name, value in _load_state_dict(path).items():
            if type(value).__module__.startswith("torchao."):
                self._take_apart(name, value)
            elif not name.endswith(BUFFERS):
                self._state[name] = _plain(path, name, value)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._state.items()}

    def _take_apart(self, name: str, value: Any) -> None:
        try:
            part_names, attributes = value.__tensor_flatten__()
            tensors = {part: getattr(value, part) for part in part_names}
        except Exception as error:  # A class of torchao's whose attributes are missing or others.
            raise damaged(self.path, error) from error
        parts = {part: part_name(name, part) for part in tensors}
        self._state |= {parts[part]: _plain(self.path, name, tensor) for part, tensor in tensors.items()}
        self.stored[name] = StoredWeight(type(value).__name__, attributes, parts)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._state[name][index]


def _load_state_dict(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        # Files in the form from before torch 1.6 are not zip archives, and can't be mapped. torch looks no further.
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
            file.seek(0)
            _check_calls(path, _archived_pickles(path, file) if is_zip else [file] * _NUM_LEGACY_PICKLES)
        if is_zip:
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
        raise damaged(path, error) from error
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
    return state


def _archived_pickles(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The pickles in a zip archive: `file` at the start of each. Raises UserError where torch couldn't map an entry."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UserError(
            f"found a compressed archive {path}, expected one written by torch.save, convert it to safetensors"
        )
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise damaged(path, ValueError("its entries are larger than the file"))
    for entry in entries:
        if entry.filename.lower().endswith("data.pkl"):
            # Not by zipfile, which compares checksums: torch can leave them out.
            file.seek(entry.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            file.seek(name_bytes + extra_bytes, 1)
            yield file


def _check_calls(path: Path, pickles: Iterable[IO[bytes]]) -> None:
    """Raises UserError for a pickle that makes a bytearray, which torch allows: of any size, from a number."""
    for opened in pickles:
        for opcode, argument, _ in pickletools.genops(opened):
            if opcode.name == "GLOBAL" and str(argument).endswith("bytearray"):
                raise damaged(path, ValueError("it makes a bytearray"))


def _know_torchao(path: Path) -> None:
    """Lets torch.load make torchao's tensors and settings, which it can once their module is imported, if it has to."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    unknown = get_unsafe_globals_in_checkpoint(path)
    if unknown and all(_TORCHAO.fullmatch(name) for name in unknown):
        importlib.import_module("torchao.quantization")


def _refused(error: Exception) -> str:
    """The name of what a pickle wanted to call, out of torch's long message."""
    match = re.search(r"(?:Unsupported global: )?GLOBAL ([\w.]+)", str(error))
    return match[1] if match else first_line(error)


def _plain(path: Path, name: str, value: torch.Tensor) -> torch.Tensor:
    """`value` without attributes and gradient. Raises UserError where it is no view of bytes of the file."""
    import torch

    try:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not is_plain or value.device.type != "cpu" or value.is_quantized or value.is_nested:
            raise ValueError(f"tensor {name} is no plain one")
        # Not value.detach(): a pickle may give a tensor any attributes.
        tensor = torch.Tensor.detach(value)
        if tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            stored, size = tensor.untyped_storage(), tensor.element_size()
            needed = max(tensor.storage_offset() + last + 1, tensor.numel()) * size
            if needed > stored.nbytes() or stored.nbytes() > path.stat().st_size or not stored.data_ptr():
                raise ValueError(f"tensor {name} is larger than its bytes")
    except Exception as error:  # Tensors without bytes of their own fail in any way.
        raise damaged(path, error) from error
    return tensor


def damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"found a damaged weight file {path} ({first_line(error)}), expected a complete {path.suffix[1:]} file, "
        f"download or convert it again"
    )
