"""Directories in Hugging Face's form: every layout of weights reads alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpllama.checkpoint.open import TensorInfo, open_checkpoint

State = dict[str, torch.Tensor]
LAYOUTS = ("safetensors", "sharded-safetensors", "bin", "legacy-bin", "sharded-bin")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(
    directory: Path, tiny_state: State, write_weights: Any, layout: str, read_whole: Any
) -> None:
    write_weights(directory, tiny_state, layout)
    checkpoint = open_checkpoint(str(directory))
    dtype = "bf16" if "safetensors" in layout else "bfloat16"
    assert checkpoint.tensors == {name: TensorInfo(tuple(value.shape), dtype) for name, value in tiny_state.items()}
    for name, value in tiny_state.items():
        read = read_whole(checkpoint, name)
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, value)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_is_that_slice_of_the_whole(
    directory: Path, tiny_state: State, write_weights: Any, layout: str, data: st.DataObject
) -> None:
    write_weights(directory, tiny_state, layout)
    name = data.draw(st.sampled_from(sorted(tiny_state)))
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, size)]))) for size in tiny_state[name].shape]
    index = tuple(slice(*pair) for pair in bounds)
    part = open_checkpoint(str(directory)).read(name, index)
    assert torch.equal(part, tiny_state[name][index])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_to_a_slice_leaves_the_file_alone(
    directory: Path, write_weights: Any, tiny_state: State, read_whole: Any, layout: str
) -> None:
    """A slice may be a view of the mapped file, which is private."""
    write_weights(directory, tiny_state, layout)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    read_whole(open_checkpoint(str(directory)), Q_PROJ).zero_()
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    assert torch.equal(read_whole(open_checkpoint(str(directory)), Q_PROJ), tiny_state[Q_PROJ])


def test_safetensors_are_preferred_to_bin(
    directory: Path, write_weights: Any, tiny_state: State, read_whole: Any
) -> None:
    write_weights(directory, tiny_state, "safetensors")
    write_weights(directory, {Q_PROJ: torch.zeros(2, 2)}, "bin")
    assert torch.equal(read_whole(open_checkpoint(str(directory)), Q_PROJ), tiny_state[Q_PROJ])


def test_opening_safetensors_does_not_import_torch(hf_directory: Path) -> None:
    program = (
        "import sys; from tpllama.checkpoint.open import open_checkpoint; "
        "assert open_checkpoint(sys.argv[1]).tensors; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(hf_directory)], check=True)


def test_config_alone_is_enough_without_weights(directory: Path) -> None:
    checkpoint = open_checkpoint(str(directory), weights=False)
    assert checkpoint.tensors == {}
    assert checkpoint.fields["hidden_size"] == 64


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 2, (2,)), ([7, 2], 2, (7, 2)), (5, [2, 5], (5, 2)), (None, None, ())],
)
def test_eos_token_ids_are_the_ordered_union(
    directory: Path, tiny_config: dict[str, Any], generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    (directory / "config.json").write_text(json.dumps(tiny_config | {"eos_token_id": config}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_checkpoint(str(directory), weights=False).eos_token_ids == expected


def test_no_tokenizer_files_is_no_tokenizer(directory: Path) -> None:
    assert open_checkpoint(str(directory), weights=False).tokenizer() is None


def test_tokenizer_is_transformers_own(directory: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"hello": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(directory)
    tokenizer = open_checkpoint(str(directory), weights=False).tokenizer()
    assert tokenizer is not None
    assert tokenizer("hello").input_ids == [0]
