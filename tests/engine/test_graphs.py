"""Recorded decode steps give what other steps give, and hold nothing that a GPU couldn't record.

Recording is a GPU's: here a replay computes again. tests/test_gpu.py replays CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from engine.thread_ranks import ThreadRanks, on_ranks
from kernels.making import neutral_of_any
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpllama import LLM, SamplingParams
from tpllama import start as starting
from tpllama.engine.batch import Batch, Chunk, Draw, Scored
from tpllama.engine.cache import PagedCache
from tpllama.engine.graphs import DecodeGraphs, Outputs
from tpllama.engine.memory import CacheShape
from tpllama.engine.request import NO_NUMBERS, NO_TOKEN
from tpllama.engine.sampler import Sampler, is_plainly_greedy
from tpllama.engine.varlen import GatheredAttention, VarlenAttention
from tpllama.kernels.pack import pack
from tpllama.llama_config import LlamaConfig
from tpllama.model.llama import Llama
from tpllama.parallel.collectives import OneRank

PROMPTS = [[(7 * place + step) % 211 for step in range(1 + 13 * place % 60)] for place in range(9)]
PARAMS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=1.0, n=2),
    SamplingParams(max_new_tokens=7, ignore_eos=True, logprobs=2, repetition_penalty=1.3),
]
CPU, BLOCK = torch.device("cpu"), 4


class Recomputing:
    """A Capture whose replay computes again, and puts the results where the first ones lay."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        self.recorded += 1
        outputs = compute()

        def replay() -> None:
            self.replayed += 1
            for to, result in zip(outputs, compute(), strict=True):
                to.copy_(result)

        return replay, outputs


@contextlib.contextmanager
def recording(capture: Recomputing) -> Iterator[None]:
    """What models that are loaded within record with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "run_model", lambda *given: RUN_MODEL(*given[:5], capture))
        yield


RUN_MODEL = starting.run_model
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "int8 cache": {"kv_cache_dtype": "int8"}, "one by one": {"batch_invariant": True},
    "small blocks": {"block_size": 2, "max_batch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_texts_are_the_same_with_and_without(make_checkpoint: Callable[..., Path], options: dict[str, Any]) -> None:
    """Greedy texts alone, and with others that are drawn and penalized."""
    capture = Recomputing()
    load = functools.partial(LLM, str(make_checkpoint()), device="cpu", dtype="float32", **options)
    mixed = [PARAMS[place % 3] for place in range(len(PROMPTS))]

    def texts(llm: LLM) -> list[list[int]]:
        outputs = [*llm.generate(PROMPTS, PARAMS[0]), *llm.generate(PROMPTS, mixed)]
        return [output.token_ids for output in outputs]

    with recording(capture), load() as llm:
        short = capture.recorded
        assert short == (3 if "max_batch_size" in options else 8)  # 1, 2, 4; 8, 12, 16, 24, 32 texts
        found = texts(llm)
        assert capture.recorded > short  # of longer texts, when they came
        recorded, replayed = capture.recorded, capture.replayed
        assert texts(llm) == found
        assert capture.recorded == recorded  # all are used again
        assert capture.replayed > 1.8 * replayed
    with load() as llm:
        assert texts(llm) == found
    assert replayed >= 20


def cache_of(dtype: str = "float32", num_blocks: int = 8) -> PagedCache:
    return PagedCache(CacheShape(1, 2, 8, dtype, BLOCK, num_blocks), 3, 0.5, torch.float32, CPU)


class Echo:
    """In a model's place: remembers what it was given, and has a layer of attention for logits."""

    def __init__(self) -> None:
        self.given: dict[str, list[int]] = {}

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, caches: Any, select: None = None) -> Tensor:
        self.given = {"tokens": tokens.tolist(), "positions": positions.tolist(), "lengths": lengths.tolist()}
        k, v = (torch.randn(len(tokens), 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
        q = torch.randn(len(tokens), 6, 8, generator=torch.Generator().manual_seed(3))
        return caches[0].attend(q, k, v).flatten(1)


CHUNKS = (
    Chunk(9, (40,), 12, ((4, 1), (1, 3))),  # of 4 blocks that it has, it needs three
    Chunk(0, (41,), 1, ((5, 1),)),
    Chunk(5, (42,), 3, ((6, 2),)),
)


def test_what_a_step_is_told_and_what_it_leaves_alone() -> None:
    cache, model = cache_of(), Echo()
    graphs = DecodeGraphs(model, Sampler(OneRank(), (0, 48), 48), cache, Recomputing(), 8)
    for part in cache.layers[0].parts():
        part.normal_(generator=torch.Generator().manual_seed(0))
    before = [part.clone() for part in cache.layers[0].parts()]
    outputs = graphs.run(Batch(CHUNKS))
    assert model.given == {"tokens": [40, 41, 42, 0], "positions": [9, 0, 5, 0], "lengths": [12, 1, 6, 1]}
    [recorded] = graphs._recorded.values()
    assert recorded.inputs[3].tolist() == [1 * BLOCK + BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 1, 8 * BLOCK]
    assert recorded.inputs[4:].t().tolist() == [
        [10, 4, 1, 2, 8], [1, 5, 8, 8, 8], [6, 6, 7, 8, 8], [1, 8, 8, 8, 8],
    ]  # fmt: skip
    written = [slot for part, old in zip(cache.layers[0].parts(), before, strict=True)
               for slot in (part != old).flatten(1).any(1).nonzero().flatten().tolist()]  # fmt: skip
    assert set(written) == {9, 20, 29, 32}
    # The same by the attention that other steps have.
    assert outputs.logits.shape == (3, 48)
    cache.begin(Batch(CHUNKS), 4)
    expected = Echo()(*(torch.zeros(4, dtype=torch.int64) for _ in range(3)), cache.layers)
    torch.testing.assert_close(outputs.logits, expected[:3])
    assert torch.equal(outputs.likeliest, expected[:3].argmax(-1))


def test_blocks_are_moved_first() -> None:
    cache = cache_of()
    graphs = DecodeGraphs(Echo(), Sampler(OneRank(), (0, 48), 48), cache, Recomputing(), 8)
    cache.layers[0].keys.parts()[0][5 * BLOCK : 6 * BLOCK] = 7.0
    graphs.run(Batch(CHUNKS[:1], copies=((5, 3),)))
    assert cache.layers[0].keys.parts()[0][3 * BLOCK : 4 * BLOCK].eq(7.0).all()


def test_which_steps_are_taken() -> None:
    cache = cache_of(num_blocks=1 << 16)
    graphs = DecodeGraphs(Echo(), Sampler(OneRank(), (0, 48), 48), cache, Recomputing(), 4)
    assert graphs.takes(CHUNKS)
    assert graphs.takes(CHUNKS + CHUNKS[:1])
    assert not graphs.takes(())
    assert not graphs.takes(CHUNKS + CHUNKS[:2])  # more than it may be
    assert not graphs.takes((*CHUNKS[:1], Chunk(0, (1, 2), 2, ((5, 1),))))  # a prompt
    assert not graphs.takes((CHUNKS[0]._replace(scored=Scored((1,), 0)),))
    assert not graphs.takes((Chunk(130_000, (1,), 1, ((0, 40_000),)),) * 2)  # too much to gather


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_gathered_attention_is_that_of_other_steps(dtype: str) -> None:
    cache = cache_of(dtype)
    [layer] = cache.layers
    wide = torch.randn(2, 9 * BLOCK, 2, 8, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(9 * BLOCK)
    layer.keys.write(slots, wide[0])
    layer.values.write(slots, wide[1])
    q = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    tables = torch.tensor([[4, 1, 2], [5, 8, 8], [6, 7, 8]], dtype=torch.int32)
    attention = GatheredAttention(torch.tensor([10, 1, 6], dtype=torch.int32), tables, BLOCK, 0.5)
    cache.begin(Batch(CHUNKS), 3)
    torch.testing.assert_close(
        attention.attend(q, layer.keys, layer.values), cache._step.attention.attend(q, layer.keys, layer.values)
    )


def test_plain_greedy_draws() -> None:
    assert is_plainly_greedy(Draw())
    assert is_plainly_greedy(Draw(key=(1, 2, 3), top_k=5, top_p=0.5, min_p=0.1))
    others: list[dict[str, Any]] = [
        {"temperature": 0.1}, {"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1}, {"bias": ((1, 0.5),)}, {"banned": (3,)}, {"allowed": b"\1"},
    ]  # fmt: skip
    assert not any(is_plainly_greedy(Draw(**other)) for other in others)


@pytest.mark.parametrize("size", [1, 3])
def test_the_likeliest_are_what_greedy_draws_are(size: int) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[1, 3:40] = logits[1].max() + 1  # equals
    logits[2] = -torch.inf
    logits[3, 7] = torch.nan
    logits[4, 7] = torch.inf
    borders = [0, 50] if size == 1 else [0, 17, 34, 50]

    def work(ranks: ThreadRanks) -> tuple[list[int], list[int]]:
        owned = borders[ranks.rank], borders[ranks.rank + 1]
        sampler, own = Sampler(ranks, owned, 50), logits[:, owned[0] : owned[1]]
        return sampler.likeliest(own).tolist(), [each.token for each in sampler.sample(own, [Draw()] * 6)]

    for likeliest, drawn in on_ranks(size, work):
        assert likeliest == drawn
        assert likeliest[1:5] == [3, NO_TOKEN, NO_NUMBERS, NO_NUMBERS]


class Recordable(TorchDispatchMode):
    """A GPU can't record what looks at values or moves them between it and the host: `meta` stands for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._weight_int4pack_mm.default:  # whose fake one wants more than `meta`
            result = args[0].new_empty(args[0].shape[0], args[1].shape[0] * 8)
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                assert tensor.device.type == "meta", f"{function} touches the host"
        self.seen.append(str(function))
        return result


@pytest.mark.usefixtures("tinygemm_on_cpu")
@pytest.mark.parametrize("name", ["none", "int8wo", "int8dq", "int4wo-32", "8da4w-32", "fp8wo", "fp8dq-per_row"])
@pytest.mark.parametrize(
    ("kv", "rope"),
    [("bfloat16", None), ("int8", None), ("bfloat16", {"rope_type": "dynamic", "factor": 2.0})],
    ids=["plain", "int8 cache", "dynamic rope"],
)
def test_a_step_of_the_whole_model_could_be_recorded(
    name: str, kv: str, rope: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA's linears and attention kernel, traced without values."""
    fields = TINY | {"hidden_size": 128, "intermediate_size": 256, "rope_scaling": rope}
    model = Llama(LlamaConfig.from_hf({"model_type": "llama", **fields})).bfloat16()
    for place, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and place != "lm_head":
            weight = module.weight.detach()
            neutral = weight if name == "none" else neutral_of_any(name, weight)
            model.set_submodule(place, pack(neutral, module.bias.detach(), "cuda"))
    model.to("meta")
    has_kernel = kv == "bfloat16"
    monkeypatch.setattr(VarlenAttention, "fits", staticmethod(lambda *_: has_kernel))
    device = torch.device("meta")
    cache = PagedCache(CacheShape(2, 3, 32, kv, 256, 6), 2, 0.125, torch.bfloat16, device)
    graphs = DecodeGraphs(model, Sampler(OneRank(), (0, 211), 211), cache, Recomputing(), 8)
    with torch.inference_mode(), Recordable() as mode:
        outputs = graphs._compute(torch.empty(5 + 2, 4, dtype=torch.int64, device=device))
    assert (outputs.logits.shape, outputs.logits.dtype) == ((4, 211), torch.bfloat16)
    assert (outputs.likeliest.shape, outputs.likeliest.dtype) == ((4,), torch.int64)
    assert ("torch_attn._varlen_attn.default" in mode.seen) == has_kernel
    kernel = {"int8dq": "_int_mm", "int4wo-32": "_weight_int4pack_mm", "8da4w-32": "_weight_int4pack_mm",
              "fp8dq-per_row": "_scaled_mm"}.get(name, "linear")  # fmt: skip
    assert sum(f"{kernel}.default" in seen for seen in mode.seen) >= 14
