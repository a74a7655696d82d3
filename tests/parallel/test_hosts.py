"""What ranks of several hosts make of what they tell each other, without any: see test_two_hosts.py for real ones."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from tpllama.config import UserError
from tpllama.parallel import hosts
from tpllama.parallel.place import Place

PLACE = Place(0, 3, 0, 1)
FILES = {"model-1.safetensors": 10, "model-2.safetensors": 20}


def told(
    host: str, files: dict[str, int] | None = None, failure: Exception | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "host": host,
        "failure": None if failure is None else str(failure),
        "is_user_error": isinstance(failure, UserError),
        "files": FILES if files is None else files,
        "fields": json.dumps(fields),
    }


def check(monkeypatch: pytest.MonkeyPatch, *others: dict[str, Any], failure: Exception | None = None) -> None:
    mine = told("a", failure=failure)
    monkeypatch.setattr(hosts, "_tell_all", lambda place, said: [mine, *others])
    hosts.check_hosts(PLACE, "m", failure, FILES, {})


def test_hosts_that_found_the_same_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, told("b"), told("c"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            told("b", {"model-2.safetensors": 20}),
            r"host b \(rank 1\) lacks model-1.safetensors of m on host a \(rank 0\)",
        ),
        (told("b", {}), "lacks model-1.safetensors and 1 more of m on host a"),
        (told("b", FILES | {"extra": 1}), "has extra, not of m on host a"),
        (told("b", FILES | {"model-1.safetensors": 9}), "has another size of model-1.safetensors of m"),
        (told("b", x=1), "has another config than that of m"),
    ],
)
def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^found that .*{message}.* expected the same files on every host"):
        check(monkeypatch, other, told("c"))


def test_a_host_that_cannot_go_on_is_named_with_its_ranks_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = UserError("found no model at 'm', expected a directory, check the path")
    with pytest.raises(UserError) as error:
        check(monkeypatch, told("b", failure=lacks), told("b", failure=lacks))
    assert str(error.value) == (
        "found that host b (rank 1, 2) can't run m, expected all hosts to: found no model at 'm', expected a "
        "directory, check the path"
    )
    with pytest.raises(RuntimeError, match=r"^host c \(rank 2\) failed: out of disk$"):
        check(monkeypatch, told("b"), told("c", failure=OSError("out of disk")))


def test_what_is_wrong_on_all_alike_is_said_as_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = UserError("found no model")
    with pytest.raises(UserError) as error:
        check(monkeypatch, told("b", failure=lacks), told("c", failure=lacks), failure=lacks)
    assert error.value is lacks


@pytest.mark.parametrize("given", ["1", "0", "soon", "-5", "99999", ""])
def test_an_impossible_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TPLLAMA_HOST_TIMEOUT_S", given)
    with pytest.raises(UserError, match=r"^found TPLLAMA_HOST_TIMEOUT_S=.* expected 2 to 3600 seconds"):
        hosts.host_timeout_s()


def test_a_host_that_has_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPLLAMA_HOST_TIMEOUT_S", "soon")
    said: list[Any] = []
    monkeypatch.setattr(hosts, "_tell_all", lambda place, mine: [mine, *said])
    said += [told("b"), told("b")]
    with pytest.raises(UserError, match=r"^found that host .* \(rank 0\) can't run m, .* found TPLLAMA_HOST_TIMEOUT_S"):
        hosts.check_hosts(PLACE, "m", None, FILES, {})


def test_new_connections_are_watched_and_old_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPLLAMA_HOST_TIMEOUT_S", "8")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as old:
        with hosts.noticing_lost_hosts(PLACE):
            new = socket.create_connection(server.getsockname())
        with hosts.noticing_lost_hosts(Place(0, 2, 0, 2)):
            of_one_host = socket.create_connection(server.getsockname())
        with new, of_one_host:
            limits = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in (old, new, of_one_host)]
            assert limits == [0, 8000, 0]
            assert new.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert new.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2


def test_processes_of_one_host_know_it() -> None:
    assert hosts.identity() == hosts.identity()
    assert os.readlink("/proc/self/ns/net") in hosts.identity()


def test_the_loopback_is_no_way_to_others() -> None:
    assert hosts.interface_towards("127.0.0.1") is None
    assert hosts.interface_towards("no.such.host.invalid") is None
