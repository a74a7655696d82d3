"""The fast GGUF reader sees what the gguf package's own sees; damaged files have one line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpllama.checkpoint.gguf import GgufCheckpoint
from tpllama.checkpoint.gguf_reader import open_gguf
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

ARRAYS = {
    "test.strings": ["", "a", "é😀", "x" * 300],
    "test.integers": [-1, 2, 2**31 - 1],
    "test.floats": [0.5, -1e-5],
    "test.booleans": [True, False, True],
}


def same(mine: Any, reference: Any) -> bool:
    return bool(np.array_equal(mine, reference)) if isinstance(mine, np.ndarray) else mine == reference


def assert_reads_alike(path: Path) -> None:
    mine, reference = open_gguf(path), gguf.GGUFReader(path)
    assert list(mine.fields) == list(reference.fields)
    for name, field in reference.fields.items():
        assert same(mine.value(name), field.contents()), name
        assert mine.fields[name].offset == field.offset
        assert mine.fields[name].types == field.types
    assert len(mine.tensors) == len(reference.tensors)
    for one, other in zip(mine.tensors, reference.tensors, strict=True):
        assert (one.name, one.tensor_type, one.data_offset) == (other.name, other.tensor_type, other.data_offset)
        assert np.array_equal(one.shape, other.shape)
        assert np.array_equal(one.data, other.data)


def test_every_kind_of_metadata(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    assert_reads_alike(write_gguf(tiny_metadata | ARRAYS | {"general.name": "tiny", "test.flag": True}))


def test_embedded_model() -> None:
    assert_reads_alike(open_checkpoint("smollm2").path)


def test_missing_value_is_none(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    assert open_gguf(write_gguf(tiny_metadata)).value("test.nothing") is None


@pytest.fixture
def content(write_gguf: Any, tiny_metadata: dict[str, Any]) -> bytes:
    """A small file with arrays before and after scalars."""
    path: Path = write_gguf(ARRAYS | tiny_metadata | {"tokenizer.ggml.tokens": ["a", "b"]})
    return path.read_bytes()


def test_truncated_anywhere(tmp_path: Path, content: bytes, fails: Any) -> None:
    path = tmp_path / "cut.gguf"
    # Tensor data ends where the file does, so any cut loses something.
    for length in (*range(0, 1200, 7), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        fails(lambda: GgufCheckpoint(path), str(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b"GGML" + b[4:],
        lambda b: b[:4] + (99).to_bytes(4, "little") + b[8:],
        lambda b: b[:4] + (3).to_bytes(4, "big") + b[8:],
        lambda b: b[:8] + (2**62).to_bytes(8, "little") + b[16:],
        lambda b: b[:16] + (2**62).to_bytes(8, "little") + b[24:],
        lambda b: b[:24] + (2**62).to_bytes(8, "little") + b[32:],
        lambda b: b.replace(b"test.strings" + (9).to_bytes(4, "little"), b"test.strings" + (77).to_bytes(4, "little")),
        lambda b: b.replace(b"test.booleans", b"test.integers"),
        lambda b: b"<html>not found</html>" * 50,
    ],
    ids=["magic", "version", "byte order", "tensors", "fields", "length", "type", "name", "page"],
)
def test_corrupt_header(tmp_path: Path, content: bytes, fails: Any, change: Any) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(content))
    fails(lambda: GgufCheckpoint(path), str(path))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_opens_or_has_its_line(
    tmp_path: Path, content: bytes, fails: Any, data: st.DataObject
) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 1300))] = data.draw(st.integers(0, 255))
    path = tmp_path / "bad.gguf"
    path.write_bytes(changed)
    with suppress(UserError):
        LlamaConfig.from_hf(GgufCheckpoint(path).fields)


def test_array_of_arrays(tmp_path: Path, content: bytes, fails: Any) -> None:
    path = tmp_path / "bad.gguf"
    header = b"test.strings" + (9).to_bytes(4, "little")
    path.write_bytes(content.replace(header + (8).to_bytes(4, "little"), header + (9).to_bytes(4, "little")))
    fails(lambda: GgufCheckpoint(path), "metadata array of ARRAY")
