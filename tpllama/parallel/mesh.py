"""Joining the other ranks: process group and DeviceMesh."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpllama.parallel import shared_memory
from tpllama.parallel.collectives import OneRank, ProcessGroupRanks, Ranks
from tpllama.parallel.place import Place

# Followers wait in a collective while the leader waits for its user; a rank that died is noticed at once
# through its closed connection, so the limit only has to be out of the way.
_PATIENCE = timedelta(days=7)


def join(place: Place, device_type: str, listener: socket.socket | None = None) -> tuple[DeviceMesh | None, Ranks]:
    """Joins the other ranks. Returns the mesh (None for one rank) and what they say to each other through.

    `listener` is the leader's listening socket, when it started the ranks itself.
    Raises RuntimeError where the others can't be reached.
    """
    if place.size == 1:
        return None, OneRank()
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already, close the LLM with tp > 1 that it has")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if place.port is None:
        dist.init_process_group(backend, timeout=_PATIENCE)
    else:
        # All ranks are on this host: its loopback interface needs no look-up of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = TCPStore(
            "127.0.0.1",
            place.port,
            place.size,
            is_master=place.rank == 0,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=_PATIENCE)
    mesh = init_device_mesh(device_type, (place.size,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    is_one_host = place.local_size == place.size
    if backend == "gloo" and is_one_host and shared_memory.is_available():
        return mesh, shared_memory.SharedMemoryRanks(group)
    control = group if backend == "gloo" else dist.new_group(backend="gloo", timeout=_PATIENCE)
    return mesh, ProcessGroupRanks(group, control)


def leave(place: Place) -> None:
    """Ends this process's part in the group, where there is one."""
    if place.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
