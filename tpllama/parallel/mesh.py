"""Joining the other ranks: process group and DeviceMesh."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpllama.parallel import shared_memory, symmetric
from tpllama.parallel.collectives import OneRank, ProcessGroupRanks, Ranks
from tpllama.parallel.hierarchical import HierarchicalRanks
from tpllama.parallel.hosts import interface_towards, neighbours, noticing_lost_hosts, torchrun_store
from tpllama.parallel.place import Place

# Followers wait in a collective while the leader waits for its user; a rank that died is noticed at once
# through its closed connection, a host that is cut off by the kernel (see `hosts`), so the limit only has to be out
# of the way.
_PATIENCE = timedelta(days=7)


def check_free() -> None:
    """Raises RuntimeError where this process is in a process group already."""
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already, close the LLM with tp > 1 that it has")


def join(
    place: Place,
    device_type: str,
    listener: socket.socket | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> tuple[DeviceMesh | None, Ranks]:
    """Joins the other ranks. Returns the mesh (None for one rank) and what they say to each other through.

    For ranks that the leader started itself: `listener` is its listening socket, and `while_waiting` is called
    again and again until all are there; it raises if one won't come.
    Raises RuntimeError where the others can't be reached.
    """
    if place.size == 1:
        return None, OneRank()
    check_free()
    with noticing_lost_hosts(place), _gloo_on(_interface(place)):
        return _join(place, device_type, listener, while_waiting)


def _join(
    place: Place, device_type: str, listener: socket.socket | None, while_waiting: Callable[[], None]
) -> tuple[DeviceMesh, Ranks]:
    backend = "nccl" if device_type == "cuda" else "gloo"
    if place.port is None:
        store = torchrun_store(place, "joined")
    else:
        store = TCPStore(
            "127.0.0.1",
            place.port,
            place.size,
            is_master=place.rank == 0,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
        _wait_for_all(store, place, while_waiting)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=_PATIENCE)
    mesh = init_device_mesh(device_type, (place.size,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    if backend == "nccl":
        nccl = ProcessGroupRanks(group, dist.new_group(backend="gloo", timeout=_PATIENCE))
        return mesh, symmetric.fastest(nccl, is_one_host=place.local_size == place.size)
    hosts = neighbours(group, shared_memory.is_available())
    if len(hosts) == 1:
        return mesh, shared_memory.SharedMemoryRanks(group)
    return mesh, HierarchicalRanks(group, hosts, _PATIENCE)


def _interface(place: Place) -> str | None:
    """The network interface for gloo, None for the one of this host's name."""
    if place.port is not None:  # all ranks are on this host: its loopback interface needs no look-up of the name
        return "lo"
    return interface_towards(os.environ.get("MASTER_ADDR", "")) if place.local_size < place.size else None


@contextmanager
def _gloo_on(interface: str | None) -> Iterator[None]:
    """Has groups that are made in the block use a network interface, unless the user says which."""
    name = "GLOO_SOCKET_IFNAME"
    if interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:  # what this process starts later may be on another network
        del os.environ[name]


def _wait_for_all(store: Store, place: Place, while_waiting: Callable[[], None]) -> None:
    """Makes this rank known and, on the leader, waits for the others: joining itself can't be broken off."""
    store.set(f"rank {place.rank}", "here")
    if place.rank > 0:
        return
    while not store.check([f"rank {rank}" for rank in range(place.size)]):
        while_waiting()
        time.sleep(0.02)


def leave() -> None:
    """Ends this process's part in the group that `join` made."""
    if dist.is_initialized():
        dist.destroy_process_group()
