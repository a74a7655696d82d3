"""Steps that are recorded give what steps that aren't do, whatever comes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tpllama import LLM, SamplingParams
from tpllama.kernels import fused, layer
from tpllama.recording import Memory, in_place, recording

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


def test_what_can_not_be_recorded_is_computed_and_said() -> None:
    x = torch.ones(3)
    with recording(Memory()) as recorded:
        assert (x * 2).tolist() == [2, 2, 2]
    assert "aten.mul" in str(recorded.obstacle)
    with recording(Memory()) as recorded:
        in_place(lambda each: torch.empty(3), x)
    assert "elsewhere" in str(recorded.obstacle)
    with recording(Memory()) as recorded:
        in_place(lambda each: each.numpy().__iadd__(1) is None or each, x)
        y = torch.empty(3)
    assert recorded.obstacle is None
    recorded.replay()
    assert x.tolist() == [3, 3, 3]
    assert y.data_ptr() % 64 == 0


def test_what_is_gone_makes_room_for_what_comes() -> None:
    memory = Memory()
    with recording(memory):
        first = torch.empty(3, 500)
        place, view = first.data_ptr(), first.view(-1)
        del first
        other = torch.empty(1500)
        assert other.data_ptr() != place  # a view of the first is still there
        del view
        assert torch.empty_like(other).data_ptr() == place
    with recording(memory):  # of another size of steps, while `other` is held
        assert {torch.empty(count, 100).data_ptr() for count in (11, 15, 20)} == {place}
    assert memory.bytes == 2 * 8192


def test_calls_are_made_again_on_the_same_memory() -> None:
    x, weight = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    with recording(Memory()) as recorded:
        y = fused.rms_norm(x, weight, 1e-5)
    first = y.clone()
    x.mul_(torch.arange(64))
    recorded.replay()
    assert not torch.equal(y, first)
    assert torch.equal(y, fused.rms_norm(x, weight, 1e-5))


def test_layers_that_can_not_be_recorded_run_as_ever(make_checkpoint: Callable[..., Path], runs: list[int]) -> None:
    """A bias is added by torch."""
    made = []
    first = layer._RecordedStep.__init__

    def init(self: layer._RecordedStep, *arguments: Any) -> None:
        made.append(1)
        first(self, *arguments)

    def texts() -> list[int]:
        with LLM(str(make_checkpoint()), dtype="bfloat16") as llm:
            return llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids

    with patch.object(layer, "_MOST_RECORDED", 0):
        expected = texts()
    with patch.object(layer._RecordedStep, "__init__", init):
        assert texts() == expected
    assert made == [1]  # and not tried again
    assert runs == []


def test_ranks_of_which_some_can_not_be_recorded_stay_in_step(make_checkpoint: Callable[..., Path]) -> None:
    """320 columns over 3 ranks: groups of 16, which have no kernel of ours, on two of them and of 32 on the third."""
    path = make_checkpoint(
        hidden_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=32, intermediate_size=320,
        attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
    with LLM(str(path), tp=3, torchao_config="int4wo-32", dtype="bfloat16") as llm:
        [found] = llm.generate([[5, 6, 7, 8]], params)
        expected = llm.logits([5, 6, 7, 8, *found.token_ids])[0, 3:].log_softmax(-1)  # a prompt's, which isn't recorded
    for place, each in enumerate(found.logprobs):
        assert each.logprob == pytest.approx(float(expected[place, each.token_id]), abs=0.1)
