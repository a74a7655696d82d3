"""Reading in a stream: what comes out is what lies in the files, and the thread that reads ahead can't do harm."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tpllama import reading
from tpllama.checkpoint.open import open_checkpoint
from tpllama.reading import BlockReader, Job, reading_ahead

CPU = torch.device("cpu")
WEIGHT = torch.randn(700, 300, generator=torch.Generator().manual_seed(0)).to(torch.float16)


class Source:
    """A checkpoint of one tensor, of which `part` is a part of a quantized weight."""

    def __init__(self) -> None:
        self.quantized = {"w": SimpleNamespace(parts={"qdata": "part"})}
        self.tensors = {"weight": WEIGHT, "vector": WEIGHT[0], "part": WEIGHT.view(torch.int8)}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensors[name][index]


def reader(source: Any, dtype: torch.dtype = torch.bfloat16, strict: bool = False) -> BlockReader:
    return BlockReader(source, dtype, CPU, strict)


@given(st.data())
def test_a_slice_is_the_files_converted(data: Any) -> None:
    index = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in WEIGHT.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_BLOCK_ELEMENTS", {"cpu": data.draw(st.sampled_from([1, 5000, 1 << 20]))})
        part = reader(Source()).read("weight", index)
    assert part.dtype == torch.bfloat16
    assert torch.equal(part, WEIGHT[index].to(torch.bfloat16))


@pytest.mark.parametrize("name", ["weight", "vector", "part"])
def test_what_is_read_is_a_copy(name: str) -> None:
    source = Source()
    before = source.tensors[name].clone()
    part = reader(source, torch.float16).read(name, tuple(slice(0, n) for n in before.shape))
    assert part.dtype == before.dtype  # parts of quantized weights keep theirs
    part.fill_(0)
    assert torch.equal(source.tensors[name], before)


@pytest.mark.parametrize("place", [0, 350, 699])
def test_a_value_that_is_no_number_is_named_under_strict(place: int) -> None:
    source = Source()
    source.tensors["weight"] = WEIGHT.clone()
    source.tensors["weight"][place, 7] = torch.nan
    whole = tuple(slice(0, n) for n in WEIGHT.shape)
    for strict, bad in ((True, "weight"), (False, None)):
        checking = reader(source, strict=strict)
        checking.read("vector", (slice(0, 300),))
        assert checking.bad is None
        checking.read("weight", whole)
        assert checking.bad == bad


class Prefetching:
    def __init__(self, error: bool = False) -> None:
        self.fetched: list[str] = []
        self.threads: set[int] = set()
        self._error = error

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        self.fetched.append(name)
        self.threads.add(threading.get_ident())
        if self._error:
            raise OSError("the disk is gone")


def steps(count: int) -> list[tuple[list[Job], int]]:
    return [([(f"weight {number}", (slice(0, 1),))], number) for number in range(count)]


def test_steps_are_fetched_by_a_thread_in_their_order() -> None:
    source = Prefetching()
    assert [number for _, number in reading_ahead(source, steps(4))] == [0, 1, 2, 3]  # type: ignore[arg-type]
    # A thread that is behind skips steps, so which it fetched is chance, but for the first.
    assert source.fetched[0] == "weight 0"
    assert source.fetched == sorted(set(source.fetched))
    assert threading.get_ident() not in source.threads


def test_an_error_of_the_thread_is_left_to_the_read_that_follows() -> None:
    source = Prefetching(error=True)
    assert [number for _, number in reading_ahead(source, steps(3))] == [0, 1, 2]  # type: ignore[arg-type]


def test_breaking_off_ends_the_thread() -> None:
    before = set(threading.enumerate())
    ahead = reading_ahead(Prefetching(), steps(5))  # type: ignore[arg-type]
    next(iter(ahead))
    ahead.close()  # type: ignore[attr-defined]
    ends = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not left


def test_real_files_are_fetched_in_any_slice(tmp_path: Path) -> None:
    save_file(
        {"model.norm.weight": torch.ones(5), "lm_head.weight": torch.ones(300, 4000)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    for rows in (slice(0, 300), slice(7, 7), slice(3, 200)):
        for columns in (slice(0, 4000), slice(1, 3), slice(5, 5)):
            checkpoint.prefetch("lm_head.weight", (rows, columns))
    checkpoint.prefetch("model.norm.weight", (slice(0, 5),))
