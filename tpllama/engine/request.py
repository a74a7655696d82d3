"""What is asked of the engine and what comes back. Plain Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tpllama.config import UserError
from tpllama.engine.blocks import BlockTable, digests_of

FinishReason = Literal["stop", "length"]

# In a token's place: masks left none to draw; the logits are NaN or infinite, as a weight is damaged or overflows.
NO_TOKEN, NO_NUMBERS = -1, -2


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 (over prompt and text), presence_penalty
    and frequency_penalty 0 (over the text) are off. logit_bias: token id to what is added to its logit. seed None
    takes the engine's. logprobs K asks for the K likeliest tokens' log-probabilities, and the chosen one's, at
    each position; prompt_logprobs K for those of the prompt's tokens.

    A text ends after max_new_tokens, at a token that ends texts (unless ignore_eos) or is in stop_token_ids, or
    before a string of `stop`; not before it has min_tokens. At most one of json_schema (a schema, or its JSON),
    regex and grammar (in llguidance's Lark dialect) constrains the text.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the text has to follow something."""
        return not (self.json_schema is None and self.regex is None and self.grammar is None)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, str | Iterable | None):
                raise UserError(f"found {name} {value!r}, expected a list, correct it")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        for name in ("max_new_tokens", "top_k", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs"):
            value, is_optional = getattr(self, name), name in ("seed", "logprobs", "prompt_logprobs")
            if isinstance(value, bool) or not (isinstance(value, int) or (value is None and is_optional)):
                raise UserError(f"found {name} {value!r}, expected an integer")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            if not _is_number(value):
                raise UserError(f"found {name} {str(value)[:40]}, expected a number")
        if not _is_bias(self.logit_bias):
            raise UserError(f"found logit_bias {str(self.logit_bias)[:40]}, expected finite numbers by token id")
        for name, fits, expected in self._limits():
            if not fits:
                raise UserError(f"found {name} {getattr(self, name)!r}, expected {expected}")
        for name, kinds in (("json_schema", (str, Mapping, bool)), ("regex", str), ("grammar", str)):
            value = getattr(self, name)
            if not (value is None or isinstance(value, kinds)) or (isinstance(value, str) and not _is_text(value)):
                raise UserError(f"found {name} {str(value)[:40]!a}, expected text, correct it")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"found {' and '.join(given)}, expected at most one of them, drop the others")

    def _limits(self) -> Iterator[tuple[str, bool, str]]:
        counts = "from 0 to 100"
        yield "max_new_tokens", self.max_new_tokens >= 1, "at least 1"
        yield "temperature", 0 <= self.temperature < math.inf, "a number from 0"
        yield "top_k", self.top_k >= 0, "at least 0 (0: off)"
        yield "top_p", 0 < self.top_p <= 1, "above 0 and at most 1"
        yield "min_p", 0 <= self.min_p <= 1, "from 0 to 1"
        yield "repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"
        yield "presence_penalty", math.isfinite(self.presence_penalty), "a finite number"
        yield "frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"
        yield "stop", all(isinstance(each, str) and each for each in self.stop), "strings, none of them empty"
        yield "stop_token_ids", all(isinstance(token, int) for token in self.stop_token_ids), "token ids"
        yield "min_tokens", 0 <= self.min_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"
        yield "n", 1 <= self.n <= 4096, "from 1 to 4096"
        yield "logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, counts
        yield "prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 100, counts


def _is_bias(bias: Any) -> bool:
    return isinstance(bias, Mapping) and all(
        type(token) is int and _is_number(amount) and math.isfinite(amount) for token, amount in bias.items()
    )


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold."""
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and float(value) is not None
    except OverflowError:
        return False


def _is_text(value: str) -> bool:
    """Whether it has an encoding: arguments that were no UTF-8 have none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, of the model's own distribution) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """What a text may still become: see `grammar.py`."""

    def allowed(self) -> bytes:
        """The tokens that may follow, as `Draw.allowed` has them."""

    def accept(self, token: int) -> None:
        """Takes note of a token that was drawn."""


def bit_mask(tokens: list[int]) -> bytearray:
    """A bit for each token id: bit t % 8 of byte t // 8."""
    mask = bytearray(max(tokens, default=0) // 8 + 1)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return mask


@dataclass(eq=False)
class Request:
    """One text in the making: a sample of a prompt.

    `siblings` are the prompt's other samples, which begin once its keys and values are computed. `computed` counts the
    tokens whose keys and values lie in `blocks`; `host_blocks` has them while the request is swapped out. `digests`
    are those of its full blocks. `seen`: a bit for each token of prompt and text, where a repetition penalty needs it.
    `has_failed`: its logits were no numbers. `begun_s`: when it first ran, by time.perf_counter.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    params: SamplingParams
    max_length: int
    priority: int = 0
    arrival: int = 0
    constraint: Constraint | None = None
    end_ids: frozenset[int] = frozenset()
    siblings: list[Request] = field(default_factory=list)
    computed: int = 0
    blocks: BlockTable = field(default_factory=BlockTable)
    digests: list[bytes] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_failed: bool = False
    begun_s: float = 0.0
    seen: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.params.repetition_penalty != 1:
            self.seen = bit_mask(self.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt_ids) + len(self.new_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether only the newest token is still to be computed."""
        return self.computed == self.length - 1 and bool(self.new_ids)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens start..stop of prompt and new tokens together."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return tuple(self.new_ids[start - prompt : stop - prompt])
        return (*self.prompt_ids[start:stop], *self.new_ids[: max(0, stop - prompt)])

    def digests_of(self, stop: int, block_size: int, seed: bytes) -> list[bytes]:
        """The digests of the full blocks among the first `stop` tokens."""
        if len(self.digests) < stop // block_size:
            self.digests = digests_of(self.tokens(0, stop), block_size, seed, self.digests)
        return self.digests[: stop // block_size]

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Takes a token that was drawn, or what stands in its place; notes whether it is the last one."""
        if token < 0:
            self.finish_reason = "stop"
            self.has_failed = token == NO_NUMBERS
            return
        if self.seen:
            self.seen.extend(bytes(max(token // 8 + 1 - len(self.seen), 0)))
            self.seen[token // 8] |= 1 << token % 8
        self.new_ids.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.constraint is not None:
            self.constraint.accept(token)
        if token in self.end_ids and len(self.new_ids) >= self.params.min_tokens:
            self.finish_reason = "stop"
        elif self.length >= self.max_length:
            self.finish_reason = "length"


@dataclass(frozen=True)
class Output:
    """A finished text. `index` is the prompt's place in the call, `sample` counts from 0 to n - 1.

    prompt_logprobs: of each of the prompt's tokens from the second one.
    """

    index: int
    sample: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
