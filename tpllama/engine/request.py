"""What is asked of the engine and what comes back. Plain Python, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tpllama.config import UserError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. seed None takes the
    engine's. logprobs K asks for the K likeliest tokens' log-probabilities, and the chosen one's, at each position.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("max_new_tokens", "top_k", "n", "seed", "logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise UserError(f"found {name} {value!r}, expected an integer")
        for name, value, fits, expected in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0 (0: off)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0"),
            ("n", self.n, self.n >= 1, "at least 1"),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 100, "from 0 to 100"),
            ("stop", self.stop, all(self.stop), "no empty string"),
        ):
            if not fits:
                raise UserError(f"found {name} {value!r}, expected {expected}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, of the model's own distribution) at one generated position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Sequence:
    """One text in the making: a prompt's sample. `computed` counts the tokens whose keys and values are cached."""

    index: int
    sample: int
    prompt_ids: list[int]
    params: SamplingParams
    max_length: int
    row: int = -1
    computed: int = 0
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt_ids) + len(self.new_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether only the newest token is still to be computed."""
        return self.computed >= len(self.prompt_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and new tokens together."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[start:stop] + self.new_ids[max(0, start - prompt) : max(0, stop - prompt)]


@dataclass(frozen=True)
class Output:
    """A finished text. `index` is the prompt's place in the call, `sample` counts from 0 to n - 1."""

    index: int
    sample: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
