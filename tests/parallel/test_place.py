"""Which rank a process is, by its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpllama.config import UserError
from tpllama.parallel.place import Place, resolve_tp, threads_per_rank, torchrun_place, usable_cores


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


def test_ranks_share_the_cores() -> None:
    cores = usable_cores()
    assert cores == len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(2, {}) == max(1, cores // 2)
    assert threads_per_rank(10 * cores, {}) == 1


def test_the_users_number_of_threads_is_kept_but_torchruns_is_not() -> None:
    cores = usable_cores()
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == 1
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == max(1, cores // 2)
    for unusable in ("", "0", "many", "-2"):
        assert threads_per_rank(1, {"OMP_NUM_THREADS": unusable}) == cores
