"""Which tokens the next step computes, and whose blocks make room. Plain Python, no torch.

Requests wait, run, and are preempted when the cache is full: the last in order first. A preempted one waits in its
place again, and what it had is computed once more, or comes back from the host's memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from tpllama.engine.batch import Batch, Chunk, Copy, Result
from tpllama.engine.blocks import BlockPool, BlockTable
from tpllama.engine.chunks import next_chunk
from tpllama.engine.policy import Policy, next_count, order
from tpllama.engine.request import Request


class Scheduler:
    """Requests and the blocks that they have. `num_preempted` counts how often one had to make room."""

    def __init__(self, pool: BlockPool, policy: Policy) -> None:
        self.pool = pool
        self.policy = policy
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0
        self.num_found = 0  # tokens whose keys and values were in the cache already
        self._host_free = list(range(policy.host_blocks))
        self._budget = 0
        self._chunks: dict[Request, Chunk] = {}
        self._copies: list[Copy] = []
        self._to_host: list[Copy] = []
        self._from_host: list[Copy] = []

    def add(self, request: Request) -> None:
        """Has a request wait for its turn."""
        bisect.insort(self.waiting, request, key=order)

    def abort(self, request: Request) -> None:
        """Forgets a request, whatever its state, and takes its blocks back. Its siblings go on."""
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
                self._release(request)
                if request.siblings:
                    first, *others = request.siblings
                    first.siblings, request.siblings = others, []
                    self.add(first)
        for parent in (*self.waiting, *self.running):
            if request in parent.siblings:
                parent.siblings.remove(request)

    def clear(self) -> None:
        """Forgets all requests and takes their blocks back."""
        for request in (*self.waiting, *self.running):
            self._release(request)
        self.waiting, self.running = [], []

    def schedule(self) -> Batch:
        """The next step; without chunks when no request is left."""
        self._chunks, self._copies, self._to_host, self._from_host = {}, [], [], []
        self._budget = self.policy.max_batch_tokens
        if self.policy.alone:
            self._schedule_one()
        else:
            self._give_way()
            self._schedule_running()
            self._schedule_waiting()
        chunks = tuple(self._chunks.values())
        return Batch(chunks, tuple(self._copies), tuple(self._to_host), tuple(self._from_host))

    def _give_way(self) -> None:
        """Preempts running requests for a waiting one of higher priority that has no room otherwise."""
        while self.waiting and self.running and self.running[-1].priority > self.waiting[0].priority:
            if len(self.running) < self.policy.max_batch_size and self._fits(self.waiting[0]):
                return
            self._preempt(self.running[-1])

    def _fits(self, request: Request, num_found: int = 0) -> bool:
        """Whether a waiting request's tokens so far will fit beside those of the running ones.

        num_found: blocks that it has already. Each of the others may need one soon; alone there is always room.
        """
        needed = self.pool.blocks_for(request.length) - num_found
        return not self.running or needed <= self.pool.num_available - len(self.running)

    def _schedule_running(self) -> None:
        """A token for each text first, so that none has to wait for others' prompts; then prompts.

        A prompt that may not be cut and had no room beside the texts comes first, if need be alone.
        """
        stuck = [request for request in self.running if not (self.policy.chunked_prefill or request.is_prefilled)]
        for request in (*stuck, *sorted(self.running, key=lambda request: not request.is_prefilled)):
            if self._budget > 0 and request in self.running and request not in self._chunks:
                count = self._count(request)
                if count and self._make_room(request, count):
                    self._compute(request, count)

    def _schedule_waiting(self) -> None:
        while self.waiting and len(self.running) < self.policy.max_batch_size and self._budget > 0:
            request = self.waiting[0]
            if not self._admit(request):
                return
            count = self._count(request)
            if count == 0 or not self._has_room(request, count):
                return
            self._compute(request, count)

    def _schedule_one(self) -> None:
        """Of all that fit, a prompt first; else the text that is furthest behind, so that all advance in turn."""
        while self.waiting and len(self.running) < self.policy.max_batch_size and self._admit(self.waiting[0]):
            pass
        prompts = [request for request in self.running if not request.new_ids]
        texts = sorted(self.running, key=lambda request: (request.priority, len(request.new_ids), order(request)))
        for request in (prompts or texts)[:1]:
            count = self._count(request)
            if self._make_room(request, count):
                self._compute(request, count)
            else:
                self._schedule_one()

    def _admit(self, request: Request) -> bool:
        """Moves a waiting request to the running ones, if its tokens so far will fit beside theirs."""
        if request.host_blocks:
            return self._swap_in(request)
        table = self._find(request)
        if not self._fits(request, len(table.blocks)):
            self.pool.release(table)
            return False
        request.blocks = table
        request.computed = len(table.blocks) * self.pool.block_size
        self.num_found += request.computed
        self._begin(request)
        return True

    def _begin(self, request: Request) -> None:
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=order)

    def _find(self, request: Request) -> BlockTable:
        """What the cache has of a request's tokens already, but for the last one, which has to be computed."""
        scored = len(request.prompt_logprobs) + 1 if request.params.prompt_logprobs is not None else request.length
        if not self.policy.prefix_caching or scored < len(request.prompt_ids):
            return BlockTable()
        return self.pool.find(self._digests(request, request.length - 1))

    def _digests(self, request: Request, stop: int) -> list[bytes]:
        limit = self.policy.length_rope_limit
        seed = 0 if limit is None else max(len(request.prompt_ids), limit)
        return request.digests_of(stop, self.pool.block_size, str(seed).encode())

    def _count(self, request: Request) -> int:
        return next_count(self.policy, request, self._budget, is_first=not self._chunks)

    def _has_room(self, request: Request, count: int) -> bool:
        """Gives a request the blocks for its next `count` tokens, if there are so many."""
        pool, table = self.pool, request.blocks
        if request.computed % pool.block_size and pool.is_last_shared(table):
            copy = pool.own_last(table)
            if copy is None:
                return False
            self._copies.append(copy)
        missing = pool.blocks_for(request.computed + count) - len(table.blocks)
        return missing <= 0 or pool.grow(table, missing, pool.blocks_for(request.max_length))

    def _make_room(self, request: Request, count: int) -> bool:
        """As `_has_room`, at the cost of those that come last in order. False if that was the request itself."""
        while not self._has_room(request, count):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _compute(self, request: Request, count: int) -> None:
        self._chunks[request] = next_chunk(request, count)
        self._budget -= count

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        self.running.remove(request)
        if (chunk := self._chunks.pop(request, None)) is not None:
            self._budget += len(chunk.tokens)
        # Copies that aren't made yet, and won't be: what an own block was to hold lies in the shared one still.
        unmade = {to: shared for shared, to in self._copies if to in request.blocks.blocks}
        self._copies = [copy for copy in self._copies if copy[1] not in unmade]
        if request.computed and len(self._host_free) >= len(request.blocks.blocks) and not self._from_host:
            request.host_blocks = [self._host_free.pop() for _ in request.blocks.blocks]
            held = [unmade.get(block, block) for block in request.blocks.blocks]
            self._to_host += zip(held, request.host_blocks, strict=True)
            request.blocks = self.pool.release(request.blocks)
        else:
            self._release(request)
        self.add(request)

    def _swap_in(self, request: Request) -> bool:
        most = self.pool.blocks_for(request.max_length)
        # In one step blocks go one way only: what comes in may lie where another's go to.
        if self._to_host or not self._fits(request):
            return False
        if not self.pool.grow(request.blocks, len(request.host_blocks), most):
            return False
        self._from_host += zip(request.host_blocks, request.blocks.blocks, strict=True)
        self._host_free += request.host_blocks
        request.host_blocks = []
        self._begin(request)
        return True

    def _release(self, request: Request) -> None:
        request.blocks = self.pool.release(request.blocks)
        self._host_free += request.host_blocks
        request.host_blocks = []
        request.computed = 0

    def commit(self, results: Iterable[Result]) -> Iterator[Request]:
        """Takes note of what the step gave: every request with a new token. Who gets it may end the request then."""
        for (request, chunk), result in zip(self._chunks.items(), results, strict=True):
            request.computed = chunk.stop
            if self.policy.prefix_caching and chunk.stop % self.pool.block_size < len(chunk.tokens):  # a block is full
                self.pool.keep(request.blocks, self._digests(request, request.computed))
            # What was computed again after a preemption was scored before.
            request.prompt_logprobs += result.scored[max(0, len(request.prompt_logprobs) - chunk.start) :]
            if chunk.draws:
                siblings, request.siblings = request.siblings, []
                for sibling in siblings:
                    self._fork(request, sibling)
                for each, sampled in zip((request, *siblings), result.drawn, strict=True):
                    each.append(sampled.token, sampled.logprobs)
                    yield each
                for each in (*reversed(siblings), request):
                    self._settle(each)

    def _fork(self, parent: Request, sibling: Request) -> None:
        sibling.blocks = self.pool.fork(parent.blocks)
        sibling.computed = parent.computed
        sibling.digests = list(parent.digests)
        sibling.prompt_logprobs = list(parent.prompt_logprobs)
        bisect.insort(self.running, sibling, key=order)

    def _settle(self, request: Request) -> None:
        """Ends a request that is finished; one that is too many for a step has to wait."""
        if request.finish_reason is None and len(self.running) <= self.policy.max_batch_size:
            return
        if request in self.running:
            self.running.remove(request)
            self._release(request)
            if request.finish_reason is None:
                self.add(request)

    def check(self) -> None:
        """Asserts that every block, on the device and on the host, is accounted for."""
        requests = [*self.waiting, *self.running]
        self.pool.check(request.blocks for request in requests)
        host = [block for request in requests for block in request.host_blocks]
        assert sorted(host + self._host_free) == list(range(self.policy.host_blocks))
        assert len(self.running) <= self.policy.max_batch_size
        assert all(not request.blocks.blocks for request in self.waiting)
        for request in self.running:
            assert request.computed <= min(request.length, len(request.blocks.blocks) * self.pool.block_size)
