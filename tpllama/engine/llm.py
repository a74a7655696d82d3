"""The Python API: a model, ready to generate, on one rank or many."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import Checkpoint, open_checkpoint, overridden
from tpllama.config import EngineConfig, LlamaConfig, UserError
from tpllama.engine.request import Output, SamplingParams
from tpllama.parallel.launch import Death, Followers
from tpllama.parallel.place import Place, resolve_tp, torchrun_place
from tpllama.parallel.split import check_tp

if TYPE_CHECKING:
    from torch import Tensor

    from tpllama.blueprint import Blueprint
    from tpllama.engine.engine import Engine, Piece, Prompt
    from tpllama.engine.tokenizer import Message, Tokenizer

PromptLike = str | Sequence[int]


class LLM:
    """A loaded model. Usable as a context manager; `close` gives back memory and ends the ranks it started.

    tp > 1 outside torchrun starts the other ranks as child processes. Under torchrun every rank constructs the
    LLM; the first goes on, and on the others the constructor runs the follower's part and then exits the process.

    Other options are EngineConfig's fields. Raises UserError for what can't work, RuntimeError for a rank that dies.
    """

    def __init__(
        self, model: str = "smollm2", tp: int | None = None, torchao_config: str = "none", *,
        debug: bool = False, on_rank_death: Callable[[Death], None] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._preparation = Preparation(model, tp, torchao_config, debug=debug, on_rank_death=on_rank_death, **options)
        self._engine = self._preparation.load()

    @classmethod
    def prepared(cls, preparation: Preparation) -> LLM:
        """Loads the weights of a preparation, which has everything else already."""
        llm = cls.__new__(cls)
        llm._preparation = preparation
        llm._engine = preparation.load()
        return llm

    @property
    def blueprint(self) -> Blueprint:
        """What became of each layer."""
        return self._preparation.blueprint

    @property
    def tokenizer(self) -> Tokenizer:
        return self._preparation.tokenizer

    @property
    def load_seconds(self) -> float:
        """How long joining the ranks and loading took."""
        return self._preparation.load_seconds

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Completions of raw texts or token ids (no chat template), in order; `n` outputs in a row per prompt."""
        many = self._as_prompts(prompts)
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        return self._collect(many, list(each))

    def chat(self, messages: list[Message] | list[list[Message]], params: SamplingParams | None = None) -> list[Output]:
        """The assistant's answer to one conversation, or one to each of several."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [self._preparation.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._collect(prompts, [params or SamplingParams()] * len(prompts))

    def stream(self, prompt: PromptLike | list[Message], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces of the text after one prompt, or of the answer to one conversation, as they come."""
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        single = self._preparation.chat_prompt(prompt) if is_chat else self._as_prompts(prompt)[0]  # type: ignore[arg-type]
        return self.pieces([single], [params or SamplingParams()])

    def pieces(self, prompts: list[Prompt], params: list[SamplingParams]) -> Iterator[Piece]:
        """Pieces of all texts as they come, from one batch."""
        with self._preparation.blaming_ranks():
            yield from self._open_engine().generate(prompts, params)

    def logits(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Logits of whole sequences of equal length, float32 [batch, seq, vocab]; one sequence is a batch of one."""
        rows = _rows(token_ids)
        limits = self._open_engine().limits
        from tpllama.engine.engine import check_prompt

        for row in rows:
            check_prompt(row, limits.context_length + 1, limits.vocab_size)
        if len({len(row) for row in rows}) > 1:
            raise UserError("found sequences of different lengths, expected equal ones, call once per length")
        with self._preparation.blaming_ranks():
            return self._open_engine().executor.logits(rows)

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of each rank's process, on its device where that is a GPU."""
        with self._preparation.blaming_ranks():
            return self._open_engine().executor.peak_memory_bytes()

    def close(self) -> None:
        """Ends the ranks and gives back memory; further calls do nothing."""
        if self._engine is not None:
            self._engine = None  # type: ignore[assignment]
            self._preparation.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def _as_prompts(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = [prompts] if is_one else prompts
        return [self._preparation.prompt(prompt) for prompt in many]  # type: ignore[arg-type]

    def _collect(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Output]:
        outputs = [piece.output for piece in self.pieces(prompts, params) if piece.output]
        return sorted(outputs, key=lambda output: (output.index, output.sample))


class Preparation:
    """Everything before the weights: files found, other ranks started, blueprint drawn, prompts made and checked.

    In this order, so that what can't work is said before it costs anything, and followers start up meanwhile.
    """

    def __init__(
        self, model: str = "smollm2", tp: int | None = None, torchao_config: str = "none", *,
        debug: bool = False, on_rank_death: Callable[[Death], None] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        torchrun = torchrun_place(os.environ)
        degree = resolve_tp(tp, torchrun)
        self.config = EngineConfig(model=model, tp=degree, torchao_config=torchao_config, **options)
        self.checkpoint: Checkpoint = open_checkpoint(model, weights=self.config.load_format != "dummy")
        check_tp(LlamaConfig.from_hf(overridden(self.checkpoint, self.config.model_overrides)), degree)
        self.load_seconds = 0.0
        self._leader: Any = None
        self._followers: Followers | None = None
        self.place = torchrun or Place(0, degree, 0, degree)
        if torchrun is None and degree > 1:
            self._followers = Followers(degree, {"engine": asdict(self.config), "debug": debug}, os.environ)
            if on_rank_death:
                self._followers.on_death(on_rank_death, grace_s=3)
            self.place = Place(0, degree, 0, degree, self._followers.port)
        with self._closing_on_error():
            from tpllama.engine.tokenizer import Tokenizer
            from tpllama.start import draw_blueprint

            self.blueprint = draw_blueprint(self.config, self.checkpoint)
            self.tokenizer = Tokenizer(self.checkpoint.tokenizer() if self.place.rank == 0 else None)

    def prompt(self, prompt: PromptLike) -> Prompt:
        """A raw text's or token ids' prompt. Raises UserError where it doesn't fit."""
        from tpllama.engine.engine import Prompt

        if isinstance(prompt, str):
            return self._checked(Prompt(self.tokenizer.encode(prompt), prompt))
        return self._checked(Prompt(list(prompt)))

    def chat_prompt(self, messages: list[Message]) -> Prompt:
        """A conversation's prompt. Raises UserError where it doesn't fit."""
        from tpllama.engine.engine import Prompt

        return self._checked(Prompt(self.tokenizer.encode_chat(messages), str(messages[-1].get("content", ""))))

    def _checked(self, prompt: Prompt) -> Prompt:
        from tpllama.engine.engine import check_prompt

        check_prompt(prompt.token_ids, self.blueprint.context_length, self.blueprint.config.vocab_size)
        return prompt

    def load(self) -> Engine:
        """Joins the ranks and loads this one's weights. On a follower under torchrun: runs it, and exits."""
        from tpllama.engine.engine import Engine, Limits
        from tpllama.engine.lockstep import Leader, follow
        from tpllama.start import start_rank

        started = time.perf_counter()
        listener = self._followers.listener if self._followers else None
        with self._closing_on_error(), self.blaming_ranks():
            runner = start_rank(self.blueprint, self.checkpoint, self.place, listener)
            if self.place.rank > 0:
                follow(runner, runner.ranks)
                raise SystemExit(0)
            self._leader = Leader(runner, runner.ranks) if self.place.size > 1 else None
        self.load_seconds = time.perf_counter() - started
        config = self.blueprint.config
        eos = dict.fromkeys((*self.checkpoint.eos_token_ids, *config.eos_token_ids, *self.tokenizer.eos_token_ids))
        limits = Limits(self.blueprint.context_length, config.vocab_size, self.config.max_batch_size)
        executor = self._leader or runner
        return Engine(executor, self.tokenizer, tuple(eos), limits, self.config.seed, self.config.batch_invariant)

    @contextmanager
    def blaming_ranks(self) -> Iterator[None]:
        """Turns what follows from a dead rank into one error that says which died, and why."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            death = self._followers.first_death(within_s=2) if self._followers else None
            if death is None:
                raise
            from tpllama.parallel.collectives import RankLost

            self._leader = None  # nobody is left to be told to stop
            raise (UserError if death.user_error else RankLost)(death.describe()) from error

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._leader = None
            self.close()
            raise

    def close(self) -> None:
        """Tells the followers to stop, and sees that those we started do."""
        if self._leader is not None:
            self._leader.stop()
            self._leader = None
        if self._followers is not None:
            self._followers.close()
            self._followers = None
        if self.place.size > 1:
            from tpllama.parallel.mesh import leave

            leave(self.place)


def _rows(token_ids: Any) -> list[list[int]]:
    """One sequence or several, as lists or a tensor, as a list of lists."""
    values = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    return [values] if values and isinstance(values[0], int) else [list(row) for row in values]
