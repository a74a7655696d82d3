"""Everything before the weights, then the weights: the way from a user's words to an engine, on the leader.

Part of the composition root (see `build.py`).
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import Checkpoint, open_for, overridden
from tpllama.config import EngineConfig, UserError
from tpllama.llama_config import LlamaConfig
from tpllama.parallel.launch import Death, Followers
from tpllama.parallel.place import Place, resolve_tp, torchrun_place
from tpllama.parallel.split import check_tp
from tpllama.quantization.recipes import RecipeMap

if TYPE_CHECKING:
    from tpllama.engine.engine import Engine
    from tpllama.engine.executor import ModelExecutor
    from tpllama.engine.lockstep import Leader
    from tpllama.engine.policy import Policy
    from tpllama.engine.request import SamplingParams
    from tpllama.engine.text import Prompt
    from tpllama.engine.tokenizer import Message

PromptLike = str | Sequence[int]


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
        RecipeMap.parse(torchao_config)  # a wrong name is said before anything is started
        self.load_seconds = 0.0
        self.progress: Callable[[list[Any]], Iterable[Any]] = list  # see `build`
        self._leader: Leader | None = None
        self._has_joined = False
        self._followers: Followers | None = None
        self.place = torchrun or Place(0, degree, 0, degree)
        with self._closing_on_error():
            with self._telling_other_hosts():
                self.checkpoint: Checkpoint = open_for(self.config)
                check_tp(LlamaConfig.from_hf(overridden(self.checkpoint, self.config.json_model_override_args)), degree)
                if torchrun is None and degree > 1:
                    self._start_followers(debug, on_rank_death)
                from tpllama.engine.grammar import Grammars
                from tpllama.engine.tokenizer import Tokenizer
                from tpllama.parallel.mesh import check_free
                from tpllama.start import draw_blueprint, resolve_device

                if degree > 1:
                    check_free()
                resolve_device(self.config.device, self.place.local_rank)
                self.blueprint = draw_blueprint(self.config, self.checkpoint)
            self._longest_request = self.blueprint.longest_request
            self.tokenizer = Tokenizer(self.checkpoint.tokenizer() if self.place.rank == 0 else None)
            self._eos = self._eos_token_ids()
            self.grammars = Grammars(self.tokenizer, self.blueprint.config.vocab_size, self._eos)

    def _start_followers(self, debug: bool, on_rank_death: Callable[[Death], None] | None) -> None:
        # Every rank reads the very files that the leader found.
        base, degree = self.checkpoint.base_path, self.config.tp
        engine = asdict(self.config)
        engine |= {"model": str(self.checkpoint.path), "llama_model": None if base is None else str(base)}
        self._followers = Followers(degree, {"engine": engine, "debug": debug}, os.environ)
        if on_rank_death:
            self._followers.on_death(on_rank_death, grace_s=3)
        self.place = Place(0, degree, 0, degree, self._followers.port)

    @contextmanager
    def _telling_other_hosts(self) -> Iterator[None]:
        """Where ranks are on several hosts: what one of them lacks is said by all, and none goes on."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.place.local_size == self.place.size:
                raise
            failure = error
        if self.place.local_size < self.place.size:
            from tpllama.parallel.hosts import check_hosts

            checkpoint = None if failure else self.checkpoint
            files = {file.name: file.stat().st_size for file in checkpoint.files} if checkpoint else {}
            check_hosts(self.place, self.config.model, failure, files, checkpoint.fields if checkpoint else {})

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before the weights are read, a line each."""
        from tpllama.kernels.small_m import why_not

        lacking = why_not() if self.blueprint.device == "cpu" else None
        line = f"torch's kernels run instead of our own, which are faster for few tokens: {lacking}"
        return (*self.checkpoint.notes, *([line] if lacking else []))

    def prompt(self, prompt: PromptLike) -> Prompt:
        """A raw text's or token ids' prompt. Raises UserError where it doesn't fit."""
        from tpllama.engine.text import Prompt

        if isinstance(prompt, str):
            return self._checked(Prompt(self.tokenizer.encode(prompt), prompt))
        return self._checked(Prompt(_ids(prompt)))

    def chat_prompt(self, messages: list[Message]) -> Prompt:
        """A conversation's prompt. Raises UserError where it doesn't fit."""
        from tpllama.engine.text import Prompt

        return self._checked(Prompt(self.tokenizer.encode_chat(messages), str(messages[-1].get("content", ""))))

    def check(self, params: SamplingParams) -> None:
        """Raises UserError where a text can't be constrained as the parameters ask."""
        self.grammars.constraint(params)

    def _checked(self, prompt: Prompt) -> Prompt:
        from tpllama.engine.engine import check_prompt

        check_prompt(prompt.token_ids, self._longest_request, self.blueprint.config.vocab_size)
        return prompt

    def load(self) -> Engine:
        """Joins the ranks and loads this one's weights. On a follower under torchrun: runs it, and exits."""
        from tpllama.engine.engine import Engine, Limits
        from tpllama.engine.lockstep import Leader, follow
        from tpllama.start import start_rank

        started = time.perf_counter()
        listener = self._followers.listener if self._followers else None
        self._has_joined = self.place.size > 1
        with self._closing_on_error(), self.blaming_ranks():
            runner = start_rank(self.blueprint, self.checkpoint, self.place, listener, self._check_ranks, self.progress)
            if self.place.rank > 0:
                follow(runner, runner.ranks)
                raise SystemExit(0)
            self._leader = Leader(runner, runner.ranks) if self.place.size > 1 else None
        self.load_seconds = time.perf_counter() - started
        config = self.blueprint.config
        del self.checkpoint  # nothing more is read: its files are closed
        limits = Limits(self.blueprint.context_length, config.vocab_size)
        executor = self._leader or runner
        policy = self._policy(executor)
        return Engine(executor, self.tokenizer, self.grammars, self._eos, limits, policy, self.config.seed)

    def _policy(self, executor: ModelExecutor) -> Policy:
        from tpllama.engine.policy import Policy

        config = self.config
        return Policy(
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            chunked_prefill=config.chunked_prefill,
            # What another prompt computed, it computed in other company.
            prefix_caching=config.prefix_caching and not config.batch_invariant,
            host_blocks=executor.cache_shape.num_host_blocks,
            alone=config.batch_invariant,
            length_rope_limit=self.blueprint.metadata(0).length_rope_limit,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: the tokenizer's too, unless the user says which."""
        own = self.blueprint.eos_token_ids
        if "eos_token_id" in (self.config.json_model_override_args or {}):
            return own
        return tuple(dict.fromkeys((*own, *self.tokenizer.eos_token_ids)))

    def _check_ranks(self) -> None:
        """Raises RankLost if a rank that we started has ended."""
        if self._followers and (death := self._followers.first_death()):
            from tpllama.parallel.collectives import RankLost

            raise RankLost(death.describe())

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

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._leader = None  # ranks that broke off in the middle of a step can't be told to stop
        self.close()

    def close(self) -> None:
        """Tells the followers to stop, and sees that those we started do."""
        if self._leader is not None:
            self._leader.stop()
            self._leader = None
        if self._followers is not None:
            self._followers.close()
            self._followers = None
        if self._has_joined:
            from tpllama.parallel.mesh import leave

            self._has_joined = False
            leave()


def _ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as plain integers, from any sequence of integers, tensors and arrays included."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise UserError(f"found a prompt of {type(tokens).__name__}, expected text or a list of token ids") from None
