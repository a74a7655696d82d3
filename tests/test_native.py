"""C++ is compiled once, and where it can't be the reason is known and said."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tpllama import native


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPLLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TPLLAMA_NATIVE", raising=False)
    native.library.cache_clear()


def source(folder: Path, text: str) -> Path:
    path = folder / "answer.cpp"
    path.write_text(text)
    return path


def test_it_is_compiled_once_for_each_text(tmp_path: Path) -> None:
    for number in (42, 7):
        path = source(tmp_path, f'extern "C" int answer() {{ return {number}; }}')
        for _ in range(2):
            native.library.cache_clear()
            found = native.library(path)
            assert isinstance(found, ctypes.CDLL), found
            assert found.answer() == number
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


def test_a_header_that_changed_is_seen(tmp_path: Path) -> None:
    path = source(tmp_path, '#include "number.h"\nextern "C" int answer() { return NUMBER; }')
    for number in (42, 7):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}")
        native.library.cache_clear()
        found = native.library(path)
        assert isinstance(found, ctypes.CDLL), found
        assert found.answer() == number


def test_why_there_is_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.library(source(tmp_path, "int answer( { }"))
    assert isinstance(found, str)
    assert "could not build answer.cpp" in found
    assert "error" in found
    assert not list((tmp_path / "cache").glob("*.so"))
    native.library.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.library(source(tmp_path, "int x;")) == "no C++ compiler (for full speed: apt install g++)"


def test_a_run_without_it_says_so() -> None:
    command = [sys.executable, "-m", "tpllama", "generate", "--max-new-tokens", "1", "--raw", "A"]
    env = os.environ | {"TPLLAMA_NATIVE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.startswith("tpllama: torch's kernels run instead of our own")
    assert "TPLLAMA_NATIVE=0" in done.stderr.splitlines()[0]
