"""Steps that are recorded give what steps that aren't do, whatever comes between them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tpllama import LLM, SamplingParams
from tpllama.kernels import fused, layer
from tpllama.recording import Unrecordable, in_place, recording

pytestmark = pytest.mark.skipif(not fused.is_available(), reason="no compiler")
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at", "Dear Sir"]


@pytest.fixture
def runs() -> Iterator[list[int]]:
    """Of each step that was replayed, its tokens."""
    found: list[int] = []
    replay = layer._RecordedStep.run

    def run(self: layer._RecordedStep, x: Tensor, *rest: object) -> Tensor:
        found.append(len(x))
        return replay(self, x, *rest)  # type: ignore[arg-type]

    with patch.object(layer._RecordedStep, "run", run):
        yield found


@pytest.mark.parametrize("recipe", ["none", "int8dq", "int8wo", "int4wo-32", "8da4w-32"])
def test_texts_are_those_of_steps_that_are_not_recorded(recipe: str, runs: list[int]) -> None:
    # Texts end one after another, so steps of 5 tokens to 1 are replayed and, when more begin, replayed again.
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (30, 6, 14, 20, 10)]

    def texts() -> list[list[int]]:
        with LLM(torchao_config=recipe, dtype="bfloat16", prefix_caching=False) as llm:
            outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[::-1], params[::-1])]
            logits = llm.logits(llm.tokenizer.encode(PROMPTS[0]))
            assert logits.isfinite().all()
            return [output.token_ids for output in outputs]

    found = texts()
    assert {1, 2, 3, 4, 5} <= set(runs)
    runs.clear()
    with patch.object(layer, "_MOST_RECORDED", 0):
        assert texts() == found
    assert runs == []


def test_of_ranks_too(runs: list[int]) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)

    def texts() -> list[list[int]]:
        with LLM(tp=2, torchao_config="int8dq", dtype="bfloat16") as llm:
            return [output.token_ids for output in llm.generate(PROMPTS[:2], params)]

    found = texts()
    assert runs.count(2) > 10  # the leader's; the other rank must have kept in step
    with patch.object(layer, "_MOST_RECORDED", 0):
        assert texts() == found


def test_what_can_not_be_recorded_is_said_while_it_is() -> None:
    x = torch.ones(3)
    with pytest.raises(Unrecordable, match=r"aten\.mul"), recording():
        x * 2
    with pytest.raises(Unrecordable, match="elsewhere"), recording():
        in_place(lambda each: torch.empty(3), x)
    with recording() as recorded:
        in_place(lambda each: each, x)
        y = torch.empty(3)
        x.add_(1)
    assert len(recorded.calls) == 2
    recorded.replay()
    assert x.tolist() == [3, 3, 3]
    assert y.data_ptr() in [each.data_ptr() for each in recorded.held if isinstance(each, Tensor)]


def test_calls_are_made_again_on_the_same_memory() -> None:
    x, weight = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    with recording() as recorded:
        y = fused.rms_norm(x, weight, 1e-5)
    first = y.clone()
    x.mul_(torch.arange(64))
    recorded.replay()
    assert not torch.equal(y, first)
    assert torch.equal(y, fused.rms_norm(x, weight, 1e-5))


def test_layers_that_can_not_be_recorded_run_as_ever() -> None:
    """A bias is added by torch."""
    with LLM(dtype="bfloat16") as llm:
        expected = llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8))[0].token_ids
    seen = []

    def fail(*_: object) -> None:
        seen.append(1)
        raise Unrecordable("not this one")

    with patch.object(layer, "_RecordedStep", fail), LLM(dtype="bfloat16") as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8))[0].token_ids == expected
    assert seen == [1]  # and not tried again
