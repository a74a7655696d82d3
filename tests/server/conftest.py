"""Loaded models that the server's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpllama import LLM


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The embedded model in float32, on one rank."""
    with LLM(dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="session")
def quick(make_checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    """A small random Llama in float32 with the embedded model's tokenizer: texts of any tokens, soon."""
    from tpllama.checkpoint.open import open_checkpoint

    path = make_checkpoint(vocab_size=49152, max_position_embeddings=512)
    open_checkpoint("smollm2").tokenizer().save_pretrained(path)
    with LLM(str(path), dtype="float32") as llm:
        yield llm
