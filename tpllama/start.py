"""One rank from orders to a loaded share of the model: threads, device, group, blueprint, weights."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable

import torch

from tpllama.architectures import loader_of
from tpllama.blueprint import Blueprint
from tpllama.build import Progress
from tpllama.checkpoint.open import Checkpoint, overridden
from tpllama.config import EngineConfig, UserError
from tpllama.engine.cache import PagedCache
from tpllama.engine.executor import ModelLoader, ModelMetadata
from tpllama.engine.graphs import Capture, CudaCapture
from tpllama.engine.memory import UNKNOWN_FREE_BYTES, CacheShape, fitting_blocks, free_host_bytes, sized
from tpllama.engine.runner import Runner
from tpllama.parallel.collectives import Ranks
from tpllama.parallel.mesh import join
from tpllama.parallel.place import Place, own_cores, threads_per_rank

# Host memory for the keys and values of preempted requests, where the cache is a GPU's.
_SWAP_BYTES = 4 << 30


def resolve_device(asked: str, local_rank: int = 0) -> torch.device:
    """The device of a rank. Raises UserError where there is no such device."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"found {torch.cuda.device_count()} CUDA devices, expected one for each rank on this host, "
            f"lower --tp or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def start_rank(
    blueprint: Blueprint,
    checkpoint: Checkpoint,
    place: Place,
    listener: socket.socket | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    progress: Progress = list,
) -> Runner:
    """Joins the other ranks (see `join`), loads this one's share. Raises UserError for files that can't be loaded."""
    torch.set_num_threads(threads_per_rank(place.local_size, os.environ))
    device = resolve_device(blueprint.engine.device, place.local_rank)
    if device.type == "cpu" and (cores := own_cores(place, os.environ)):
        os.sched_setaffinity(0, cores)  # threads that start from here on, torch's among them, keep to them
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh, ranks = join(place, device.type, listener, while_waiting)
    try:
        _check_same_files(checkpoint, ranks, device)
        load = loader_of(overridden(checkpoint, blueprint.engine.json_model_override_args))
        loader: ModelLoader = load(blueprint, checkpoint, mesh, ranks, device, progress)
        is_recorded = device.type == "cuda" and blueprint.engine.compile != "off"
        capture = CudaCapture() if is_recorded else None
        return run_model(loader, blueprint.engine, ranks, place.local_size, device, capture)
    except BaseException:
        ranks.break_off()
        raise


def run_model(
    loader: ModelLoader, engine: EngineConfig, ranks: Ranks, local_size: int, device: torch.device,
    capture: Capture | None = None,
) -> Runner:  # fmt: skip
    """Loads the weights, then gives the cache its share of the memory that is left.

    local_size: ranks on this host. capture: see `Runner`.
    """
    model, metadata = loader.load(), loader.metadata
    shape = _agree_on_cache(metadata, engine, ranks, local_size, device)
    dtype = getattr(torch, engine.dtype)
    cache = PagedCache(shape, metadata.queries_per_kv, metadata.scale, dtype, device, is_alone=engine.batch_invariant)
    is_bucketed = engine.compile == "on"
    runner = Runner(model, metadata, ranks, cache, device, is_bucketed, capture, engine.max_batch_size)
    runner.warm_up(engine.max_batch_tokens)
    return runner


def _agree_on_cache(
    metadata: ModelMetadata, engine: EngineConfig, ranks: Ranks, local_size: int, device: torch.device
) -> CacheShape:
    """A cache of as many blocks as fit on each rank."""
    shape, swap_bytes = metadata.cache_shape(engine, device.type), engine.swap_memory
    free_host = (free_host_bytes() or UNKNOWN_FREE_BYTES) // local_size
    is_gpu = device.type == "cuda"
    if swap_bytes is None:
        swap_bytes = min(_SWAP_BYTES, free_host // 4) if is_gpu else 0
    if swap_bytes > free_host:
        raise UserError(
            f"found {swap_bytes} bytes asked for swapped-out requests, expected at most the {free_host} that are free "
            f"for each rank, lower swap_memory"
        )
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else free_host - swap_bytes
    needed = engine.max_batch_size * metadata.context_length
    blocks = fitting_blocks(shape, engine.kv_cache_memory, needed, free_bytes, device.type)
    most = torch.tensor([blocks, swap_bytes // shape.bytes_per_block], device=device)
    blocks, host_blocks = (-ranks.max(-most)).tolist()
    return sized(shape, blocks, host_blocks, is_lazy=engine.kv_cache_memory is None and not is_gpu)


def _check_same_files(checkpoint: Checkpoint, ranks: Ranks, device: torch.device) -> None:
    """Raises UserError, on all ranks, where they opened different files: each of torchrun's chooses for itself."""
    files = [(file.name, file.stat().st_size) for file in checkpoint.files]
    seen = json.dumps([files, dict(checkpoint.fields)], sort_keys=True, default=str).encode()
    digest = int.from_bytes(hashlib.blake2b(seen, digest_size=6).digest())
    high, low = ranks.max(torch.tensor([digest, -digest], device=device)).tolist()
    if high != -low:
        raise UserError(
            f"found that ranks opened different files (this one those of {checkpoint.path}), expected the same on all, "
            f"give the folder of one model that is complete"
        )


def draw_blueprint(engine: EngineConfig, checkpoint: Checkpoint) -> Blueprint:
    """The blueprint for the device that `engine` asks for. Raises UserError for what can't work."""
    return Blueprint.of(engine, checkpoint, resolve_device(engine.device).type)
