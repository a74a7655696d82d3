"""Writing a checkpoint in Hugging Face form: safetensors files in a stream, in a folder that is whole or isn't there.

safetensors' own writer wants all tensors of a file in memory; here the header comes first, as shapes and dtypes are
known, and values follow in any order, a few rows at a time (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpllama.config import UserError

_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A .safetensors file of known tensors, whose values are written part by part. A context manager."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._entries = entries
        self._missing = {name: entry.num_bytes for name, entry in entries.items()}
        self._offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        # Wide elements first, so that each tensor's bytes are aligned to its elements.
        for name, entry in sorted(entries.items(), key=lambda each: -each[1].dtype.itemsize):
            self._offsets[name] = end
            data_offsets = [end, end := end + entry.num_bytes]
            header[name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": data_offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self._file, 0, self._start + end)  # a full disk is an error now, not later
            self._put(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, values: Tensor, start: int = 0, dim: int = 0) -> None:
        """Writes `values` into tensor `name`, from `start` on along `dim`; all of it in the other dimensions."""
        entry = self._entries[name]
        assert values.dtype == entry.dtype, f"{name} is {values.dtype}"
        raw = values.detach().contiguous().cpu()
        # Runs of values that lie together in the file: one, unless `dim` is an inner dimension.
        runs = raw.reshape(math.prod(entry.shape[:dim]), -1).view(torch.uint8).numpy()
        step = math.prod(entry.shape[dim:]) * entry.dtype.itemsize
        first = math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize * start
        for number, run in enumerate(runs):
            self._put(memoryview(run), self._start + self._offsets[name] + number * step + first)
        self._missing[name] -= runs.size

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                missing = [name for name, count in self._missing.items() if count]
                assert not missing, f"{missing[0]} was not written as a whole"
                os.fsync(self._file)
        finally:
            os.close(self._file)


def check_can_create(out: Path, num_bytes: int) -> None:
    """Raises UserError where a new directory `out` of `num_bytes` can't be made, before anything is written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"found {out} there already, expected a new or empty directory, give another or remove it")
    parent = next(each for each in out.absolute().parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"found that {parent} can't be written, expected a writable directory, choose another for OUT")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserError(
            f"found {free} bytes free in {parent}, expected {num_bytes} for the checkpoint, make room or choose "
            f"another place for OUT"
        )


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the body ends well, and is removed when it doesn't.

    A killed process leaves the folder `.OUT.*.incomplete`, which has no config until the last and is no checkpoint.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".incomplete", dir=out.parent))
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        os.rename(folder, out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
