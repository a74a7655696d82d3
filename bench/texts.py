"""Texts to measure with that every Python has: chapters of its documentation (pydoc_data.topics)."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from tpllama.config import UserError

if TYPE_CHECKING:
    from tpllama import LLM


def chapters(count: int) -> list[str]:
    """The longest ones."""
    return sorted(topics.values(), key=len, reverse=True)[:count]


def windows(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of each of the longest chapters.

    Of a model without a tokenizer the chapters' bytes, modulo its vocabulary, stand for tokens.
    """
    texts, vocab_size = chapters(count), llm.blueprint.config.vocab_size
    has_text = llm.tokenizer.has_text
    ids = [llm.tokenizer.encode(text) if has_text else [byte % vocab_size for byte in text.encode()] for text in texts]
    shortest = min(map(len, ids), default=0)
    if len(ids) < count or shortest < length:
        raise UserError(
            f"found {len(ids)} texts, the shortest of {shortest} tokens, expected {count} of at least {length}, "
            f"lower --texts or --tokens"
        )
    return [each[:length] for each in ids]
