"""Weights in huge pages are the same weights, each in memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tpllama.build import weight_bytes
from tpllama.kernels import pages
from tpllama.kernels.pages import WeightMemory, are_there


class Part(nn.Module):
    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 1000).to(dtype), requires_grad=False)
        self.register_buffer("scale", torch.randn(rows))
        self.register_buffer("bias", None)


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not are_there(), reason="this system gives no huge pages")
def test_weights_are_the_same_in_huge_pages() -> None:
    torch.manual_seed(0)
    parts = [Part(rows, dtype) for rows in (1, 500, 20000, 40000) for dtype in (torch.bfloat16, torch.int8)]
    before, size = [{name: x.clone() for name, x in part.state_dict().items()} for part in parts], huge_bytes()
    memory = WeightMemory()
    moved = nn.ModuleList(memory.place(part) for part in parts)
    total = weight_bytes(moved)
    assert total == sum(x.nbytes for each in before for x in each.values())
    assert huge_bytes() - size >= 0.9 * total
    for part, expected in zip(moved, before, strict=True):
        assert isinstance(part.weight, nn.Parameter)
        assert part.bias is None
        assert part.state_dict().keys() == expected.keys()
        for name, x in part.state_dict().items():
            assert torch.equal(x, expected[name])
            assert x.data_ptr() % 64 == 0
            assert x.untyped_storage().nbytes() == x.nbytes
    places = [x.data_ptr() for x in moved.state_dict().values()]
    memory.place(moved)
    assert places == [x.data_ptr() for x in moved.state_dict().values()]
    del memory, moved, part, parts, x
    assert huge_bytes() - size < 0.1 * total


def test_without_huge_pages_they_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(3, torch.int8)
    place = part.weight.data_ptr()
    (tmp_path / "enabled").write_text("always madvise [never]")
    for setting in (tmp_path / "enabled", tmp_path / "none"):
        monkeypatch.setattr(pages, "_SETTING", setting)
        assert WeightMemory().place(part).weight.data_ptr() == place
