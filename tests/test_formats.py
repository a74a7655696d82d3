"""One model in every form that checkpoints have: the same logits, on any number of ranks.

The weights are exact in float16, the narrowest form here, so that what differs is the reading alone. One launch of
matrix_worker.py per degree computes the logits of all forms. The embedded model, written in Meta's form, has the same
weights bit for bit and says the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint import formats
from checkpoint.conftest import write_gguf_file, write_layout
from checkpoint.test_gguf import to_gguf
from matrix_worker import launch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tpllama import LLM, SamplingParams
from tpllama.checkpoint.open import Checkpoint, open_checkpoint

ROOT = Path(__file__).parents[1]
State = dict[str, Tensor]
# Three key-value heads on two ranks, and shards that cut heads: nothing divides evenly. Neither setting is a default.
CONFIG: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 2e-5,
    "rope_theta": 20000.0,
}
METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 224,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 2e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 20000.0,
}
DEGREES = (1, 2, 3)
BATCH = [[1 + (7 * place + 13 * text) % 200 for place in range(24)] for text in range(2)]
# Largest difference of a logit, by the largest logit.
TOLERANCE = 1e-5


def write_hf(path: Path, state: State, shards: int) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    if shards == 1:
        write_layout(path, state, "safetensors")
        return
    for number in range(shards):
        part = dict(list(state.items())[number::shards])
        save_file(part, path / f"model-{number + 1:05d}-of-{shards:05d}.safetensors")


def write_bin(path: Path, state: State) -> None:
    write_hf(path, {}, 1)
    (path / "model.safetensors").unlink()
    write_layout(path, state, "bin")


def write_gguf(path: Path, state: State) -> None:
    tensors = {
        name: (array.astype(np.float16), "F16") if array.ndim == 2 else (array, kind)
        for name, (array, kind) in to_gguf(state, 6, 3).items()
    }
    write_gguf_file(path.with_suffix(".gguf"), METADATA, tensors)


def write_meta(path: Path, state: State, shards: int, style: str) -> None:
    formats.write_meta(path, state, CONFIG, shards, style, rope_theta=CONFIG["rope_theta"])


WRITERS: dict[str, Callable[[Path, State], object]] = {
    "hf-1": lambda path, state: write_hf(path, state, 1),
    "hf-3": lambda path, state: write_hf(path, state, 3),
    "bin": write_bin,
    "torchtune-meta": lambda path, state: formats.write_torchtune_meta(path / "epoch_0", state, CONFIG),
    "torchtune-meta-2": lambda path, state: formats.write_torchtune_meta(path / "epoch_0", state, CONFIG, 2),
    "torchtune-hf": lambda path, state: formats.write_torchtune_hf(path / "epoch_0", state, CONFIG),
    "original": lambda path, state: write_meta(path / "original", state, 2, "llama3"),
    "gguf": write_gguf,
} | {
    f"{style}-{shards}": lambda path, state, shards=shards, style=style: write_meta(path, state, shards, style)
    for style in ("llama3", "llama2")
    for shards in (1, 2, 4)
}


class Forms:
    """The model in all forms, and the logits of all at a degree, computed when one is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.reference = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.1)
                parameter.copy_(parameter.half())
        state = {name: value.half().clone() for name, value in self.reference.state_dict().items()}
        for form, write in WRITERS.items():
            write(folder / form, state)
        self.state = state
        self.done: set[int] = set()

    def path(self, form: str) -> Path:
        return self.folder / (f"{form}.gguf" if form == "gguf" else form)

    @torch.no_grad()
    def expected(self) -> Tensor:
        logits: Tensor = self.reference(torch.tensor(BATCH)).logits
        return logits

    def logits(self, form: str, tp: int) -> Tensor:
        if tp not in self.done:
            self._launch(tp)
            self.done.add(tp)
        logits: Tensor = torch.load(self.folder / f"{form}.tp{tp}.rank0.pt")["logits"][0]
        return logits

    def _launch(self, tp: int) -> None:
        cases = [
            {"key": form, "engine": {"model": str(self.path(form)), "dtype": "float32"}, "keeps_weights": False}
            for form in WRITERS
        ]
        launch(self.folder, tp, {"batches": [BATCH], "cases": cases}, timeout_s=120)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("tp", DEGREES)
def test_every_form_has_transformers_logits(forms: Forms, form: str, tp: int) -> None:
    expected = forms.expected()
    assert expected.std() > 0.5
    assert (forms.logits(form, tp) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("form", WRITERS)
def test_every_form_has_the_same_bits(forms: Forms, form: str) -> None:
    checkpoint = open_checkpoint(str(forms.path(form)))
    assert checkpoint.tensors.keys() == forms.state.keys()
    for name, value in forms.state.items():
        assert torch.equal(whole(checkpoint, name).half(), value), name


def whole(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.read(name, tuple(slice(0, size) for size in checkpoint.tensors[name].shape))


# The embedded model in Meta's form.


@pytest.fixture(scope="module")
def smollm2_in_meta_s_form(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    checkpoint = open_checkpoint("smollm2")
    path = tmp_path_factory.mktemp("smollm2")
    state = {name: whole(checkpoint, name) for name in checkpoint.tensors}
    # Meta's formula gives 1536 of a hidden size of 576 by itself.
    theta = checkpoint.fields["rope_parameters"]["rope_theta"]
    formats.write_meta(
        path, state, checkpoint.fields, shards=2, multiple_of=256, ffn_dim_multiplier=None, rope_theta=theta
    )
    yield path
    shutil.rmtree(path)


def test_the_embedded_model_in_meta_s_form_has_the_same_bits(smollm2_in_meta_s_form: Path) -> None:
    original, written = open_checkpoint("smollm2"), open_checkpoint(str(smollm2_in_meta_s_form))
    assert written.tensors == original.tensors
    for name in original.tensors:
        found, expected = whole(written, name), whole(original, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name
    assert "ffn_dim_multiplier" not in (smollm2_in_meta_s_form / "params.json").read_text()
    for field in ("intermediate_size", "rms_norm_eps", "tie_word_embeddings", "head_dim", "vocab_size"):
        assert written.fields[field] == original.fields[field], field


def test_the_embedded_model_in_meta_s_form_says_the_same(smollm2_in_meta_s_form: Path) -> None:
    prompt, params = "The three primary colours are", SamplingParams(max_new_tokens=16)
    with LLM(dtype="float32") as llm:
        (expected,) = llm.generate([prompt], params)
    # Which has no tokenizer, so the original lends its own.
    with LLM(str(smollm2_in_meta_s_form), llama_model="smollm2", dtype="float32") as llm:
        (found,) = llm.generate([prompt], params)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert len(expected.token_ids) > 8
