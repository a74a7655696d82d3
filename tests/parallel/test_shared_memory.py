"""Both implementations of shared memory, in C++ and in Python, between 2, 3 and 5 forked ranks.

test_collectives.py has what is true of all ways to talk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpllama.native import library

ROOT = Path(__file__).parents[2]
GROUPS = [(size, allow_native) for allow_native in (True, False) for size in (2, 3, 5)]


@pytest.fixture(scope="module")
def groups() -> dict[tuple[int, bool], list[dict[str, Any]]]:
    """What every rank that lived found, by number of ranks and whether C++ was allowed."""
    worker = str(ROOT / "tests/parallel/shared_memory_worker.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, env=env, timeout=120, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(GROUPS), done.stderr
    return {(each["size"], each["allow_native"]): each["ranks"] for each in found}


@pytest.fixture(params=GROUPS, ids=lambda group: f"{group[0]} ranks, {'C++' if group[1] else 'Python'}")
def ranks(request: pytest.FixtureRequest, groups: dict[tuple[int, bool], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    size, allow_native = request.param
    if allow_native and isinstance(why_not := library(ROOT / "tpllama/parallel/shared_memory.cpp"), str):
        pytest.skip(why_not)
    assert [each["is_native"] for each in groups[size, allow_native]] == [[allow_native, False]] * (size - 1)
    return groups[size, allow_native]


def test_results_are_those_of_torch_in_rank_order_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["equals_torch"]["wrong"] == []
        assert rank["equals_torch_for_every_value"] == []


def test_all_ranks_have_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["equals_torch"]["digest"] for rank in ranks}) == 1


def test_thousands_of_operations_stay_in_step(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stays_in_step"] for rank in ranks] == [0] * len(ranks)


def test_compiled_layers_need_no_break(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["is_part_of_a_graph"] for rank in ranks)


def test_a_signal_ends_a_wait(ranks: list[dict[str, Any]]) -> None:
    assert 0.1 <= ranks[0]["can_be_broken_off"] < 0.35


def test_a_killed_rank_makes_the_others_raise(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["loses_a_rank"]["error"] == f"rank {len(ranks)} is gone"
        assert rank["loses_a_rank"]["seconds"] < 5
