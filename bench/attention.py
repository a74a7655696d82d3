"""One layer's attention over the paged cache on the CPU, tpllama's way against others, in one run, alternating.

    .venv/bin/python bench/attention.py [--shapes llama-1b-tp2] [--parts cases shared prompts] [--result-filename F]

Three parts: `cases` (decode, prefill, both mixed; all variants), `shared` (decodes whose first 3/4 are the same
blocks), `prompts` (a chunk's own square, so many queries in a call). Each variant is first compared with float32. The
figure is the median of the processor time of a call on one thread (what other processes take isn't in it), over so many
layers in turn that they come from memory, not from the processor's cache; plan_us is what is prepared once per step.
Only the C++'s time has the writing of keys and values in it. The parts `runs` and `causal` in the results are of this
file before tpllama was changed by them: runs joined by their sums, jagged tensors, and other ways to compute a square
lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # so that the compile time of flex_attention is a cold one

import torch
import torch.nn.functional as F
from record import cpu_model, versions
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tpllama.engine import attention_plan
from tpllama.engine.batch import Chunk
from tpllama.engine.cache import PlainStore, ScaledStore, Store
from tpllama.engine.memory import CacheShape
from tpllama.engine.native import NativeAttention

PARTS = ("cases", "shared", "prompts")
BLOCK, DTYPE, LAYERS_BYTES = 16, torch.bfloat16, 128 << 20
LIMITS = {"int8": 0.08, "fp8": 0.3}  # the largest error that is still rounding, of values around 1; else 0.04
Sequences = list[tuple[int, int]]  # tokens before the step, and in it
Attend = Callable[[int], Tensor]  # of a layer's number: [tokens, heads, head_dim]
Found = dict[str, dict[str, Any]]
compiled_flex = torch.compile(flex_attention, dynamic=True)
graphs = torch._dynamo.utils.counters["stats"]


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    group: int  # query heads of a KV head
    dim: int


SHAPES = {"llama-1b-tp2": Shape(16, 4, 4, 64), "smollm2-tp1": Shape(9, 3, 3, 64)}
CASES = {f"decode {n} x {context}": [(context - 1, 1)] * n for n in (1, 8, 32) for context in (128, 1024, 4096)}
CASES |= {"decode 32 x 128..4096": [(128 * n - 1, 1) for n in range(1, 33)]}
CASES |= {"prefill 512 after 0": [(0, 512)], "prefill 512 after 2048": [(2048, 512)]}
CASES |= {"480 + 32 decodes x 1024": [(0, 480)] + [(1023, 1)] * 32}


def place(sequences: Sequences, pieces: int, shared: float = 0.0) -> tuple[Chunk, ...]:
    """Each sequence in `pieces` runs of blocks that lie apart; the first blocks, a part `shared`, are those of all."""
    common = int(shared * sequences[0][0]) // BLOCK
    runs: list[list[tuple[int, int]]] = [[(0, common)] if common else [] for _ in sequences]
    free = common + 1
    for piece in range(pieces):
        for (start, count), each in zip(sequences, runs, strict=True):
            own = -(-(start + count) // BLOCK) - common
            if size := own * (piece + 1) // pieces - own * piece // pieces:
                each.append((free, size))
                free += size + 1
    return tuple(Chunk(start, (0,) * n, 0, tuple(each)) for (start, n), each in zip(sequences, runs, strict=True))


def slots(chunk: Chunk) -> Tensor:
    return torch.cat([torch.arange(first * BLOCK, (first + n) * BLOCK) for first, n in chunk.runs])[: chunk.stop]


class InPlace(PlainStore):
    """Is used where it lies, without a copy."""

    def read(self, start: int, size: int) -> Tensor:
        return self.data[start : start + size].transpose(0, 1).unsqueeze(0)


class Step:
    """Queries, layers of keys and values, and the ways to compute attention over them; each way is made once a step."""

    def __init__(self, shape: Shape, *layouts: tuple[Chunk, ...]) -> None:
        self.shape = shape
        size = BLOCK * (1 + max(first + n for chunks in layouts for chunk in chunks for first, n in chunk.runs))
        read = 4 * shape.kv_heads * shape.dim * sum(chunk.stop for chunk in layouts[0])
        most = 128 if all(len(chunk.tokens) == 1 for chunk in layouts[0]) else 4  # prefill waits for arithmetic
        layers = max(min(LAYERS_BYTES // read, most), 2)
        self.layers = torch.randn(layers, 2, size, shape.kv_heads, shape.dim).to(DTYPE)
        self.q = torch.randn(sum(len(chunk.tokens) for chunk in layouts[0]), shape.heads, shape.dim).to(DTYPE)

    def reference(self, chunks: tuple[Chunk, ...]) -> Tensor:
        """In float32, of the first layer."""
        out = []
        for chunk, q in zip(chunks, self.q.float().split([len(chunk.tokens) for chunk in chunks]), strict=True):
            k, v = (x[slots(chunk)].float().repeat_interleave(self.shape.group, 1) for x in self.layers[0])
            scores = torch.einsum("qhd,khd->hqk", q, k) / self.shape.dim**0.5
            hidden = torch.arange(chunk.stop) > torch.arange(chunk.start, chunk.stop)[:, None]
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(out)

    def ours(
        self, chunks: tuple[Chunk, ...], store: Callable[[Tensor], Any] = PlainStore, by_torch: bool = False,
        **constants: int,
    ) -> Attend:  # fmt: skip
        """by_torch: without our C++. constants: other values for those of attention_plan.py."""
        cache_shape = CacheShape(1, self.shape.kv_heads, self.shape.dim, "bfloat16", BLOCK)
        without = patch.object(NativeAttention, "fits", lambda *_: False)
        with without if by_torch or store is not PlainStore else nullcontext():
            planner = attention_plan.Planner(
                cache_shape, self.shape.group, self.shape.dim**-0.5, DTYPE, torch.device("cpu"), False
            )
        new = torch.cat([slots(chunk)[chunk.start :] for chunk in chunks])
        with patch.multiple(attention_plan, **constants) if constants else nullcontext():
            planned = planner.plan(chunks, new)
        stores = cache(lambda layer: [store(x) for x in self.layers[layer]])
        if not isinstance(planned, NativeAttention):
            return lambda layer: planned.attend(self.q, *stores(layer))
        q, k, v = self.q.flatten(1), *(x[new].flatten(1) for x in self.layers[0])
        return lambda layer: planned.keep_and_attend(q, k, v, None, *stores(layer)).view_as(self.q)

    def padded(self, chunks: tuple[Chunk, ...], slab: bool = False, enable_gqa: bool = False) -> Attend:
        """One masked call over what is gathered into [batch, kv_heads, longest, dim] each time (slab: once)."""
        longest = max(chunk.stop for chunk in chunks)
        where = torch.stack([F.pad(slots(chunk), (0, longest - chunk.stop)) for chunk in chunks])
        last = torch.tensor([range(chunk.start, chunk.stop) for chunk in chunks])
        mask = torch.zeros(*last.shape, longest, dtype=DTYPE)
        mask = mask.masked_fill_(torch.arange(longest) > last[..., None], -torch.inf).unsqueeze(1)
        mask = mask if enable_gqa else mask.repeat_interleave(self.shape.group, 2)
        q = self.q.view(*last.shape, self.shape.kv_heads, self.shape.group, self.shape.dim).transpose(1, 2)

        def gather(layer: int) -> list[Tensor]:
            flat = [x.index_select(0, where.view(-1)) for x in self.layers[layer]]
            return [x.view(*where.shape, *x.shape[1:]).transpose(1, 2) for x in flat]

        kept = cache(lambda layer: [x.contiguous() for x in gather(layer)]) if slab else gather

        def attend(layer: int) -> Tensor:
            if enable_gqa:
                heads = q.transpose(2, 3).flatten(1, 2)
                out = F.scaled_dot_product_attention(heads, *kept(layer), attn_mask=mask, enable_gqa=True)
                return out.transpose(1, 2).reshape(self.q.shape)
            rows = F.scaled_dot_product_attention(q.flatten(2, 3), *kept(layer), attn_mask=mask)
            return rows.view(q.shape).transpose(1, 2).reshape(self.q.shape)

        return attend

    def flex(self, chunks: tuple[Chunk, ...]) -> Attend:
        """Compiled flex_attention over all blocks: its BlockMask has the pages, its mask_mod their order."""
        count, size = len(chunks[0].tokens), self.layers.shape[2]
        pages = [slots(chunk)[::BLOCK] // BLOCK for chunk in chunks]
        order = torch.full((len(chunks), size // BLOCK), 1 << 40)  # of others' pages: after any token
        for row, page in zip(order, pages, strict=True):
            row[page] = torch.arange(len(page))
        before = torch.tensor([chunk.start for chunk in chunks])
        indices = torch.stack([F.pad(page, (0, size // BLOCK - len(page))) for page in pages]).int()
        numbers = torch.tensor([len(page) for page in pages]).int()
        query_blocks = -(-count // 128)
        mask = BlockMask.from_kv_blocks(
            numbers[:, None, None].repeat(1, 1, query_blocks), indices[:, None, None].repeat(1, 1, query_blocks, 1),
            BLOCK_SIZE=(128, BLOCK), seq_lengths=(count, size),
            mask_mod=lambda b, h, i, slot: order[b, slot // BLOCK] * BLOCK + slot % BLOCK <= i + before[b],
        )  # fmt: skip
        q = self.q.view(len(chunks), count, *self.q.shape[1:]).transpose(1, 2)

        def attend(layer: int) -> Tensor:
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in self.layers[layer])
            return compiled_flex(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).reshape(self.q.shape)

        return attend

    def measure(self, variants: dict[str, tuple[tuple[Chunk, ...], Callable[..., Attend]]], seconds: float) -> Found:
        """By variant: microseconds, the largest error, seconds of the first call where it compiles; or why it can't."""
        found: Found = {}
        ready: dict[str, tuple[Attend, int]] = {}
        for name, (chunks, make) in variants.items():
            started, before = time.perf_counter(), graphs["unique_graphs"]
            attend = make(chunks)
            planned = time.perf_counter()
            try:
                out = attend(0)
            except Exception as refusal:  # noqa: BLE001
                found[name] = {"refuses": f"{type(refusal).__name__}: {' '.join(str(refusal).split())[:100]}"}
                continue
            first_s = round(time.perf_counter() - planned, 1)
            compiled = {"compiled_s": first_s} if graphs["unique_graphs"] > before else {}
            error = (out.float() - self.reference(chunks)).abs().max().item()
            if error > LIMITS.get(name, 0.04):
                raise ArithmeticError(f"{name} is off by {error}")
            found[name] = {"us": 0.0, "plan_us": round((planned - started) * 1e6), "error": round(error, 4)} | compiled
            for layer in range(len(self.layers)):  # what is made once for a layer, is made
                started = time.perf_counter()
                attend(layer)
            ready[name] = attend, max(int(0.004 / (time.perf_counter() - started)), 1)
        times: dict[str, list[float]] = {name: [] for name in ready}
        until, rounds, layer = time.perf_counter() + seconds, 0, itertools.count()
        while time.perf_counter() < until or rounds < 5:
            rounds += 1
            for name, (attend, calls) in ready.items():
                started = time.thread_time()
                for _ in range(calls):
                    attend(next(layer) % len(self.layers))
                times[name].append((time.thread_time() - started) / calls * 1e6)
        return found | {name: found[name] | {"us": round(statistics.median(each), 1)} for name, each in times.items()}


def scaled(x: Tensor, stored: torch.dtype) -> Store:
    scales = x.float().abs().amax(-1, keepdim=True) / (127 if stored == torch.int8 else 448)
    values = x.float() / scales
    rounded = values.round() if stored == torch.int8 else values
    return ScaledStore(rounded.to(stored), scales, 127 if stored == torch.int8 else 448, DTYPE)


def cases(shape: Shape, sequences: Sequences, seconds: float) -> Found:
    one, scattered = place(sequences, 1), place(sequences, 1 << 10)
    step = Step(shape, one, scattered)
    variants = {
        "one run": (one, step.ours), "scattered": (scattered, step.ours),
        "torch, one run": (one, partial(step.ours, by_torch=True)),
        "torch, scattered": (scattered, partial(step.ours, by_torch=True)),
        "torch, in place": (one, partial(step.ours, store=InPlace)),
        "int8": (one, partial(step.ours, store=partial(scaled, stored=torch.int8))),
        "fp8": (one, partial(step.ours, store=partial(scaled, stored=torch.float8_e4m3fn))),
    }  # fmt: skip
    if len({count for _, count in sequences}) == 1:
        variants |= {
            "padded copy": (scattered, step.padded), "slab": (one, partial(step.padded, slab=True)),
            "slab, enable_gqa": (one, partial(step.padded, slab=True, enable_gqa=True)),
            "flex, paged": (scattered, step.flex),
        }  # fmt: skip
    return step.measure(variants, seconds)


def shared(shape: Shape, sequences: Sequences, seconds: float) -> Found:
    same = place(sequences, 1, shared=0.75)
    step = Step(shape, same)
    ways = {"together": 1, "by each": 1 << 40, "as it decides": attention_plan._SHARED_TOKENS}
    return step.measure({way: (same, partial(step.ours, _SHARED_TOKENS=n)) for way, n in ways.items()}, seconds)


def prompts(shape: Shape, length: int, seconds: float) -> Found:
    chunks = place([(0, length)], 1)
    step = Step(shape, chunks)
    sizes = [size for size in (32, 64, 128, 256) if size < length] + [length]
    return step.measure({f"{n} queries a call": (chunks, partial(step.ours, _QUERIES=n)) for n in sizes}, seconds)


def works(part: str) -> dict[str, tuple[Callable[[Shape, Any, float], Found], Any]]:
    decodes = {f"decode {n} x {size}": [(size - 1, 1)] * n for n in (1, 2, 4, 8, 32) for size in (128, 512, 1024, 4096)}
    return {
        "cases": {name: (cases, sequences) for name, sequences in CASES.items()},
        "shared": {name: (shared, each) for name, each in decodes.items() if len(each) > 1},
        "prompts": {f"square of {size}": (prompts, size) for size in (8, 64, 128, 512, 1024)},
    }[part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each case, at the least")
    parser.add_argument("--result-filename")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part, shape in itertools.product(arguments.parts, arguments.shapes):
        for name, (work, what) in works(part).items():
            with torch.no_grad():
                found = work(SHAPES[shape], what, arguments.seconds)
            print(f"{part}, {shape}, {name}", flush=True)
            for variant, each in found.items():
                print(
                    f"    {variant:>21} {each.get('us', '-'):>9} us",
                    " ".join(f"{k} {v}" for k, v in each.items() if k != "us"),
                )
            if arguments.result_filename:
                record = {
                    "bench": "attention", "part": part, "date": date.today().isoformat(), "shape": shape, "work": name,
                    "variants": found, "cpu": cpu_model(), "versions": versions(),
                }  # fmt: skip
                with Path(arguments.result_filename).open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
