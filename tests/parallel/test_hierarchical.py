"""Ranks of several hosts with several ranks each: right, the same bits on all, in the same order for every size.

Hosts are made believe here; test_two_hosts.py has real networks between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAYOUTS = ("aab", "abcabb", "abc")


@pytest.fixture(scope="module")
def groups() -> dict[str, list[dict[str, Any]]]:
    """What every rank that lived found, by the hosts of the ranks."""
    worker = str(ROOT / "tests/parallel/hierarchical_worker.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, env=env, timeout=150, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["layout"] for each in found] == list(LAYOUTS), done.stderr
    return {each["layout"]: each["ranks"] for each in found}


@pytest.fixture(params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return groups[request.param]


def test_ranks_of_several_hosts_are_joined_this_way(ranks: list[dict[str, Any]]) -> None:
    assert {rank["class"] for rank in ranks} == {"HierarchicalRanks"}


def test_results_are_those_of_torch_in_rank_and_then_host_order(ranks: list[dict[str, Any]]) -> None:
    assert [rank["equals_torch"]["wrong"] for rank in ranks] == [[]] * len(ranks)


def test_all_ranks_have_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["equals_torch"]["digest"] for rank in ranks}) == 1


def test_a_rows_sum_does_not_depend_on_the_number_of_rows(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["rows_do_not_depend_on_their_number"] for rank in ranks)


def test_messages_of_any_length_arrive(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["messages_arrive"] for rank in ranks)


def test_long_mixes_of_operations_stay_right(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stays_in_step"] for rank in ranks] == [0] * len(ranks)


def test_compiled_code_may_call_them(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["can_be_compiled_around"] for rank in ranks)


def test_a_killed_rank_makes_all_others_raise(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["loses_a_rank"]["seconds"] < 5, rank["loses_a_rank"]
        assert rank["loses_a_rank"]["error"].startswith(("rank ", "lost another rank: "))
