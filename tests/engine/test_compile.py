"""Compiled steps: of a few sizes, all compiled before the first request, with the same texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tpllama import LLM, SamplingParams
from tpllama.engine.executor import bucket

GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)


def test_sizes_of_steps_are_few_and_fit() -> None:
    sizes = {bucket(count) for count in range(1, 513)}
    assert len(sizes) <= 16
    assert all(count <= bucket(count) <= max(2 * count - 1, 1) for count in range(1, 513))
    assert all(bucket(size) == size for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_compiled_after_the_start(make_checkpoint: Callable[..., Path], tp: int) -> None:
    torch.compiler.reset()
    counters.clear()
    prompts = [[(7 * place + step) % 211 for step in range(1 + 13 * place % 90)] for place in range(24)]
    with LLM(str(make_checkpoint()), tp=tp, dtype="float32", compile="on", max_batch_tokens=64) as llm:
        compiled = counters["stats"]["unique_graphs"]
        assert compiled > 0
        found = [llm.generate(prompts[:count], GREEDY) for count in (1, 2, 5, 24)]
        assert counters["stats"]["unique_graphs"] == compiled
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        for outputs, count in zip(found, (1, 2, 5, 24), strict=True):
            expected = llm.generate(prompts[:count], GREEDY)
            assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
