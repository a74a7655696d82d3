"""Requests to texts: schedule a batch, run it, commit what it drew. On the leader only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpllama.config import UserError
from tpllama.engine.batch import Batch, Sampled
from tpllama.engine.request import FinishReason, Output, SamplingParams, Sequence
from tpllama.engine.runner import Executor
from tpllama.engine.scheduler import Scheduler
from tpllama.engine.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """What a request must fit in."""

    context_length: int
    vocab_size: int
    max_batch_size: int


@dataclass(frozen=True)
class Piece:
    """New text of one sample of one prompt; with the last one comes the whole output."""

    index: int
    sample: int
    text: str
    token: int
    output: Output | None


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text where there is one."""

    token_ids: list[int]
    text: str | None = None


class Engine:
    """Generates texts on an Executor, up to `max_batch_size` at a time."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], limits: Limits, seed: int,
        batch_invariant: bool,
    ) -> None:  # fmt: skip
        self.executor = executor
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.limits = limits
        self.seed = seed
        self.batch_invariant = batch_invariant
        self._group: list[Sequence] = []  # whose keys and values the cache holds
        self._lock = threading.Lock()  # one step at a time, whichever thread asks

    def generate(self, prompts: list[Prompt], params: list[SamplingParams]) -> Iterator[Piece]:
        """Pieces of all texts as they come. Raises UserError, before any work, for a prompt that doesn't fit."""
        sequences = [
            sequence
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            for sequence in self._sequences(index, prompt, each)
        ]
        return self._generate(prompts, sequences)

    def _generate(self, prompts: list[Prompt], sequences: list[Sequence]) -> Iterator[Piece]:
        size = self.limits.max_batch_size
        for first in range(0, len(sequences), size):
            yield from self._run_group(prompts, sequences[first : first + size])

    def _run_group(self, prompts: list[Prompt], group: list[Sequence]) -> Iterator[Piece]:
        with self._lock:
            self._group = group
            self.executor.allocate(len(group), max(sequence.max_length for sequence in group))
        scheduler = Scheduler(group, alone=self.batch_invariant)
        by_row = {sequence.row: sequence for sequence in group}
        streams = {
            sequence.row: TextStream(self.tokenizer, sequence.prompt_ids, sequence.params.stop) for sequence in group
        }
        while batch := scheduler.schedule():
            sampled = iter(self._run(batch, group))
            for chunk in batch:
                sequence = by_row[chunk.row]
                sequence.computed = chunk.stop
                if chunk.draw:
                    yield self._commit(prompts, sequence, streams[chunk.row], next(sampled))

    def _run(self, batch: Batch, group: list[Sequence]) -> list[Sampled]:
        with self._lock:
            if self._group is not group:
                raise RuntimeError("another generation began before this one was finished: finish or drop one first")
            return self.executor.run(batch)

    def logits(self, tokens: list[list[int]]) -> Tensor:
        """Logits of whole sequences of equal length (see `Executor.logits`)."""
        with self._lock:
            return self.executor.logits(tokens)

    def peak_memory_bytes(self) -> list[int]:
        """Each rank's peak memory so far."""
        with self._lock:
            return self.executor.peak_memory_bytes()

    def _commit(self, prompts: list[Prompt], sequence: Sequence, stream: TextStream, drawn: Sampled) -> Piece:
        sequence.new_ids.append(drawn.token)
        if drawn.logprobs:
            sequence.logprobs.append(drawn.logprobs)
        text = stream.push(drawn.token)
        sequence.finish_reason = self._finish_reason(sequence, stream, drawn.token)
        if sequence.finish_reason is None:
            return Piece(sequence.index, sequence.sample, text, drawn.token, None)
        text += stream.finish()
        prompt = prompts[sequence.index]
        output = Output(
            index=sequence.index,
            sample=sequence.sample,
            prompt=prompt.text,
            prompt_token_ids=sequence.prompt_ids,
            text=stream.text,
            token_ids=sequence.new_ids,
            finish_reason=sequence.finish_reason,
            logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        )
        return Piece(sequence.index, sequence.sample, text, drawn.token, output)

    def _finish_reason(self, sequence: Sequence, stream: TextStream, token: int) -> FinishReason | None:
        if stream.is_stopped or (token in self.eos_token_ids and not sequence.params.ignore_eos):
            return "stop"
        return "length" if sequence.length >= sequence.max_length else None

    def _sequences(self, index: int, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        check_prompt(prompt.token_ids, self.limits.context_length, self.limits.vocab_size)
        if params.stop and not self.tokenizer.has_text:
            raise UserError("found stop strings for a checkpoint without a tokenizer, expected none, drop --stop")
        seeded = params if params.seed is not None else _with_seed(params, self.seed)
        longest = min(len(prompt.token_ids) + params.max_new_tokens, self.limits.context_length)
        return [Sequence(index, sample, list(prompt.token_ids), seeded, longest) for sample in range(params.n)]


def check_prompt(token_ids: list[int], context_length: int, vocab_size: int) -> None:
    """Raises UserError for an empty prompt, ids outside the vocabulary, or no room for a new token."""
    if not token_ids:
        raise UserError("found an empty prompt, expected at least one token, give a prompt")
    if len(token_ids) >= context_length:
        raise UserError(
            f"found a prompt of {len(token_ids)} tokens, expected fewer than the context's {context_length}, "
            f"shorten it or raise --max-seq-len (up to what the model was made for)"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise UserError(f"found a token id outside the vocabulary, expected 0 to {vocab_size - 1}")


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)
