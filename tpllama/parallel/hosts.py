"""Ranks on several hosts: which are neighbours, what each host lacks, and how a host that is cut off is noticed.

A network that is cut closes no connection: who waits for a message would wait for ever. The kernel asks the other
host's now and then whether it is still there, and closes the connection where no answer comes within
TPLLAMA_HOST_TIMEOUT_S seconds (30). A rank that is only slow is not lost: its kernel answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tpllama.config import UserError
from tpllama.parallel.collectives import RankLost
from tpllama.parallel.place import Place

_DEFAULT_TIMEOUT_S = 30
# A host that fetches a model first may be late.
_START_WITHIN = timedelta(hours=1)
_GOODBYE_WITHIN = timedelta(seconds=10)
_PATIENCE = timedelta(days=7)
_SIOCGIFADDR = 0x8915  # netdevice(7)


def host_timeout_s() -> int:
    """After how many seconds without a sign a host is lost. Raises UserError for an environment that doesn't say."""
    given = os.environ.get("TPLLAMA_HOST_TIMEOUT_S", str(_DEFAULT_TIMEOUT_S))
    if not given.isdecimal() or not 2 <= int(given) <= 3600:
        raise UserError(
            f"found TPLLAMA_HOST_TIMEOUT_S={given!r} in the environment, expected 2 to 3600 seconds, correct it"
        )
    return int(given)


def identity() -> tuple[str, ...]:
    """Equal for processes that can share memory. Containers and network namespaces are hosts of their own."""
    with contextlib.suppress(OSError):
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text(), *namespaces
    return (socket.gethostname(),)


def neighbours(group: dist.ProcessGroup, can_share: bool) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks. One that can't share memory is by itself."""
    mine = (*identity(), "" if can_share else str(group.rank()))
    all_ranks: list[Any] = [mine] * group.size()
    dist.all_gather_object(all_ranks, mine, group=group)
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, host in enumerate(all_ranks):
        hosts.setdefault(host, []).append(rank)
    return list(hosts.values())


def torchrun_store(place: Place, purpose: str) -> Store:
    """What torchrun's ranks meet in, with a part of its own for each time that they meet for a purpose, one by one.

    The store outlives a group: the next one would find this one's addresses in it.
    """
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return PrefixStore(f"tpllama {purpose} {store.add(f'tpllama {purpose} by {place.rank}', 1)}", store)


@contextmanager
def noticing_lost_hosts(place: Place, timeout_s: int | None = None) -> Iterator[None]:
    """Has the kernel close connections that are made in the block when the host at their other end is gone."""
    before = _sockets()
    yield
    if place.local_size == place.size:
        return
    timeout_s = timeout_s or host_timeout_s()
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): max(timeout_s // 4, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): max(timeout_s // 8, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): timeout_s * 1000,  # tcp(7): of unanswered questions too
    }
    for name, descriptor in _sockets().items():
        if name in before:
            continue
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            for (level, option), value in options.items() if is_tcp else ():
                connection.setsockopt(level, option, value)


def _sockets() -> dict[str, int]:
    """This process's sockets by the kernel's name, with a descriptor of each."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{descriptor}")).startswith("socket:"):
                found[name] = int(descriptor)
    return found


def interface_towards(host: str) -> str | None:
    """The network interface through which `host` is reached, None where that is not known or this host's loopback.

    gloo takes the one of the host's own name, which many systems resolve to the loopback interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in () if address.startswith("127.") else socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def check_hosts(
    place: Place, model: str, failure: Exception | None, files: Mapping[str, int], fields: Mapping[str, Any]
) -> None:
    """Has all ranks tell each other what they found. Raises, alike on all, where one of them can't go on.

    failure: why this rank can't. files: its files with their sizes; fields: its config. Raises UserError for what a
    host lacks, and `failure` where all have the same.
    """
    try:
        host_timeout_s()
    except UserError as error:
        failure = failure or error
    said = {
        "host": socket.gethostname(),
        "failure": None if failure is None else str(failure) or type(failure).__name__,
        "is_user_error": isinstance(failure, UserError),
        "files": dict(files),
        "fields": json.dumps(dict(fields), sort_keys=True, default=str),
    }
    everyone = _tell_all(place, said)
    if failure is not None and len({each["failure"] for each in everyone}) == 1:
        raise failure
    if failed := [(rank, each) for rank, each in enumerate(everyone) if each["failure"] is not None]:
        _, first = failed[0]
        ranks = [rank for rank, each in failed if (each["host"], each["failure"]) == (first["host"], first["failure"])]
        where = f"host {first['host']} (rank {', '.join(map(str, ranks))})"
        if not first["is_user_error"]:
            raise RuntimeError(f"{where} failed: {first['failure']}")
        raise UserError(f"found that {where} can't run {model}, expected all hosts to: {first['failure']}")
    leader = everyone[0]
    for rank, each in enumerate(everyone):
        if difference := _difference(leader, each):
            raise UserError(
                f"found that host {each['host']} (rank {rank}) {difference} of {model} on host {leader['host']} "
                f"(rank 0), expected the same files on every host, copy them there"
            )


def _difference(leader: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What sets another rank's files apart from the leader's."""
    ours, theirs = leader["files"], other["files"]
    for verb, names in (
        ("lacks", [name for name in ours if name not in theirs]),
        ("has", [name for name in theirs if name not in ours]),
        ("has another size of", [name for name in ours if ours[name] != theirs.get(name)]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"{verb} {names[0]}{more}{', not' if verb == 'has' else ''}"
    return None if leader["fields"] == other["fields"] else "has another config than that"


def _tell_all(place: Place, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank said, by rank, before there is a group. Raises RankLost where one says nothing."""
    with noticing_lost_hosts(place, _DEFAULT_TIMEOUT_S):
        store = torchrun_store(place, "hosts checked")
    store.set(f"said {place.rank}", json.dumps(said))
    keys = [f"said {rank}" for rank in range(place.size)]
    try:
        store.wait(keys, _START_WITHIN)
        everyone = [json.loads(store.get(key)) for key in keys]
        # Who ends now may take the store along: the others must have read it.
        if store.add("heard", 1) == place.size:
            store.set("all heard", "")
        store.wait(["all heard"], _GOODBYE_WITHIN)
    except (dist.DistError, RuntimeError) as error:
        raise RankLost(f"lost another host before the model was opened: {' '.join(str(error).split())[:200]}") from None
    return everyone
