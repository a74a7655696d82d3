"""One rank's part of a step: forward over its weights and cache, then the draw. Holds no request state."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tpllama.engine.batch import Batch, Sampled
from tpllama.engine.cache import StaticCache
from tpllama.engine.sampler import Sampler
from tpllama.model.llama import Llama
from tpllama.parallel.collectives import Ranks


class Executor(Protocol):
    """What the engine asks of the model, whether it runs on one rank or many."""

    def allocate(self, rows: int, slots: int) -> None:
        """Makes an empty cache for `rows` sequences of up to `slots` tokens, in place of the one before."""

    def run(self, batch: Batch) -> list[Sampled]:
        """Computes the batch; the draws of its chunks that have one, in order."""

    def logits(self, tokens: list[list[int]]) -> Tensor:
        """Logits of whole sequences of equal length, float32 [batch, seq, vocab], by the reference forward."""

    def peak_memory_bytes(self) -> list[int]:
        """Each rank's peak memory so far."""


class Runner:
    """An Executor on this rank's share of the model. `owned`: the range of token ids its output head has."""

    def __init__(
        self, model: Llama, ranks: Ranks, heads: tuple[int, int], owned: tuple[int, int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.model = model
        self.ranks = ranks
        self.num_heads, self.num_kv_heads = heads
        self.dtype = dtype
        self.device = device
        self.sampler = Sampler(ranks, owned, model.config.vocab_size)
        self.cache: StaticCache | None = None

    def allocate(self, rows: int, slots: int) -> None:
        self.cache = None  # given back before the next is taken
        config = self.model.config
        queries_per_kv = self.num_heads // self.num_kv_heads
        self.cache = StaticCache(
            config.num_layers, rows, slots, self.num_kv_heads, config.head_dim, queries_per_kv, self.dtype, self.device
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sampled]:
        assert self.cache is not None
        tokens = [token for chunk in batch for token in chunk.tokens]
        positions = [position for chunk in batch for position in range(chunk.start, chunk.stop)]
        lengths = [chunk.length for chunk in batch for _ in chunk.tokens]
        last, ends = -1, []
        for chunk in batch:
            last += len(chunk.tokens)
            ends.append(last)
        draws = [chunk.draw for chunk in batch if chunk.draw]
        select = [end for chunk, end in zip(batch, ends, strict=True) if chunk.draw]
        self.cache.begin(batch)
        logits = self.model(*(self._ids(x) for x in (tokens, positions, lengths)), self.cache, self._ids(select))
        return self.sampler.sample(logits, draws) if draws else []

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def logits(self, tokens: list[list[int]]) -> Tensor:
        local = self.model(torch.tensor(tokens, dtype=torch.int64, device=self.device)).float()
        sizes = self.ranks.gather(torch.tensor([local.shape[-1]], device=self.device))[:, 0].tolist()
        widest = torch.zeros(*local.shape[:-1], max(sizes), device=self.device)
        widest[..., : local.shape[-1]] = local
        parts = self.ranks.gather(widest)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def peak_memory_bytes(self) -> list[int]:
        """Each rank's peak: of its process, or of what torch took on its GPU."""
        is_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if is_gpu else _peak_resident_bytes()
        return [int(each) for each in self.ranks.gather(torch.tensor([peak], device=self.device))[:, 0]]


def _peak_resident_bytes() -> int:
    """This process's own peak: getrusage's is inherited from the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
