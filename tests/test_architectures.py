"""A config's `architectures` chooses who loads its weights."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tpllama import LLM, architectures
from tpllama.architectures import ARCHITECTURES, architecture_of
from tpllama.build import LlamaLoader
from tpllama.config import UserError


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (None, "LlamaForCausalLM"),
        ([], "LlamaForCausalLM"),
        (["LlamaForCausalLM"], "LlamaForCausalLM"),
        (["TorchNativeLlamaForCausalLM"], "TorchNativeLlamaForCausalLM"),
        (["SomethingElse", "LlamaForCausalLM"], "LlamaForCausalLM"),
    ],
)
def test_the_first_known_name_is_chosen(names: Any, chosen: str) -> None:
    assert architecture_of({"architectures": names}) == chosen


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], "LlamaForCausalLM", [3], {"a": 1}])
def test_an_unknown_one_is_an_error_that_names_the_known(names: Any) -> None:
    with pytest.raises(UserError, match=r"found architectures.*expected one of.*LlamaForCausalLM") as caught:
        architecture_of({"architectures": names})
    assert all(name in str(caught.value) for name in ARCHITECTURES)


class Doubled(LlamaLoader):
    """A Llama whose head gives twice the logits."""

    def load(self) -> Any:
        model = super().load()
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight * 2, requires_grad=False)
        return model


def test_an_override_chooses_among_the_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.ARCHITECTURES, "Doubled", f"{__name__}:Doubled")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, SimpleNamespace(Doubled=Doubled)))
    logits = []
    for names in (["LlamaForCausalLM"], ["Doubled"]):
        with LLM("smollm2", json_model_override_args={"architectures": names}, dtype="float32") as llm:
            logits.append(llm.logits([[1, 2, 3]]))
    assert (logits[1] == 2 * logits[0]).all()
