"""Followers as child processes: how their ends are told, and that none outlives the leader."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tpllama.parallel import launch
from tpllama.parallel.launch import Death, Followers

ROOT = Path(__file__).parents[2]
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))}
Start = Callable[..., Followers]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(tp, {rank: deed})`: followers that run stand_in.py."""
    monkeypatch.setattr(launch, "FOLLOWER_MODULE", "stand_in")

    def start(tp: int, deeds: dict[int, str] | None = None, **orders: Any) -> Followers:
        named = {str(rank): deed for rank, deed in (deeds or {}).items()}
        return Followers(tp, {"deeds": named, **orders}, ENVIRON)

    return start


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("deed", "description"),
    [
        ("be killed", "rank 2 was ended by SIGKILL (out of memory, or killed from outside)"),
        ("crash", "rank 2 was ended by SIGSEGV"),
        ("exit", "rank 2 ended with exit code 3"),
        ("fail", "rank 2 failed: OSError: disk of rank 2"),
        ("refuse", "found a bad file, expected a good one"),
    ],
)
def test_a_followers_end_is_told_with_its_cause(start: Start, deed: str, description: str) -> None:
    with start(3, {2: deed}) as followers:
        death = followers.first_death(within_s=20)
        assert death is not None
        assert death.rank == 2
        assert death.user_error == (deed == "refuse")
        assert death.describe() == description


def test_the_cause_is_told_rather_than_what_followed_from_it(start: Start) -> None:
    with start(3, {1: "lose another", 2: "be killed"}) as followers:
        deadline = time.monotonic() + 20
        while (death := followers.first_death()) is None or death.rank == 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert death.returncode == -signal.SIGKILL


def test_nobody_died(start: Start) -> None:
    with start(2) as followers:
        assert followers.first_death() is None
        assert followers.first_death(within_s=0.1) is None


def test_closing_ends_all_at_once_and_is_no_death(start: Start) -> None:
    before = children()
    followers = start(4)
    assert len(children()) == len(before) + 3
    started = time.monotonic()
    followers.close()
    assert time.monotonic() - started < 4
    assert children() == before
    assert followers.first_death() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", followers.port), timeout=1)


def test_closing_ends_one_that_does_not_listen(start: Start) -> None:
    before = children()
    followers = start(3, {1: "ignore the leader"})
    time.sleep(0.5)
    followers.close(patience_s=0.5)
    assert children() == before


def test_closing_after_a_death_and_twice_is_fine(start: Start) -> None:
    followers = start(2, {1: "exit"})
    assert followers.first_death(within_s=20) is not None
    followers.close()
    followers.close()


def test_an_exception_in_the_with_block_ends_the_followers(start: Start) -> None:
    before = children()
    with pytest.raises(ZeroDivisionError), start(2):
        raise ZeroDivisionError
    assert children() == before


def test_on_death_calls_after_the_grace(start: Start) -> None:
    with start(3, {2: "be killed"}) as followers:
        deaths: list[Death] = []
        called = threading.Event()
        followers.on_death(lambda death: (deaths.append(death), called.set()), grace_s=0.2)
        assert called.wait(20)
        assert deaths[0].rank == 2


def test_on_death_is_silent_when_the_run_was_closed(start: Start) -> None:
    deaths: list[Death] = []
    followers = start(3, {2: "exit"})
    followers.on_death(deaths.append, grace_s=1)
    assert followers.first_death(within_s=20) is not None
    followers.close()
    time.sleep(1.2)
    assert deaths == []


def test_followers_are_out_of_reach_of_the_terminals_interrupt(start: Start) -> None:
    with start(2):
        assert [os.getpgid(child.pid) != os.getpgid(0) for child in children()] == [True]


# The leader's program: holds followers, says so, and goes on. argv: module, engine's config as JSON.
LEADER = """
import json, os, sys, time
from tpllama.parallel import launch
launch.FOLLOWER_MODULE = sys.argv[1]
orders = {"deeds": {}, "engine": json.loads(sys.argv[2]), "debug": False}
followers = launch.Followers(3, orders, os.environ)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("module", "after_s"),
    [("stand_in", 0.5), ("tpllama.follow", 0.0), ("tpllama.follow", 1.0), ("tpllama.follow", 5.0)],
    ids=["a stand-in", "at once", "while it imports", "while it joins"],
)
def test_a_killed_leader_takes_its_followers_along(
    make_checkpoint: Callable[..., Path], module: str, after_s: float
) -> None:
    engine = f'{{"model": "{make_checkpoint()}", "tp": 3, "device": "cpu"}}'
    command = [sys.executable, "-c", LEADER, module, engine]
    leader = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert leader.stdout is not None
    assert leader.stdout.readline() == "started\n"
    time.sleep(after_s)
    followers = psutil.Process(leader.pid).children()
    assert len(followers) == 2
    leader.kill()
    leader.wait()
    deadline = time.monotonic() + 5
    while alive := [process for process in followers if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for process in alive:
        process.kill()
    assert alive == []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; what ended waits for a new parent to take note."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
