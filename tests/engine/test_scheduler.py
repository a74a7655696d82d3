"""Every schedule gives each request what it would get alone, and leaves no block behind: on a mock model, in steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpllama.engine.blocks import BlockPool
from tpllama.engine.policy import Policy
from tpllama.engine.request import Request, SamplingParams
from tpllama.engine.scheduler import Scheduler

from .mock_model import VOCAB, MockExecutor, shape


def make_request(prompt: list[int], params: SamplingParams, arrival: int = 0, priority: int = 0) -> Request:
    """The first sample's request; the others are its siblings."""
    longest = len(prompt) + params.max_new_tokens
    ends = frozenset(params.stop_token_ids)
    first, *siblings = [
        Request(arrival, sample, prompt, params, longest, priority, arrival, end_ids=ends) for sample in range(params.n)
    ]
    first.siblings = siblings
    return first


class World:
    """A scheduler on a mock model."""

    def __init__(self, num_blocks: int, block_size: int, policy: Policy, warm: int | None = None) -> None:
        self.executor = MockExecutor(shape(num_blocks, block_size, policy.host_blocks), policy.length_rope_limit)
        self.pool = BlockPool(num_blocks, block_size, warm)
        self.scheduler = Scheduler(self.pool, policy)

    def step(self) -> list[Request]:
        """The requests that got a token; none when nothing is left."""
        batch = self.scheduler.schedule()
        self.scheduler.check()
        policy = self.scheduler.policy
        tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        assert tokens <= policy.max_batch_tokens or (len(batch.chunks) == 1 and not policy.chunked_prefill)
        assert len(batch.chunks) <= (1 if policy.alone else policy.max_batch_size)
        if not batch.chunks:
            return []
        got = list(self.scheduler.commit(self.executor.run(batch)))
        self.scheduler.check()
        return got

    def is_busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.is_busy():
                break
            self.step()
        assert not self.is_busy(), "the schedule never ends"
        assert self.pool.num_available == self.pool.size


def alone(request: Request, block_size: int, policy: Policy) -> list[tuple[Any, ...]]:
    """What each sample of a request's prompt gets when nothing else runs and there is room for all."""
    results = []
    for sample in (request, *request.siblings):
        params = replace(sample.params, n=1)
        single = Request(0, sample.sample, sample.prompt_ids, params, sample.max_length, end_ids=sample.end_ids)
        rope = Policy(length_rope_limit=policy.length_rope_limit)
        world = World(world_blocks(single, block_size), block_size, rope)
        world.scheduler.add(single)
        world.finish()
        results.append(outcome(single))
    return results


def world_blocks(request: Request, block_size: int) -> int:
    return -(-request.max_length // block_size) + 1


def outcome(request: Request) -> tuple[Any, ...]:
    return request.new_ids, request.finish_reason, request.prompt_logprobs


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 12),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 6]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    prompt_logprobs=st.sampled_from([None, None, 2]),
)
# Few tokens, so that prompts often begin alike.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
POLICIES = st.builds(
    Policy,
    max_batch_size=st.integers(1, 6),
    max_batch_tokens=st.integers(6, 40),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    host_blocks=st.sampled_from([0, 0, 3, 20]),
    length_rope_limit=st.sampled_from([None, None, 0, 12]),
)


@dataclass(frozen=True)
class Story:
    """Requests that come and go: (prompt, parameters, priority, step of arrival, step of abortion)."""

    requests: list[tuple[list[int], SamplingParams, int, int, int | None]]
    policy: Policy
    block_size: int
    spare_blocks: int
    seed: int

    @property
    def num_blocks(self) -> int:
        longest = max(len(prompt) + params.max_new_tokens for prompt, params, *_ in self.requests)
        return -(-longest // self.block_size) + self.spare_blocks


ARRIVALS = st.tuples(PROMPTS, PARAMS, st.sampled_from([0, 0, 0, 1]), st.integers(0, 25),
                     st.none() | st.integers(0, 60))  # fmt: skip
STORIES = st.builds(
    Story,
    requests=st.lists(ARRIVALS, min_size=1, max_size=8),
    policy=POLICIES,
    block_size=st.integers(1, 7),
    spare_blocks=st.integers(0, 6),
    seed=st.integers(0, 9),
)


def play(story: Story, world: World) -> Iterator[tuple[Request, bool]]:
    """Lets a story happen; its samples in the end, and whether each was aborted."""
    chance = random.Random(story.seed)
    requests = [
        make_request(prompt, params, place, priority)
        for place, (prompt, params, priority, *_) in enumerate(story.requests)
    ]
    samples = {place: [first, *first.siblings] for place, first in enumerate(requests)}
    aborted: set[Request] = set()
    step = 0
    while world.is_busy() or step <= 60:
        for place, (_, _, _, arrival, abortion) in enumerate(story.requests):
            if arrival == step:
                world.scheduler.add(requests[place])
            if abortion is not None and arrival <= abortion == step:
                for sample in samples[place]:
                    if sample.finish_reason is None and chance.random() < 0.7:
                        world.scheduler.abort(sample)
                        world.scheduler.check()
                        aborted.add(sample)
        world.step()
        step += 1
        assert step < 5000, "the schedule never ends"
    for several in samples.values():
        yield from ((sample, sample in aborted) for sample in several)


@given(STORIES)
@settings(max_examples=400, deadline=None)
def test_each_request_gets_what_it_gets_alone(story: Story) -> None:
    world = World(story.num_blocks, story.block_size, story.policy)
    expected = [
        alone(make_request(prompt, params), story.block_size, story.policy) for prompt, params, *_ in story.requests
    ]
    for sample, was_aborted in play(story, world):
        if not was_aborted:
            assert outcome(sample) == expected[sample.index][sample.sample]
    assert world.pool.num_available == world.pool.size


@given(STORIES)
@settings(max_examples=100, deadline=None)
def test_alone_in_a_step_chunks_do_not_depend_on_company(story: Story) -> None:
    policy = replace(story.policy, alone=True, prefix_caching=False)
    world = World(story.num_blocks, story.block_size, policy)
    for sample, was_aborted in play(story, world):
        if not was_aborted:
            assert outcome(sample) == alone(sample, story.block_size, policy)[0]


def test_small_caches_do_preempt_and_swap() -> None:
    """The stories above are no proof if their caches always suffice."""
    for host_blocks in (0, 30):
        world = World(12, 2, Policy(host_blocks=host_blocks, prefix_caching=False))
        requests = [make_request([1] * 6, SamplingParams(max_new_tokens=12, seed=0), place) for place in range(4)]
        for request in requests:
            world.scheduler.add(request)
        world.finish()
        assert world.scheduler.num_preempted > 0
        prompts = sum(len(request.prompt_ids) for request in requests)
        # Swapped requests come back without being computed again.
        assert (world.executor.computed == prompts + 4 * 11) == bool(host_blocks)


@pytest.mark.parametrize(
    ("block_size", "prompt", "urgent_prompt", "samples", "num_blocks"), [(3, 17, 14, 6, 13), (4, 21, 9, 7, 11)]
)
def test_a_sample_that_is_swapped_out_in_the_step_of_its_copy_keeps_what_it_had(
    block_size: int, prompt: int, urgent_prompt: int, samples: int, num_blocks: int
) -> None:
    """Its own copy of the shared last block is not made before the next step: the host must not get an empty one."""
    policy = Policy(max_batch_size=8, max_batch_tokens=12, prefix_caching=False, host_blocks=60)
    world = World(num_blocks, block_size, policy)
    params = SamplingParams(max_new_tokens=5, seed=0, n=samples)
    slow = make_request([1] * prompt, params, 0, priority=1)
    several = [slow, *slow.siblings]
    world.scheduler.add(slow)
    world.step()
    world.scheduler.add(make_request([2] * urgent_prompt, SamplingParams(max_new_tokens=2, seed=0), 1, priority=0))
    world.finish()
    expected = alone(make_request([1] * prompt, params), block_size, policy)
    assert [outcome(sample) for sample in several] == expected


def test_a_shared_prefix_is_computed_once() -> None:
    counts = {}
    for prefix_caching in (False, True):
        world = World(2000, 16, Policy(prefix_caching=prefix_caching, max_batch_tokens=512))
        requests = [make_request([1] * 1024 + [2, place], SamplingParams(max_new_tokens=4, seed=0), place)
                    for place in range(16)]  # fmt: skip
        world.scheduler.add(requests[0])
        while not requests[0].new_ids:
            world.step()
        for request in requests[1:]:
            world.scheduler.add(request)
        world.finish()
        counts[prefix_caching] = world.executor.computed
    assert counts[True] * 10 < counts[False]


def test_requests_that_come_together_share_their_prefix_too() -> None:
    world = World(2000, 16, Policy(max_batch_tokens=512))
    for place in range(16):
        world.scheduler.add(make_request([1] * 1024 + [2, place], SamplingParams(max_new_tokens=4, seed=0), place))
    world.finish()
    assert world.executor.computed < 2 * 1026 + 16 * 20


def test_samples_share_their_prompt() -> None:
    world = World(100, 4, Policy(prefix_caching=False))
    world.scheduler.add(make_request([1] * 30, SamplingParams(n=5, max_new_tokens=3, seed=0)))
    world.finish()
    assert world.executor.computed == 30 + 5 * 2


def test_the_first_to_come_is_the_first_to_finish() -> None:
    world = World(8, 4, Policy(max_batch_size=2, prefix_caching=False))
    requests = [make_request([place] * 8, SamplingParams(max_new_tokens=4, seed=0), place) for place in range(6)]
    for request in requests:
        world.scheduler.add(request)
    finished: list[Request] = []
    while world.is_busy():
        finished += [request for request in world.step() if request.finish_reason]
    assert finished == requests


def test_a_more_urgent_request_goes_first() -> None:
    world = World(8, 4, Policy(max_batch_size=1))
    slow = make_request([1] * 8, SamplingParams(max_new_tokens=20, seed=0), 0, priority=1)
    urgent = make_request([2] * 8, SamplingParams(max_new_tokens=2, seed=0), 1, priority=0)
    world.scheduler.add(slow)
    world.step()
    world.scheduler.add(urgent)
    while not urgent.finish_reason:
        assert slow.finish_reason is None
        world.step()
    world.finish()
    assert outcome(slow) == alone(slow, 4, Policy())[0]


def test_texts_go_on_while_a_long_prompt_is_computed() -> None:
    world = World(200, 4, Policy(max_batch_tokens=8))
    text = make_request([1], SamplingParams(max_new_tokens=50, seed=0), 1)
    world.scheduler.add(text)
    world.step()
    world.scheduler.add(make_request([2] * 200, SamplingParams(max_new_tokens=1, seed=0), 0))  # the older one
    for count in range(2, 20):
        world.step()
        assert len(text.new_ids) == count


def test_memory_that_was_never_used_is_used_last() -> None:
    world = World(100, 4, Policy(), warm=10)
    for place in range(50):
        world.scheduler.add(make_request([place % VOCAB] * 9, SamplingParams(max_new_tokens=3, seed=0), place))
        world.finish()
    assert all(slot is None for slot in world.executor.cache[10 * 4 :])
    world.scheduler.add(make_request([7] * 60, SamplingParams(max_new_tokens=3, seed=0), 99))
    world.finish()


def test_a_sequence_lies_in_neighbouring_blocks() -> None:
    """While there is room: each of several that grow at the same time has one run."""
    world = World(400, 4, Policy(max_batch_size=8, prefix_caching=False))
    requests = [make_request([place] * 10, SamplingParams(max_new_tokens=40, seed=0), place) for place in range(8)]
    for request in requests:
        world.scheduler.add(request)
    for _ in range(30):
        world.step()
    assert [len(request.blocks.runs) for request in requests] == [1] * 8


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_that_are_kept_are_found_until_they_are_needed(block_size: int) -> None:
    world = World(20, block_size, Policy())
    prompt = [4] * (5 * block_size + 1)
    for _ in range(2):
        world.scheduler.add(make_request(prompt, SamplingParams(max_new_tokens=1, seed=0)))
        world.finish()
    assert world.executor.computed == len(prompt) + 1
    world.scheduler.add(make_request([5] * (19 * block_size), SamplingParams(max_new_tokens=1, seed=0)))
    world.finish()
    world.scheduler.add(make_request(prompt, SamplingParams(max_new_tokens=1, seed=0)))
    before = world.executor.computed
    world.finish()
    assert world.executor.computed > before + 1
