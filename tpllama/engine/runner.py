"""One rank's part of a step: forward over its weights and cache, then the draw. Holds no request state."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path

import torch
from torch import Tensor

from tpllama.engine.batch import Batch, Chunk, Result, Sampled
from tpllama.engine.cache import PagedCache
from tpllama.engine.executor import CausalModel, ModelMetadata, bucket
from tpllama.engine.graphs import Capture, DecodeGraphs
from tpllama.engine.memory import CacheShape
from tpllama.engine.request import TokenLogprobs
from tpllama.engine.sampler import Sampler, is_plainly_greedy
from tpllama.parallel.collectives import Ranks


class Runner:
    """A ModelExecutor on this rank's share of a model.

    is_bucketed: steps are filled up to a few sizes, so that what was compiled for one is used again. capture: records
    decode steps of up to `most_texts`; without, they run as all others.
    """

    def __init__(
        self, model: CausalModel, metadata: ModelMetadata, ranks: Ranks, cache: PagedCache, device: torch.device,
        is_bucketed: bool, capture: Capture | None = None, most_texts: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.ranks = ranks
        self.cache = cache
        self.device = device
        self.is_bucketed = is_bucketed
        self.sampler = Sampler(ranks, metadata.owned_tokens, metadata.vocab_size)
        self.graphs = DecodeGraphs(model, self.sampler, cache, capture, most_texts) if capture else None

    @property
    def cache_shape(self) -> CacheShape:
        return self.cache.shape

    @torch.inference_mode()
    def warm_up(self, most_tokens: int) -> None:
        """Runs a step of each size there is up to `most_tokens`, so that all is compiled before the first request.

        And records those of short texts.
        """
        size = 0
        while self.is_bucketed and size < most_tokens:
            size = bucket(size + 1)
            self.cache.begin(Batch(), size)
            ids, ones = (torch.full((size,), value, device=self.device) for value in (0, 1))
            self.model(ids, ids, ones, self.cache.layers, ids[:1])
        if self.graphs:
            self.graphs.record_short()

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Result]:
        if self.graphs and self.graphs.takes(batch.chunks):
            return self._replay(batch, self.graphs)
        tokens, positions, lengths = _columns(batch.chunks)
        drawn, scored = _selected(batch.chunks)
        ends = {end: row for row, end in enumerate(dict.fromkeys(drawn))}  # samples draw from one token's logits
        size = bucket(len(tokens)) if self.is_bucketed else len(tokens)
        self.cache.begin(batch, size)
        filling = [0] * (size - len(tokens))
        ids, places, spans = torch.tensor(
            [tokens + filling, positions + filling, lengths + [1] * len(filling)], device=self.device
        )
        selected = [*ends, *scored]
        is_all = selected == list(range(size))
        select = None if is_all else torch.tensor(selected, dtype=torch.int64, device=self.device)
        logits = self.model(ids, places, spans, self.cache.layers, select)
        to_draw = logits[: len(ends)]
        if len(ends) < len(drawn):
            to_draw = to_draw[[ends[end] for end in drawn]]
        return self._results(batch.chunks, to_draw, logits[len(ends) :])

    def _replay(self, batch: Batch, graphs: DecodeGraphs) -> list[Result]:
        logits, likeliest = graphs.run(batch)
        rows = [row for row, chunk in enumerate(batch.chunks) for _ in chunk.draws]
        if not all(is_plainly_greedy(draw) for chunk in batch.chunks for draw in chunk.draws):
            return self._results(batch.chunks, logits[rows], logits[:0])
        tokens = likeliest.tolist()
        return [Result((Sampled(tokens[row]),) * len(chunk.draws)) for row, chunk in enumerate(batch.chunks)]

    def _results(self, chunks: tuple[Chunk, ...], drawn: Tensor, scored: Tensor) -> list[Result]:
        draws = [draw for chunk in chunks for draw in chunk.draws]
        sampled: list[Sampled] = self.sampler.sample(drawn, draws) if draws else []
        wanted = [chunk.scored for chunk in chunks if chunk.scored]
        following = [token for each in wanted for token in each.following]
        counts = [each.logprobs for each in wanted for _ in each.following]
        scores: list[TokenLogprobs] = self.sampler.score(scored, following, counts) if wanted else []
        next_sampled, next_score = iter(sampled), iter(scores)
        return [
            Result(
                tuple(itertools.islice(next_sampled, len(chunk.draws))),
                tuple(itertools.islice(next_score, len(chunk.scored.following) if chunk.scored else 0)),
            )
            for chunk in chunks
        ]

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


def _columns(chunks: tuple[Chunk, ...]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, their positions, and the lengths for which they are rotated."""
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    for chunk in chunks:
        places = range(chunk.start, chunk.stop)
        tokens += chunk.tokens
        positions += places
        lengths += [max(chunk.prompt_length, place + 1) for place in places]
    return tokens, positions, lengths


def _selected(chunks: tuple[Chunk, ...]) -> tuple[list[int], list[int]]:
    """The step's tokens whose logits are wanted: once for each draw, and for each scored token that follows one."""
    drawn: list[int] = []
    scored: list[int] = []
    first = 0
    for chunk in chunks:
        if chunk.scored:
            scored += range(first, first + len(chunk.scored.following))
        first += len(chunk.tokens)
        drawn += [first - 1] * len(chunk.draws)
    return drawn, scored


def _peak_resident_bytes() -> int:
    """This process's own peak: getrusage's is inherited from the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
