"""Fetching pages ahead: all of a view's, in calls that the system follows, and none of an odd view's fails."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpllama.checkpoint import weight_files


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The bytes that the system was asked for, each call's start and end."""
    calls: list[tuple[int, int]] = []

    def madvise(start: Any, size: Any, advice: int) -> int:
        calls.append((start.value, start.value + size.value))
        return 0

    monkeypatch.setattr(weight_files, "_libc", lambda: SimpleNamespace(madvise=madvise))
    return calls


def test_a_large_weight_is_fetched_in_steps_that_the_system_follows(advised: list[tuple[int, int]]) -> None:
    """The kernel reads at most read_ahead_kb, often 128 KiB, for one call."""
    view = torch.empty(1 << 20, dtype=torch.uint8)[5:-7]
    weight_files.fetch_pages(view)
    assert all(end - start <= 128 << 10 and start % mmap.PAGESIZE == 0 for start, end in advised)
    assert [end for _, end in advised[:-1]] == [start for start, _ in advised[1:]]
    assert view.data_ptr() - mmap.PAGESIZE < advised[0][0] <= view.data_ptr()
    assert advised[-1][1] == view.data_ptr() + view.numel()


@pytest.mark.parametrize("rows", [slice(0, 300), slice(3, 200), slice(7, 7)])
@pytest.mark.parametrize("columns", [slice(0, 400), slice(1, 3), slice(5, 5)])
def test_a_matrix_saved_transposed_is_fetched_too(
    tmp_path: Path, advised: list[tuple[int, int]], rows: slice, columns: slice
) -> None:
    torch.save({"w": torch.ones(400, 300).T, "v": torch.ones(300, 2)[:, 0]}, tmp_path / "a.bin")
    file = weight_files.open_weight_file(tmp_path / "a.bin")
    view = file.read("w", (rows, columns))
    assert view.stride(1) != 1
    weight_files.fetch_pages(view)
    if view.numel() == 300 * 400:
        assert (advised[-1][1] - view.data_ptr()) == 300 * 400 * 4
    weight_files.fetch_pages(file.read("v", (rows,)))
