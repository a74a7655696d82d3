"""Which rank a process is, by its environment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpllama.config import UserError
from tpllama.parallel import place as module
from tpllama.parallel.place import (
    PIN,
    Core,
    Place,
    own_cores,
    resolve_tp,
    split_cores,
    threads_per_rank,
    torchrun_place,
)


def test_without_torchruns_variables_there_is_no_place() -> None:
    assert torchrun_place({}) is None
    assert torchrun_place({"RANK": "0"}) is None
    assert torchrun_place({"WORLD_SIZE": "2"}) is None


def test_torchruns_variables_are_the_place() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert torchrun_place(environ) == Place(rank=5, size=8, local_rank=1, local_size=4, port=None)


def test_without_local_variables_all_ranks_are_on_this_host() -> None:
    assert torchrun_place({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "found RANK='one' in the environment, expected a number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "found WORLD_SIZE='' in the environment, expected a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "found LOCAL_RANK='-1' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "found RANK=2 in a world of 2, expected it to be lower"),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        torchrun_place(environ)


def test_the_real_torchrun_gives_places() -> None:
    program = "import os; from tpllama.parallel.place import *; print(torchrun_place(os.environ))"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [*command, sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert sorted(done.stdout.split("\n")[:2]) == [str(Place(rank, 2, rank, 2)) for rank in (0, 1)], done.stderr


@pytest.mark.parametrize(
    ("requested", "place", "degree"),
    [(None, None, 1), (3, None, 3), (None, Place(1, 4, 1, 4), 4), (4, Place(1, 4, 1, 4), 4), (1, Place(), 1)],
)
def test_the_degree_is_torchruns_world_or_what_was_asked_for(
    requested: int | None, place: Place | None, degree: int
) -> None:
    assert resolve_tp(requested, place) == degree


@pytest.mark.parametrize("requested", [1, 3])
def test_a_contradiction_is_an_error_with_the_remedy(requested: int) -> None:
    expected = (
        f"found --tp {requested} in a torchrun world of 2 ranks, expected the same number, "
        f"drop --tp or start torchrun with --nproc-per-node {requested}"
    )
    with pytest.raises(UserError, match=expected):
        resolve_tp(requested, Place(0, 2, 0, 2))


def machine(nodes: list[int], siblings: int) -> list[Core]:
    """So many physical cores on each node, of so many threads, which the kernel numbers one round after another."""
    places = [node for node, count in enumerate(nodes) for _ in range(count)]
    count = len(places)
    return [Core(node, core, core + thread * count) for thread in range(siblings) for core, node in enumerate(places)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 2), st.integers(1, 40), st.randoms())
def test_cores_are_split_among_ranks(nodes: list[int], siblings: int, ranks: int, order: random.Random) -> None:
    cores = machine(nodes, siblings)
    cores = order.sample(cores, order.randint(1, len(cores)))  # what taskset left
    shares = split_cores(cores, ranks)
    assert (shares is None) == (ranks > len(cores))
    if shares is None:
        return
    by_number = {core.number: core for core in cores}
    assert len(shares) == ranks
    assert all(shares)
    assert sum(map(len, shares)) == len(set().union(*shares))  # nobody's core is another's
    assert set().union(*shares) <= set(by_number)
    physical = [{by_number[number].physical for number in share} for share in shares]
    assert len({len(each) for each in physical}) == 1
    if len({core.physical for core in cores}) >= ranks:
        assert sum(map(len, physical)) == len(set().union(*physical))
    if ranks >= len({core.node for core in cores}) and len({core.physical for core in cores}) >= ranks:
        of = [{by_number[number].node for number in share} for share in shares]
        assert all(len(each) == 1 for each in of)
        assert of == sorted(of, key=min)


def test_known_machines() -> None:
    assert split_cores(machine([2], 1), 2) == [{0}, {1}]
    assert split_cores(machine([2], 2), 2) == [{0, 2}, {1, 3}]
    assert split_cores(machine([1], 2), 2) == [{0}, {1}]
    assert split_cores(machine([4, 4], 1), 1) == [set(range(8))]
    assert split_cores(machine([4, 4], 1), 2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert split_cores(machine([4, 4], 1), 3) == [{0, 1}, {2, 3}, {4, 5}]
    assert split_cores(machine([2], 1), 3) is None


def test_a_follower_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    monkeypatch.setattr(module, "_core", lambda number: Core(0, number, number))
    monkeypatch.setattr(module, "_quota", lambda: None)
    follower = Place(1, 2, 1, 2)
    assert own_cores(follower, {}) == {6, 7}
    assert own_cores(Place(0, 2, 0, 2), {}) is None
    assert own_cores(Place(8, 16, 8, 16), {}) is None
    assert own_cores(follower, {PIN: "0"}) is None
    assert own_cores(follower, {"OMP_PLACES": "cores"}) is None
    assert threads_per_rank(2, {}) == 2
    monkeypatch.setattr(module, "_quota", lambda: 3.0)
    assert own_cores(follower, {}) is None
    assert threads_per_rank(2, {}) == 1
    assert threads_per_rank(1, {}) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7} if pid else {4, 5})
    monkeypatch.setattr(module, "_quota", lambda: None)
    assert own_cores(follower, {}) is None  # somebody gave this rank cores that its parent doesn't have


def test_the_kernel_says_what_cores_share(tmp_path: Path) -> None:
    for number, siblings in ((0, "0-1"), (1, "0-1"), (2, "2,6")):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "cpu2" / "node1").mkdir()
    assert [module._core(number, tmp_path) for number in range(4)] == [
        Core(0, 0, 0), Core(0, 0, 1), Core(1, 2, 2), Core(0, 3, 3),
    ]  # fmt: skip


def test_the_strictest_quota_counts(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "a" / "b"
    own.mkdir(parents=True)
    groups.write_text("1:cpu:/other\n0::/a/b\n")
    assert module._quota(tmp_path, groups) is None
    (own / "cpu.max").write_text("max 100000\n")
    assert module._quota(tmp_path, groups) is None
    (own.parent / "cpu.max").write_text("250000 100000\n")
    assert module._quota(tmp_path, groups) == 2.5
    (own / "cpu.max").write_text("150000 100000\n")
    assert module._quota(tmp_path, groups) == 1.5


def test_ranks_share_the_cores() -> None:
    cores = threads_per_rank(1, {})
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert threads_per_rank(2, {}) == max(1, cores // 2)
    assert threads_per_rank(10 * cores, {}) == 1


def test_the_users_number_of_threads_is_kept_but_torchruns_is_not() -> None:
    cores = threads_per_rank(1, {})
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == 1
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == max(1, cores // 2)
    for unusable in ("", "0", "many", "-2"):
        assert threads_per_rank(1, {"OMP_NUM_THREADS": unusable}) == cores
