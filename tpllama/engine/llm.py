"""The Python API: a model, ready to generate, on one rank or many."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tpllama.config import UserError
from tpllama.engine.request import Output, SamplingParams
from tpllama.parallel.launch import Death
from tpllama.prepare import Preparation, PromptLike
from tpllama.quiet import quiet_imports

if TYPE_CHECKING:
    from torch import Tensor

    from tpllama.blueprint import Blueprint
    from tpllama.engine.engine import Engine
    from tpllama.engine.text import Piece, Prompt
    from tpllama.engine.tokenizer import Message, Tokenizer


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
        if not debug:
            quiet_imports()
        self._preparation = Preparation(model, tp, torchao_config, debug=debug, on_rank_death=on_rank_death, **options)
        for line in self._preparation.notes if self._preparation.place.rank == 0 else ():
            logging.getLogger("tpllama").warning(line)
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
    def engine(self) -> Engine:
        """What runs the requests. Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

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
        priority: int = 0,
    ) -> list[Output]:
        """Completions of raw texts or token ids (no chat template), in order; `n` outputs in a row per prompt.

        priority: among calls from several threads, the lower goes first.
        """
        many = self._as_prompts(prompts)
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise UserError(f"found {len(each)} sampling parameters for {len(many)} prompts, expected one for each")
        return self._collect(many, list(each), priority)

    def chat(self, messages: list[Message] | list[list[Message]], params: SamplingParams | None = None) -> list[Output]:
        """The assistant's answer to one conversation, or one to each of several."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [self._preparation.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._collect(prompts, [params or SamplingParams()] * len(prompts))

    def stream(
        self, prompt: PromptLike | list[Message], params: SamplingParams | None = None, priority: int = 0
    ) -> Iterator[Piece]:
        """Pieces of the text after one prompt, or of the answer to one conversation, as they come."""
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        single = self._preparation.chat_prompt(prompt) if is_chat else self._as_prompts([prompt])[0]  # type: ignore[arg-type]
        return self.pieces([single], [params or SamplingParams()], priority)

    def pieces(self, prompts: list[Prompt], params: list[SamplingParams], priority: int = 0) -> Iterator[Piece]:
        """Pieces of all texts as they come, from one batch."""
        with self._preparation.blaming_ranks():
            yield from self.engine.generate(prompts, params, priority)

    def advance(self) -> None:
        """Runs the engine's next step (see `Engine.advance`). Raises what went wrong, a dead rank by name."""
        with self._preparation.blaming_ranks():
            self.engine.advance()

    def logits(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Logits of whole sequences of equal length, float32 [batch, seq, vocab]; one sequence is a batch of one."""
        rows, engine = _rows(token_ids), self.engine
        from tpllama.engine.engine import check_prompt

        for row in rows:
            check_prompt(row, self.blueprint.context_length + 1, self.blueprint.config.vocab_size)
        if len({len(row) for row in rows}) > 1:
            raise UserError("found sequences of different lengths, expected equal ones, call once per length")
        with self._preparation.blaming_ranks():
            return engine.logits(rows)

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of each rank's process, on its device where that is a GPU."""
        with self._preparation.blaming_ranks():
            return self.engine.peak_memory_bytes()

    def close(self) -> None:
        """Ends the ranks and gives back memory; further calls do nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None  # type: ignore[assignment]
            self._preparation.close()
            gc.collect()  # an engine is part of a cycle, which would keep the weights

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None  # type: ignore[assignment]
        self._preparation.__exit__(*error)
        gc.collect()

    def _as_prompts(self, prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = [prompts] if is_one else prompts
        return [self._preparation.prompt(prompt) for prompt in many]  # type: ignore[arg-type]

    def _collect(self, prompts: list[Prompt], params: list[SamplingParams], priority: int = 0) -> list[Output]:
        outputs = [piece.output for piece in self.pieces(prompts, params, priority) if piece.output]
        return sorted(outputs, key=lambda output: (output.index, output.sample))


def _rows(token_ids: Any) -> list[list[int]]:
    """One sequence or several, as lists or a tensor, as a list of lists."""
    values = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    return [values] if not values or isinstance(values[0], int) else [list(row) for row in values]
