"""Texts that must follow a JSON schema, a regular expression or a grammar, by masks that llguidance computes.

All of it lives with the request, on the leader: ranks get a bitmask with each draw and know nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from tpllama.config import UserError
from tpllama.engine.request import Constraint, SamplingParams
from tpllama.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_COMPILED = 32
_MOST_REASON_CHARACTERS = 200
_REMEDY = "ask for a text without json_schema, regex and grammar"


class Grammars:
    """A model's constraints. `vocab_size`: how many logits it has; `eos_token_ids`: the tokens that end its texts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted({token for token in eos_token_ids if 0 <= token < vocab_size})
        self._compiled = lru_cache(_MOST_COMPILED)(self._compile)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What the parameters ask a text to follow, with a state of its own; None if they don't."""
        if params.json_schema is not None:
            compiled = self._compiled("json_schema", _json_text(params.json_schema))
        elif params.regex is not None:
            compiled = self._compiled("regex", params.regex)
        elif params.grammar is not None:
            compiled = self._compiled("grammar", params.grammar)
        else:
            return None
        return _Matching(compiled.deep_copy(), self._only_eos)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """A matcher at the start of a text. Raises UserError, which is not cached."""
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._given
        match kind:
            case "json_schema":
                form = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                form = LLMatcher.grammar_from_regex(text)
            case _:
                form = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(tokenizer, form, log_level=0, limits=LLParserLimits(verbose_errors=False))
        # The first mask may take long, or show what is wrong: better now than in a step.
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = _line(matcher.get_error())
            raise UserError(f"found a {kind} that can't be followed ({reason}), expected one that can, change it")
        return matcher

    @cached_property
    def _given(self) -> LLTokenizer:
        """The tokenizer as llguidance wants it; takes some tenths of a second."""
        from llguidance.hf import from_tokenizer

        if not self._eos_token_ids:
            raise UserError(f"found no token that ends texts, expected one where a text has a form, {_REMEDY}")
        inner = self._tokenizer.backend()
        try:
            # Tokens that have no logits do no harm: the sampler ignores their bits.
            size = max(self._vocab_size, 1 + max(inner.get_vocab().values()))
            return from_tokenizer(inner, size, self._eos_token_ids)
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"found a tokenizer that llguidance can't use ({_line(str(error))}), expected a fast one, {_REMEDY}"
            ) from None

    @cached_property
    def _only_eos(self) -> bytes:
        bits = sum(1 << token for token in self._eos_token_ids)
        return bits.to_bytes((self._vocab_size + 7) // 8, "little")


class _Matching:
    """A Constraint: one text's way through a grammar."""

    def __init__(self, matcher: LLMatcher, only_eos: bytes) -> None:
        self._matcher = matcher
        self._only_eos = only_eos

    def allowed(self) -> bytes:
        """The tokens that may follow; those that end texts where the text may end, or where nothing can follow.

        Nothing can where the matcher gave up: a step beyond its limits, a token that was not allowed, or bytes that
        no token has.
        """
        mask = self._matcher.compute_bitmask()
        return self._only_eos if self._matcher.is_error() or not mask.strip(b"\0") else mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


def _json_text(schema: object) -> str:
    """A schema's JSON, from itself or its JSON: order is kept, for properties come in that of the schema."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict | bool):
            raise ValueError(f"{type(parsed).__name__} where an object should be")
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"found a json_schema that is none ({_line(str(error))}), expected a JSON object, change it"
        ) from None


def _line(reason: str) -> str:
    """One line, cut off where it gets long."""
    line = " ".join(reason.split())
    return line if len(line) <= _MOST_REASON_CHARACTERS else line[:_MOST_REASON_CHARACTERS] + "..."
