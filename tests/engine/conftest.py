"""Loaded models that the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpllama import LLM
from tpllama.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The embedded model's."""
    from tpllama.checkpoint.open import open_checkpoint

    return Tokenizer(open_checkpoint("smollm2").tokenizer())


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The embedded model in float32, on one rank."""
    with LLM(dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny(make_checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    """A random Llama in float32 without a tokenizer, 128 positions."""
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        yield llm
