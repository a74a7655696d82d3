"""Real models: requests that come and go, share prefixes and are preempted get the tokens that they get alone."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpllama import LLM, Output, SamplingParams, UserError

MakeCheckpoint = Callable[..., Path]

# Few tokens to choose from, so that prompts begin alike.
PROMPTS = st.lists(st.sampled_from([3, 5]), min_size=1, max_size=40)
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    top_k=st.sampled_from([0, 20]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {7: 3.0, 9: -100.0}]),
    stop_token_ids=st.sampled_from([(), tuple(range(60))]),
    min_tokens=st.sampled_from([0, 1]),
    ignore_eos=st.booleans(),
)
REQUESTS = st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=7)
# A token of the tiny model takes 2 layers * 3 heads * 32 values * 2 * 4 bytes.
TOKEN_BYTES = 2 * 3 * 32 * 2 * 4
CACHES: dict[str, dict[str, Any]] = {
    "tight": {"kv_cache_memory": 60 * TOKEN_BYTES, "block_size": 4},
    "tight, nothing kept": {"kv_cache_memory": 60 * TOKEN_BYTES, "block_size": 3, "prefix_caching": False},
    "whole prompts": {"kv_cache_memory": 64 * TOKEN_BYTES, "block_size": 8, "chunked_prefill": False},
    "swapping": {"kv_cache_memory": 60 * TOKEN_BYTES, "block_size": 4, "swap_memory": 200 * TOKEN_BYTES},
    "small steps": {"max_batch_tokens": 9, "max_batch_size": 5, "block_size": 2},
    "one token a block": {"kv_cache_memory": 80 * TOKEN_BYTES, "block_size": 1, "max_batch_size": 3},
}


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def check_empty(llm: LLM) -> None:
    """No request and no block is left behind."""
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert not scheduler.waiting + scheduler.running
    assert not llm.engine._texts
    assert scheduler.pool.num_available == scheduler.pool.size


@pytest.fixture(scope="module", params=CACHES)
def cached(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Iterator[LLM]:
    with LLM(str(make_checkpoint()), dtype="float32", **CACHES[request.param]) as llm:
        yield llm


@given(requests=REQUESTS)
@settings(max_examples=25, deadline=None)
def test_requests_get_what_they_get_alone(cached: LLM, tiny: LLM, requests: list[tuple[list[int], Any]]) -> None:
    prompts, params = zip(*requests, strict=True)
    together = cached.generate(list(prompts), list(params))
    alone = [output for prompt, each in requests for output in tiny.generate([prompt], each)]
    assert ids(together) == ids(alone)
    assert [each.finish_reason for each in together] == [each.finish_reason for each in alone]
    check_empty(cached)


def test_tight_caches_do_preempt(cached: LLM) -> None:
    """The property above says nothing about preemption where there is none."""
    before = cached.engine.scheduler.num_preempted
    cached.generate([[3, 5, 8]] * 10, SamplingParams(max_new_tokens=50, ignore_eos=True))
    is_tight = cached.engine.pool.size * cached.engine.pool.block_size < 100
    assert (cached.engine.scheduler.num_preempted > before) == is_tight


def test_many_requests_in_few_places_all_complete(tiny: LLM) -> None:
    prompts = [[place % 200 + 1, place % 7, 9] for place in range(128)]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    assert tiny.engine.scheduler.policy.max_batch_size == 32
    outputs = tiny.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [10] * 128
    assert ids(outputs[:12]) == [ids(tiny.generate([prompt], params))[0] for prompt in prompts[:12]]
    check_empty(tiny)


def test_the_order_of_free_blocks_changes_nothing(make_checkpoint: MakeCheckpoint, tiny: LLM) -> None:
    prompts = [[place, 2, 3, 4] * 5 for place in range(12)]
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    expected = ids(tiny.generate(prompts, params))
    with LLM(str(make_checkpoint()), dtype="float32", block_size=4, prefix_caching=False) as llm:
        pool = llm.engine.pool
        for seed in range(3):
            # Only some blocks are free, and no two of them are neighbours for long.
            chance = random.Random(seed)
            taken = [block for block in range(pool.size) if chance.random() < 0.5]
            free, pool._free = pool._free, pool._free & ~sum(1 << block for block in taken)
            assert ids(llm.generate(prompts, params)) == expected
            pool._free = free


def test_threads_come_and_go(tiny: LLM) -> None:
    params = SamplingParams(max_new_tokens=15, temperature=1.0, seed=1, ignore_eos=True)
    prompts = [[place, 17, place] for place in range(20)]
    expected = ids(tiny.generate(prompts, params))
    barrier = threading.Barrier(20)

    def ask(place: int) -> list[int]:
        barrier.wait()
        stream = tiny.stream(prompts[place], params)
        if place % 4 == 3:  # loses interest
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            return []
        return [piece.token for piece in stream]

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(20)))
    assert all(tokens in ([], expected[place]) for place, tokens in enumerate(found))
    assert sum(tokens == [] for tokens in found) == 5
    check_empty(tiny)


def test_a_failure_ends_every_request_and_nothing_else(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny.stream([4, 5], SamplingParams(max_new_tokens=9, ignore_eos=True))
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.executor, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny.generate([[1, 2]])
    with pytest.raises(ZeroDivisionError):
        list(other)
    check_empty(tiny)
    assert len(tiny.generate([[1, 2]], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_a_request_that_can_never_fit_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with LLM(str(make_checkpoint()), dtype="float32", kv_cache_memory=24 * TOKEN_BYTES, block_size=4) as llm:
        with pytest.raises(UserError, match="prompt of 20 tokens, expected fewer than the context's 20"):
            llm.generate([[1] * 20])
        [output] = llm.generate([[1] * 15], SamplingParams(max_new_tokens=50, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (5, "length")
    with pytest.raises(UserError, match="expected room for two blocks"):
        LLM(str(make_checkpoint()), dtype="float32", kv_cache_memory=7 * TOKEN_BYTES, block_size=4)


@pytest.mark.parametrize(("tp", "stored"), [(1, "auto"), (2, "auto"), (2, "int8")])
def test_the_cache_takes_what_the_plan_said(make_checkpoint: MakeCheckpoint, tp: int, stored: str) -> None:
    options: dict[str, Any] = {"tp": tp, "kv_cache_memory": 300 * TOKEN_BYTES + 77, "kv_cache_dtype": stored}
    with LLM(str(make_checkpoint()), dtype="float32", **options) as llm:
        planned = llm.blueprint.report()["kv_cache_bytes_per_rank"]
        runner: Any = llm.engine.executor
        parts = [part for layer in getattr(runner, "runner", runner).cache.layers for part in layer.parts()]
        assert sum(part.numel() * part.element_size() for part in parts) == planned[0] == runner.cache_shape.num_bytes
        assert all(each <= options["kv_cache_memory"] for each in planned)


@pytest.mark.parametrize("tp", [1, 2])
def test_swapped_requests_come_back_on_ranks_of_any_size(make_checkpoint: MakeCheckpoint, tiny: LLM, tp: int) -> None:
    """The tiny model's KV heads are 2 and 1 on two ranks."""
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=4, ignore_eos=True)
    prompts = [[place, 5, 7, place] for place in range(8)]
    expected = ids(tiny.generate(prompts, params))
    options: dict[str, Any] = {"kv_cache_memory": 60 * TOKEN_BYTES, "swap_memory": 200 * TOKEN_BYTES, "block_size": 4}
    with LLM(str(make_checkpoint()), tp=tp, dtype="float32", **options) as llm:
        assert ids(llm.generate(prompts, params)) == expected
        assert llm.engine.scheduler.num_preempted > 0
        check_empty(llm)


# Parameters.


def test_prompt_logprobs_are_those_of_a_whole_forward(cached: LLM) -> None:
    prompts = [[3, 5] * 20, [3, 5] * 20, [8], [3, 5, 3, 9, 100]]
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=3, n=2, ignore_eos=True)
    outputs = cached.generate(prompts, params)
    for output in outputs:
        expected = cached.logits(output.prompt_token_ids)[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert [each.token_id for each in output.prompt_logprobs] == output.prompt_token_ids[1:]
        for row, each in zip(expected, output.prompt_logprobs, strict=False):
            assert abs(each.logprob - float(row[each.token_id])) < 1e-4
            assert [token for token, _ in each.top] == row.topk(3).indices.tolist()


def test_stop_tokens_end_a_text_but_not_too_early(tiny: LLM) -> None:
    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True)
    [whole] = ids(tiny.generate([[9, 8]], greedy))
    stop = whole[4]
    [output] = tiny.generate([[9, 8]], replace(greedy, stop_token_ids=(stop,)))
    assert (output.token_ids, output.finish_reason) == (whole[: whole.index(stop) + 1], "stop")
    [output] = tiny.generate([[9, 8]], replace(greedy, stop_token_ids=(stop,), min_tokens=8))
    assert len(output.token_ids) >= 8
    assert stop not in output.token_ids[:7]


def test_a_bias_decides(tiny: LLM) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, logit_bias={42: 1000.0})
    assert ids(tiny.generate([[1]], params)) == [[42] * 5]
    with pytest.raises(UserError, match="found token id 211, expected 0 to 210"):
        tiny.generate([[1]], SamplingParams(logit_bias={211: 1.0}))


def test_an_urgent_request_overtakes(tiny: LLM) -> None:
    engine = tiny.engine
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    prompts = [tiny._preparation.prompt([place, 1]) for place in range(40)]
    slow = engine.generate(prompts, [params] * 40, priority=5)
    next(slow)
    urgent = list(engine.generate(prompts[:1], [replace(params, max_new_tokens=2)], priority=-1))
    assert len(urgent) == 2
    rest = [piece.output for piece in slow if piece.output]
    assert len(rest) == 40
    check_empty(tiny)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_texts_keep_to_a_schema_in_company_and_after_preemption(smollm2: LLM) -> None:
    prompt = "Someone's name and age as JSON: "
    params = SamplingParams(max_new_tokens=60, json_schema=SCHEMA, temperature=1.0, seed=2, n=3)
    plain = SamplingParams(max_new_tokens=20, ignore_eos=True)
    *constrained, free = smollm2.generate([prompt, "Hi"], [params, plain])
    for output in constrained:
        if output.finish_reason == "stop":
            value = json.loads(output.text)
            assert set(value) == {"name", "age"}
            assert 0 <= value["age"] <= 99
        else:
            assert output.text.lstrip().startswith("{")
    assert any(output.finish_reason == "stop" for output in constrained)
    assert free.token_ids == smollm2.generate(["Hi"], plain)[0].token_ids
    assert ids(constrained) == ids(smollm2.generate([prompt], params))


def test_texts_match_a_regular_expression(smollm2: LLM) -> None:
    params = SamplingParams(max_new_tokens=20, regex=r"(red|green|blue), (one|two)", temperature=1.5, seed=4, n=4)
    texts = {output.text for output in smollm2.generate(["A colour and a number:"], params)}
    assert texts <= {f"{colour}, {number}" for colour in ("red", "green", "blue") for number in ("one", "two")}


# A real model on several ranks.

TEXTS = [
    "The capital of France is",
    "Once upon a time there was a small fox who lived at the edge of a great forest. Every morning",
    "Once upon a time there was a small fox who lived at the edge of a great forest. One day",
    "def fibonacci(n):\n",
]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
RANDOM = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.95, seed=6)
SLOW_RECIPES = [(2, "int8dq"), (1, "int8wo"), (2, "int4wo-32"), (2, "8da4w-32"), (1, "fp8wo")]
SMOLLM2_TOKEN_BYTES = 30 * 3 * 64 * 2 * 4  # in float32


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_embedded_model_in_a_tight_cache(smollm2: LLM, tp: int) -> None:
    """float32: the tokens that each gets alone, on one rank."""
    expected = [ids(smollm2.generate([text], params))[0] for text in TEXTS for params in (GREEDY, RANDOM)]
    memory = 80 * SMOLLM2_TOKEN_BYTES * (2 if tp == 2 else 3) // 3  # the first of two ranks has 2 of 3 KV heads
    with LLM(tp=tp, dtype="float32", kv_cache_memory=memory, block_size=8, max_batch_tokens=40) as llm:
        prompts = [text for text in TEXTS for _ in range(2)]
        found = llm.generate(prompts, [GREEDY, RANDOM] * len(TEXTS))
        assert llm.engine.scheduler.num_preempted > 0
        check_empty(llm)
    assert ids(found) == expected


@pytest.mark.parametrize(
    ("tp", "recipe"),
    [(1, "none"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_RECIPES)],
)
def test_rounding_parts_texts_only_at_near_ties(tp: int, recipe: str) -> None:
    """bfloat16: other numbers of rows take other kernels; where a text parts, the two tokens must be nearly equal."""
    with LLM(tp=tp, torchao_config=recipe, max_batch_tokens=64) as llm:
        together = llm.generate(TEXTS * 2, GREEDY)
        alone = [llm.generate([text], GREEDY)[0] for text in TEXTS]
        noise = kernel_noise(llm, alone[1].prompt_token_ids + alone[1].token_ids)
        for output, expected in zip(together, alone * 2, strict=True):
            same = [a == b for a, b in zip(output.token_ids, expected.token_ids, strict=True)]
            if not all(same):
                place = same.index(False)
                logits = llm.logits(expected.prompt_token_ids + expected.token_ids[:place])[0, -1]
                gap = abs(float(logits[output.token_ids[place]] - logits[expected.token_ids[place]]))
                print(f"tp {tp}, {recipe}: parts at {place}, gap {gap:.3f}, noise {noise:.3f}")
                assert gap <= 4 * noise


def kernel_noise(llm: LLM, tokens: list[int]) -> float:
    """The standard deviation of the difference of two logits between forwards of different lengths."""
    whole = llm.logits(tokens)[0]
    errors = [llm.logits(tokens[:length])[0, -1] - whole[length - 1] for length in range(1, len(tokens), 3)]
    centred = torch.stack([error - error.mean() for error in errors])
    return float(2**0.5 * centred.square().mean().sqrt())


def test_batch_invariant_texts_survive_preemption_bit_for_bit(make_checkpoint: MakeCheckpoint) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=1, logprobs=3, ignore_eos=True)
    prompts = [[place, 3, 4] * (1 + 3 * place) for place in range(6)]
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "max_batch_tokens": 32}
    with LLM(str(make_checkpoint()), **options) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    with LLM(str(make_checkpoint()), kv_cache_memory=50 * TOKEN_BYTES, block_size=4, **options) as llm:
        together = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preempted > 0
    assert [(each.token_ids, each.logprobs) for each in together] == [(each.token_ids, each.logprobs) for each in alone]


def test_a_pattern_that_is_no_text_is_the_users_error(smollm2: LLM) -> None:
    """As of an argument that was no UTF-8."""
    with pytest.raises(UserError):
        smollm2.generate("x", SamplingParams(max_new_tokens=1, regex="\udcff"))
