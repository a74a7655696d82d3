"""Files written in parts are what safetensors' own library reads; a directory appears whole or not at all."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpllama.checkpoint.save import Entry, TensorFile, new_directory
from tpllama.config import UserError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn)
Fails = Callable[..., None]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Of random bytes, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape)


@st.composite
def writings(draw: st.DrawFn) -> tuple[Tensor, int, list[slice]]:
    """A tensor, a dimension, and the blocks along it in which it is written, in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    tensor = random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 30)))
    dim = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.sets(st.integers(1, shape[dim] - 1), max_size=3)) if shape[dim] > 1 else set()
    borders = itertools.pairwise([0, *sorted(inner), shape[dim]])
    return tensor, dim, draw(st.permutations([slice(*pair) for pair in borders]))


@settings(max_examples=60, deadline=None)
@given(each=st.lists(writings(), min_size=1, max_size=6), metadata=st.dictionaries(st.text(max_size=9), st.text()))
def test_what_is_written_in_parts_is_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory,
    each: list[tuple[Tensor, int, list[slice]]],
    metadata: dict[str, str],
) -> None:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    tensors = {f"tensor.{number}": tensor for number, (tensor, _, _) in enumerate(each)}
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with TensorFile(path, entries, metadata) as file:
        for (name, tensor), (_, dim, blocks) in zip(tensors.items(), each, strict=True):
            for block in blocks:
                file.write(name, tensor.narrow(dim, block.start, block.stop - block.start), block.start, dim)
    with safe_open(path, framework="pt") as read:
        assert read.metadata() == metadata
        assert set(read.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            found = read.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert length % 8 == 0
    for entry in (value for key, value in json.loads(header[8 : 8 + length]).items() if key != "__metadata__"):
        itemsize = {"F32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"], 1)
        assert entry["data_offsets"][0] % itemsize == 0


def two_rows(path: Path) -> TensorFile:
    return TensorFile(path, {"a": Entry((2, 3), torch.int8), "b": Entry((1,), torch.float32)}, {})


def test_a_tensor_that_is_not_written_whole_is_an_error(tmp_path: Path) -> None:
    file = two_rows(tmp_path / "x").__enter__()
    file.write("b", torch.ones(1))
    file.write("a", torch.ones(1, 3, dtype=torch.int8))
    with pytest.raises(AssertionError, match="a was not written as a whole"):
        file.__exit__(None)


def test_values_of_another_dtype_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"b is torch\.float64"), two_rows(tmp_path / "x") as file:
        file.write("b", torch.ones(1, dtype=torch.float64))


def test_an_unfinished_file_cannot_be_read(tmp_path: Path) -> None:
    """It has its full size from the start, and would be read as zeros."""
    path = tmp_path / "x.safetensors"
    with two_rows(path) as file:
        file.write("a", torch.ones(2, 3, dtype=torch.int8))
        with pytest.raises(SafetensorError):
            safe_open(path, framework="pt").__enter__()
        file.write("b", torch.ones(1))
    with safe_open(path, framework="pt") as read:
        assert read.get_tensor("a").tolist() == [[1, 1, 1]] * 2


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        two_rows(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


def write_into(out: Path, text: str = "whole") -> None:
    with new_directory(out, 5) as folder:
        (folder / "file").write_text(text)
        assert not out.is_dir() or not any(out.iterdir())


def incomplete(folder: Path) -> list[Path]:
    return list(folder.glob(".*.incomplete"))


@pytest.mark.parametrize("kind", ["new", "parents", "empty", "link", "dangling"])
def test_a_directory_that_can_be_made(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    match kind:
        case "parents":
            out = tmp_path / "a" / "b" / "out"
        case "empty":
            out.mkdir()
        case "link":
            (tmp_path / "there").mkdir()
            out.symlink_to("there")
        case "dangling":
            out.symlink_to("there")
    umask = os.umask(0o027)
    try:
        write_into(out)
    finally:
        os.umask(umask)
    assert (out / "file").read_text() == "whole"
    assert out.stat().st_mode & 0o777 == 0o750
    assert not incomplete(out.parent)


def test_the_current_directory_can_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_into(Path())
    assert (tmp_path / "here" / "file").read_text() == "whole"


@pytest.mark.parametrize("kind", ["full", "file", "under a file", "circle", "long", "mount point", "root"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, fails: Fails, kind: str) -> None:
    out = tmp_path / "out"
    match kind:
        case "full":
            out.mkdir()
            (out / "mine").write_text("mine")
        case "file":
            out.write_text("mine")
        case "under a file":
            (tmp_path / "file").write_text("mine")
            out = tmp_path / "file" / "a" / "out"
        case "circle":
            out.symlink_to(tmp_path / "other")
            (tmp_path / "other").symlink_to(out)
        case "long":
            out = tmp_path / ("x" * 250)
        case "mount point":
            out = next(Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines())
        case "root":
            out = Path("/")
    before = sorted(tmp_path.rglob("*"))
    fails(lambda: write_into(out), str(out)[:40] if kind != "under a file" else "file can't be written")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_mount_point_is_refused(tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    (tmp_path / "out").mkdir()
    fails(lambda: write_into(tmp_path / "out"), "mount point")


def test_a_parent_without_permission(tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    fails(lambda: write_into(tmp_path / "a" / "out"), f"{tmp_path} can't be written")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room(tmp_path: Path, fails: Fails) -> None:
    fails(lambda: new_directory(tmp_path / "out", 1 << 60).__enter__(), str(1 << 60), "bytes free")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    out = tmp_path / "out"
    words = rf"found that {re.escape(str(out))} can't be written .*No space left on device.*, expected "
    with (
        pytest.raises(OSError, match=words),
        new_directory(out, 10) as folder,
        TensorFile(folder / "x", {"a": Entry((1,), torch.int8)}, {}) as file,
    ):
        file.write("a", torch.ones(1, dtype=torch.int8))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    with two_rows(tmp_path / "x") as file:
        file.write("a", torch.arange(6, dtype=torch.int8).view(2, 3))
        file.write("b", torch.ones(1))
    with safe_open(tmp_path / "x", framework="pt") as read:
        assert read.get_tensor("a").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("error", [UserError("damaged"), KeyboardInterrupt(), RuntimeError("other")])
def test_nothing_is_left_of_a_body_that_fails(tmp_path: Path, error: BaseException) -> None:
    def write() -> None:
        with new_directory(tmp_path / "out", 5) as folder:
            (folder / "file").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert not list(tmp_path.iterdir())


def test_of_two_writers_the_first_wins_and_nothing_is_mixed(tmp_path: Path) -> None:
    out, both, results = tmp_path / "out", threading.Barrier(2), []

    def write(name: str) -> None:
        try:
            with new_directory(out, 5) as folder:
                (folder / name).write_text(name)
                both.wait(10)
            results.append(name)
        except UserError as error:
            results.append(str(error))

    writers = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    winner, message = sorted(results, key=len)
    assert [file.name for file in out.iterdir()] == [winner]
    assert re.match(f"found {re.escape(str(out))} written by another process meanwhile, expected ", message)
    assert not incomplete(tmp_path)
