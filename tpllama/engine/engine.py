"""Requests to texts: schedule a step, run it, commit what it drew. On the leader only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpllama.config import UserError
from tpllama.engine.blocks import BlockPool
from tpllama.engine.executor import ModelExecutor
from tpllama.engine.grammar import Grammars
from tpllama.engine.policy import Policy
from tpllama.engine.request import Request, SamplingParams
from tpllama.engine.scheduler import Scheduler
from tpllama.engine.text import Piece, Pieces, Prompt, Text
from tpllama.engine.tokenizer import Tokenizer
from tpllama.engine.turns import Turns

if TYPE_CHECKING:
    from torch import Tensor


_CLOSED = "this LLM is closed"
_NOTHING_LEFT = "a text is unfinished, but nothing is left to do"


@dataclass(frozen=True)
class Limits:
    """What a request must fit in."""

    context_length: int
    vocab_size: int


class Engine:
    """Generates texts on a ModelExecutor. Calls from several threads share its steps: one that waits runs the next."""

    def __init__(
        self, executor: ModelExecutor, tokenizer: Tokenizer, grammars: Grammars, eos_token_ids: tuple[int, ...],
        limits: Limits, policy: Policy, seed: int,
    ) -> None:  # fmt: skip
        shape = executor.cache_shape
        self.executor = executor
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        # A request's keys and values must fit in the cache when it is alone there.
        self.limits = replace(limits, context_length=min(limits.context_length, shape.num_tokens))
        self.seed = seed
        self.pool = BlockPool(shape.num_blocks, shape.block_size, shape.num_warm_blocks)
        self.scheduler = Scheduler(self.pool, policy)
        self.grammars = grammars
        self._texts: dict[Request, Text] = {}
        self._arrivals = 0
        # From other threads, for the one whose turn it is.
        self._submitted: deque[Text] = deque()
        self._dropped: deque[Text] = deque()
        self._turns = Turns(self._take_in)
        self._is_closed = False

    def step(self) -> bool:
        """Computes the next batch and hands on what it drew; False when nothing is left to do."""
        self._take_in()
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return False
        results = self.executor.run(batch)
        for request in self.scheduler.commit(results):
            self._texts[request].take_newest()
        self._texts = {request: text for request, text in self._texts.items() if request.finish_reason is None}
        return True

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: int = 0
    ) -> Iterator[Piece]:
        """Pieces of all texts as they come. Raises UserError, before any work, for a prompt that doesn't fit.

        priority: the lower goes first. An iterator that is dropped ends its requests.
        """
        return self._pieces(self.texts(prompts, params, priority))

    def texts(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: int = 0) -> list[Text]:
        """All texts that are asked for, checked but not begun. Raises UserError for a prompt that doesn't fit."""
        return [
            text
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            for text in self._new_texts(index, prompt, each, priority)
        ]

    def begin(self, texts: Sequence[Text], pieces: Pieces) -> None:
        """Has texts wait for their turn; `pieces` takes what comes of them."""
        for text in texts:
            text.pieces = pieces
        self._submitted.extend(texts)

    def drop(self, texts: Sequence[Text]) -> None:
        """Ends those of the texts that are not finished, soon, and takes their blocks back."""
        self._dropped.extend(text for text in texts if text.request.finish_reason is None)
        self._turns.settle()

    @property
    def has_work(self) -> bool:
        """Whether there are texts to go on with."""
        return bool(self._texts or self._submitted or self._dropped)

    def advance(self) -> None:
        """Runs the next step, for a thread that runs them all. Raises what went wrong, after every text got it."""
        with self._turns.take():
            try:
                if not self.step() and self._texts:
                    raise AssertionError(_NOTHING_LEFT)
            except Exception as error:
                self._fail(error)
                raise

    def _pieces(self, texts: list[Text]) -> Iterator[Piece]:
        pieces: deque[Piece | Exception] = deque()
        try:
            self.begin(texts, pieces)
            unfinished = len(texts)
            while unfinished:
                self._advance(pieces)
                while pieces:
                    piece = pieces.popleft()
                    if isinstance(piece, Exception):
                        raise piece
                    unfinished -= piece.output is not None
                    yield piece
        finally:
            self.drop(texts)

    def _advance(self, pieces: deque[Piece | Exception]) -> None:
        """Waits until there are new pieces, and runs steps for all while nobody else does."""
        while not pieces:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            with self._turns.take(unless=lambda: bool(pieces)) as is_mine:
                if is_mine:
                    self._step_or_fail()

    def _step_or_fail(self) -> None:
        try:
            if not self.step():
                raise AssertionError(_NOTHING_LEFT)
        except BaseException as error:
            # What it did to blocks is not known: all texts end, and each raises where it is read.
            if isinstance(error, Exception):
                self._fail(error)
            else:
                self._fail(RuntimeError("a step was broken off, and with it every text"))
                raise

    def _take_in(self) -> None:
        """Has new requests wait, and ends those that nobody reads any more."""
        while self._submitted:
            text = self._submitted.popleft()
            self._texts[text.request] = text
            self._arrivals += text.request.sample == 0
            text.request.arrival = self._arrivals
            if text.request.sample == 0:
                self.scheduler.add(text.request)
        while self._dropped:
            request = self._dropped.popleft().request
            if self._texts.pop(request, None):
                self.scheduler.abort(request)
        if self._is_closed:
            self._fail(RuntimeError(_CLOSED))

    def _fail(self, error: Exception) -> None:
        self.scheduler.clear()
        readers = {id(text.pieces): text.pieces for text in self._texts.values()}
        self._texts.clear()
        for pieces in readers.values():
            pieces.append(error)

    def close(self) -> None:
        """Ends all texts, after the step that may be running; no other is run any more."""
        self._is_closed = True
        self._turns.settle()

    def logits(self, tokens: list[list[int]]) -> Tensor:
        """Logits of whole sequences of equal length (see `ModelExecutor.logits`)."""
        with self._turns.take():
            return self.executor.logits(tokens)

    def peak_memory_bytes(self) -> list[int]:
        """Each rank's peak memory so far."""
        with self._turns.take():
            return self.executor.peak_memory_bytes()

    def _new_texts(self, index: int, prompt: Prompt, params: SamplingParams, priority: int) -> list[Text]:
        """A text for each sample; the first one's request brings the others along."""
        check_prompt(prompt.token_ids, self.limits.context_length, self.limits.vocab_size)
        if params.stop and not self.tokenizer.has_text:
            raise UserError("found stop strings for a checkpoint without a tokenizer, expected none, drop --stop")
        for token in (*params.logit_bias, *params.stop_token_ids):
            if not 0 <= token < self.limits.vocab_size:
                raise UserError(f"found token id {token}, expected 0 to {self.limits.vocab_size - 1}, correct it")
        seeded = params if params.seed is not None else replace(params, seed=self.seed)
        # Where a grammar is at its end nothing else can follow.
        has_eos = not params.ignore_eos or params.is_constrained
        ends = frozenset(params.stop_token_ids) | (self.eos_token_ids if has_eos else frozenset())
        longest = min(len(prompt.token_ids) + params.max_new_tokens, self.limits.context_length)
        first, *siblings = [
            Request(
                index, sample, list(prompt.token_ids), seeded, longest, priority,
                constraint=self.grammars.constraint(params), end_ids=ends,
            )
            for sample in range(params.n)
        ]  # fmt: skip
        first.siblings = siblings
        return [Text(request, prompt, self.tokenizer) for request in (first, *siblings)]


def check_prompt(token_ids: list[int], context_length: int, vocab_size: int) -> None:
    """Raises UserError for an empty prompt, ids outside the vocabulary, or no room for a new token."""
    if not token_ids:
        raise UserError("found an empty prompt, expected at least one token, give a prompt")
    if len(token_ids) >= context_length:
        raise UserError(
            f"found a prompt of {len(token_ids)} tokens, expected fewer than the context's {context_length}, "
            f"shorten it or raise --max-seq-len (up to what the model was made for) or --kv-cache-memory"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise UserError(f"found a token id outside the vocabulary, expected 0 to {vocab_size - 1}")
