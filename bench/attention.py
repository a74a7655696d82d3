"""One layer's attention over the paged cache on the CPU, tpllama's way against others, in one run, alternating.

    .venv/bin/python bench/attention.py [--shapes llama-1b-tp2] [--parts cases runs shared causal] [--result-filename F]

Four parts: `cases` (decode, prefill, both mixed; all variants), `runs` (a sequence in k runs of blocks: joined by
their logarithms of sums, or gathered), `shared` (decodes whose first 3/4 are the same blocks), `causal` (ways to do a
chunk's own square). Each variant is first compared with float32. The figure is the median of the processor time of a
call on one thread (what other processes take isn't in it), over so many layers in turn that they come from memory, not
from the processor's cache; plan_us is what is prepared once per step. Writing keys and values is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # so that the compile time of flex_attention is a cold one

import torch
import torch.nn.functional as F
from load_memory import cpu_model, versions
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from tpllama.engine import attention
from tpllama.engine.batch import Chunk
from tpllama.engine.cache import PlainStore, ScaledStore, Store

PARTS = ("cases", "runs", "shared", "causal")
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


class ClonedSpans:
    """A `Store` that copies what it gives: one pass over memory, then arithmetic on what is in the cache."""

    def __init__(self, data: Tensor) -> None:
        self.span = lambda start, count: data[start : start + count].clone().transpose(0, 1).unsqueeze(0)


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

    def ours(self, chunks: tuple[Chunk, ...], most_runs: int = attention._MOST_RUNS, always_copy: bool = False,
             read_once: bool = True, store: Callable[[Tensor], Any] = PlainStore) -> Attend:  # fmt: skip
        planner = attention.Planner(BLOCK, self.shape.group, DTYPE, torch.device("cpu"), always_copy)
        if not read_once:
            planner._shared = lambda *_: iter(())  # type: ignore[method-assign]
        attention._MOST_RUNS, before = most_runs, attention._MOST_RUNS
        planned = planner.plan(chunks)
        attention._MOST_RUNS = before
        stores = cache(lambda layer: [store(x) for x in self.layers[layer]])
        return lambda layer: planned.attend(self.q, *stores(layer))

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

    def ragged(self, chunks: tuple[Chunk, ...], varlen: bool = False, enable_gqa: bool = False) -> Attend:
        """Decodes as jagged nested tensors (else than with enable_gqa, keys are repeated), or by varlen_attn."""
        where, lengths = torch.cat([slots(chunk) for chunk in chunks]), [chunk.stop for chunk in chunks]
        rows, columns = torch.arange(len(chunks) + 1), torch.tensor([0, *lengths]).cumsum(0)
        repeats = 1 if enable_gqa or varlen else self.shape.group

        def attend(layer: int) -> Tensor:
            k, v = (x.index_select(0, where).repeat_interleave(repeats, 1) for x in self.layers[layer])
            if varlen:
                return varlen_attn(self.q, k, v, rows.int(), columns.int(), 1, max(lengths), enable_gqa=True)
            pairs = ((self.q, rows), (k, columns), (v, columns))
            nested = [torch.nested.nested_tensor_from_jagged(*pair).transpose(1, 2) for pair in pairs]
            return F.scaled_dot_product_attention(*nested, enable_gqa=enable_gqa).transpose(1, 2).values()

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
    return ScaledStore((values.round() if stored == torch.int8 else values).to(stored), scales, DTYPE)


def cases(shape: Shape, sequences: Sequences, seconds: float) -> Found:
    one, four, scattered = (place(sequences, pieces) for pieces in (1, 4, 1 << 10))
    step = Step(shape, one, four, scattered)
    variants = {
        "one run": (one, step.ours), "4 runs": (four, step.ours), "scattered": (scattered, step.ours),
        "always copy": (one, partial(step.ours, always_copy=True)),
        "one run, cloned": (one, partial(step.ours, store=ClonedSpans)),
        "int8": (one, partial(step.ours, store=partial(scaled, stored=torch.int8))),
        "fp8": (one, partial(step.ours, store=partial(scaled, stored=torch.float8_e4m3fn))),
    }  # fmt: skip
    if len({count for _, count in sequences}) == 1:
        variants |= {
            "padded copy": (scattered, step.padded), "slab": (one, partial(step.padded, slab=True)),
            "slab, enable_gqa": (one, partial(step.padded, slab=True, enable_gqa=True)),
            "flex, paged": (scattered, step.flex),
        }  # fmt: skip
    if all(count == 1 for _, count in sequences) and sum(start for start, _ in sequences) < 20000:  # jagged is slow
        variants |= {
            "jagged": (scattered, step.ragged), "varlen_attn": (one, partial(step.ragged, varlen=True)),
            "jagged, enable_gqa": (scattered, partial(step.ragged, enable_gqa=True)),
        }  # fmt: skip
    return step.measure(variants, seconds)


def runs(shape: Shape, sequences: Sequences, seconds: float) -> Found:
    layouts = {k: place(sequences, k) for k in (1, 2, 4, 8, 16, 32) if k <= sum(sequences[0]) // BLOCK}
    step = Step(shape, *layouts.values())
    ways = {"joined": step.ours, "cloned, joined": partial(step.ours, store=ClonedSpans)}
    ways = {name: partial(way, most_runs=1 << 20) for name, way in ways.items()}
    ways |= {"gathered": partial(step.ours, most_runs=0)}
    return step.measure({f"{k} {name}": (layouts[k], way) for k in layouts for name, way in ways.items()}, seconds)


def shared(shape: Shape, sequences: Sequences, seconds: float) -> Found:
    same, own = place(sequences, 1, shared=0.75), place(sequences, 1)
    step = Step(shape, own, same)
    apart = partial(step.ours, read_once=False)
    gathered = partial(step.ours, read_once=False, most_runs=0)
    variants = {"read once": (same, step.ours), "read by each": (same, apart), "gathered by each": (same, gathered)}
    clone = partial(step.ours, store=ClonedSpans)
    variants |= {"read once, cloned": (same, clone), "none shared": (own, step.ours), "none, cloned": (own, clone)}
    return step.measure(variants, seconds)


def causal(shape: Shape, length: int, seconds: float) -> Found:
    """Ways to do a chunk's own square; each gives the logarithms of sums too, which joining needs."""
    chunks = place([(0, length)], 1)
    step, group = Step(shape, chunks), shape.group
    q = step.q.view(length, shape.kv_heads, group, shape.dim).permute(2, 1, 0, 3)  # [group, kv_heads, length, dim]

    def own(layer: int) -> list[Tensor]:
        return [x[BLOCK : BLOCK + length].transpose(0, 1).unsqueeze(0) for x in step.layers[layer]]

    def each_query_head(layer: int) -> Tensor:
        out = torch.empty_like(step.q).view(length, shape.kv_heads, group, shape.dim)
        for i in range(group):
            out[:, :, i] = attention._flash(q[i : i + 1], *own(layer), is_causal=True)[0][0].transpose(0, 1)
        return out.view_as(step.q)

    def repeated(layer: int) -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in own(layer))
        return attention._flash(step.q.transpose(0, 1).unsqueeze(0), k, v, is_causal=True)[0][0].transpose(0, 1)

    def as_batch(layer: int) -> Tensor:
        k, v = (x.expand(group, -1, -1, -1) for x in own(layer))
        return attention._flash(q, k, v, is_causal=True)[0].permute(2, 1, 0, 3).reshape(step.q.shape)

    def by_queries(size: int) -> Attend:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        full = torch.zeros(hidden.shape, dtype=DTYPE).masked_fill_(hidden, -torch.inf)
        starts = range(0, length, size)
        masks = [full[start : start + size, : start + size].repeat_interleave(group, 0) for start in starts]
        tokens_first = q.permute(1, 2, 0, 3).unsqueeze(0)

        def attend(layer: int) -> Tensor:
            (k, v), out = own(layer), torch.empty_like(step.q).view(length, shape.kv_heads, group, shape.dim)
            for start, mask in zip(starts, masks, strict=True):
                moved, stop = tokens_first[:, :, start : start + size], start + size
                rows = attention._flash(moved.flatten(2, 3), k[:, :, :stop], v[:, :, :stop], attn_mask=mask)[0]
                out[start:stop] = rows.view(moved.shape)[0].transpose(0, 1)
            return out.view_as(step.q)

        return attend

    ways = {"call per query head": each_query_head, "repeated keys": repeated, "query heads as batch": as_batch}
    ways |= {f"mask, by {size} queries": by_queries(size) for size in (64, 128, 256) if size < length}
    variants: dict[str, Any] = {name: (chunks, lambda _, way=way: way) for name, way in ways.items()}
    return step.measure({"mask on grouped rows": (chunks, step.ours)} | variants, seconds)


def works(part: str) -> dict[str, tuple[Callable[[Shape, Any, float], Found], Any]]:
    decodes = {f"decode {n} x {size}": [(size - 1, 1)] * n for n in (1, 2, 4, 8, 32) for size in (128, 512, 1024, 4096)}
    prefills = {f"prefill {n} after 2048": [(2048, n)] for n in (32, 512)}
    return {
        "cases": {name: (cases, sequences) for name, sequences in CASES.items()},
        "runs": {name: (runs, each) for name, each in (decodes | prefills).items() if len(each) in (1, 8)},
        "shared": {name: (shared, each) for name, each in decodes.items() if len(each) > 1},
        "causal": {f"square of {size}": (causal, size) for size in (2, 8, 32, 128, 256, 512, 768, 1024, 2048)},
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
