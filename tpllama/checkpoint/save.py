"""Writing a checkpoint in Hugging Face form: safetensors files in a stream, in a folder that is whole or isn't there.

safetensors' own writer wants all tensors of a file in memory; here the header comes first, as shapes and dtypes are
known, and values follow in any order, a few rows at a time (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import errno
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
        self._header = len(text).to_bytes(8, "little") + text
        self._start = len(self._header)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self._file, 0, self._start + end)  # a full disk is an error now, not later
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, values: Tensor, start: int = 0, dim: int = 0) -> None:
        """Writes `values` into tensor `name`, from `start` on along `dim`; all of it in the other dimensions."""
        entry = self._entries[name]
        assert values.dtype == entry.dtype, f"{name} is {values.dtype}"
        if not values.numel():
            return
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
                self._put(self._header, 0)  # last: a file that breaks off has none, and nobody reads it
                os.fsync(self._file)
        finally:
            os.close(self._file)


@contextmanager
def new_directory(out: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to write `num_bytes` into, which becomes `out` when the body ends well, and is removed when it doesn't.

    A killed process leaves the folder `.OUT.*.incomplete`, which has no config until the last and is no checkpoint.
    Raises UserError where `out` can't be made, before anything is written, and where another process was quicker.
    """
    target = checked(out, num_bytes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".incomplete", dir=target.parent))
    except OSError as error:
        raise _no_place(out, error) from error
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        _rename(folder, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(
                f"found that {out} can't be written ({error}), expected a writable disk with room for {num_bytes} "
                f"bytes, make room or choose another place for OUT"
            ) from error
        raise


def checked(out: Path, num_bytes: int = 0) -> Path:
    """`out` without links. Raises UserError where no new directory of `num_bytes` can be made there."""
    try:
        target = out.resolve()
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
        parent = next((each for each in target.parents if each.exists()), target)
        is_writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
        free = shutil.disk_usage(parent).free
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise _no_place(out, error) from error
    if is_taken:
        raise UserError(f"found {out} there already, expected a new or empty directory, give another or remove it")
    if os.path.ismount(target):
        raise UserError(f"found {out} to be a mount point, expected a directory to replace, give one below it")
    if not is_writable:
        raise UserError(f"found that {parent} can't be written, expected a writable directory, choose another for OUT")
    if free < num_bytes:
        raise UserError(
            f"found {free} bytes free in {parent}, expected {num_bytes} for the checkpoint, make room or choose "
            f"another place for OUT"
        )
    return target


def _no_place(out: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"found that {str(out)[:200]} can't be made ({reason}), expected a new directory, choose another")


def _rename(folder: Path, target: Path) -> None:
    """An empty directory gives way, anything else stays."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(
            f"found {target} written by another process meanwhile, expected it to be new, use it or give another OUT"
        ) from error


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
