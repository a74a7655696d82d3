"""Every kind of folder opens as the model that it holds, and says what was chosen; what is unclear is an error."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import formats
from checkpoint.conftest import SIZES as CONFIG
from checkpoint.conftest import write_layout
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tpllama.checkpoint.open import Checkpoint, open_checkpoint
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

State = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"


def write_config(path: Path, **changes: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2, **CONFIG, **changes}))


def write_hf(path: Path, state: State, layout: str = "safetensors") -> None:
    write_config(path)
    write_layout(path, state, layout)


def write_without_index(path: Path, state: State, layout: str) -> None:
    write_hf(path, state, layout)
    next(path.glob("*.index.json")).unlink()


def write_both(path: Path, state: State) -> None:
    """Both containers; zeros in the one that must not be read."""
    write_hf(path, state)
    torch.save({name: torch.zeros_like(value) for name, value in state.items()}, path / "pytorch_model.bin")


def write_original(path: Path, state: State) -> None:
    formats.write_meta(path / "original", state, CONFIG, shards=2)


def write_original_with_hf_files(path: Path, state: State) -> None:
    write_original(path, state)
    write_config(path)
    write_tokenizer(path)


def write_torchtune_bin(path: Path, state: State) -> None:
    """torchtune's Hugging Face form with safe_serialization=False: shards have the names of its Meta form."""
    write_config(path)
    items, weight_map = list(state.items()), {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.bin"
        part = dict(items[number - 1 :: 2])
        torch.save(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_torchtune_bin_without_index(path: Path, state: State) -> None:
    write_torchtune_bin(path, state)
    (path / "pytorch_model.bin.index.json").unlink()


def write_torchtune_0_5(path: Path, state: State) -> None:
    formats.write_torchtune_meta(path, state, CONFIG)[0].rename(path / "ft-model-00001-of-00001.bin")


def write_llama_stack(path: Path, state: State) -> None:
    formats.write_meta(path, state, CONFIG)
    (path / "adapter").mkdir()
    torch.save({"layers.0.attention.wq.lora_a.weight": torch.ones(2, 64)}, path / "adapter" / "adapter.pth")


def write_trainer(path: Path, state: State) -> None:
    """What the Hugging Face trainer leaves in checkpoint-N."""
    write_hf(path, state)
    torch.save({"state": {}}, path / "optimizer.pt")
    torch.save([1], path / "rng_state.pth")
    torch.save({}, path / "training_args.bin")
    (path / "trainer_state.json").write_text("{}")


def write_consolidated(path: Path, state: State, name: str) -> None:
    (file,) = formats.write_meta(path, state, CONFIG)
    save_file(torch.load(file), path / name) if name.endswith("safetensors") else file.rename(path / name)
    file.unlink(missing_ok=True)


def write_old_hf(path: Path, state: State) -> None:
    write_config(path)
    items = list(state.items())
    for number in (1, 2):
        torch.save(dict(items[number - 1 :: 2]), path / f"hf_model_000{number}_0.pt")


# Of each kind of folder: how it is written, and the folder in it that is the model's.
FORMS: dict[str, Callable[[Path, State], object]] = {
    "hf": write_hf,
    "hf-index": lambda path, state: write_hf(path, state, "sharded-safetensors"),
    "hf-numbered": lambda path, state: write_without_index(path, state, "sharded-safetensors"),
    "bin": lambda path, state: write_hf(path, state, "bin"),
    "bin-legacy": lambda path, state: write_hf(path, state, "legacy-bin"),
    "bin-index": lambda path, state: write_hf(path, state, "sharded-bin"),
    "bin-numbered": lambda path, state: write_without_index(path, state, "sharded-bin"),
    "both": write_both,
    "meta": lambda path, state: formats.write_meta(path, state, CONFIG, shards=4),
    "meta-one-file": lambda path, state: write_consolidated(path, state, "consolidated.pth"),
    "meta-safetensors": lambda path, state: write_consolidated(path, state, "consolidated.safetensors"),
    "original": write_original,
    "original-beside-hf-files": write_original_with_hf_files,
    "torchtune-meta": lambda path, state: formats.write_torchtune_meta(path, state, CONFIG, files=2),
    "torchtune-meta-0.5": write_torchtune_0_5,
    "torchtune-hf": lambda path, state: formats.write_torchtune_hf(path, state, CONFIG),
    "torchtune-bin": write_torchtune_bin,
    "torchtune-bin-numbered": write_torchtune_bin_without_index,
    "torchtune-old-hf": write_old_hf,
    "llama-stack": write_llama_stack,
    "trainer": write_trainer,
}
META = ("meta", "meta-one-file", "meta-safetensors", "torchtune-meta", "torchtune-meta-0.5", "llama-stack")
ORIGINAL = ("original", "original-beside-hf-files")
NOTES = {"both": ["model.safetensors is read, pytorch_model.bin beside it is not"], "llama-stack": ["is not applied"]}


def holds(checkpoint: Checkpoint, state: State) -> None:
    """Checks that the checkpoint's tensors are those of `state`, and that all are in files it names."""
    assert checkpoint.tensors.keys() == state.keys()
    for name, value in state.items():
        index = tuple(slice(0, size) for size in checkpoint.tensors[name].shape)
        assert torch.equal(checkpoint.read(name, index), value), name


def notes_are(checkpoint: Checkpoint, *parts: str) -> None:
    assert len(checkpoint.notes) == len(parts), checkpoint.notes
    for note, part in zip(checkpoint.notes, parts, strict=True):
        assert part in note
        assert "\n" not in note


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_the_model_it_holds(form: str, state: State, tmp_path: Path) -> None:
    FORMS[form](tmp_path, state)
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    notes_are(checkpoint, *NOTES.get(form, []))
    assert checkpoint.path == (tmp_path / "original" if form in ORIGINAL else tmp_path)
    assert checkpoint.base_path is None
    assert checkpoint.quantized == {}
    assert {name: checkpoint.fields[name] for name in CONFIG} == CONFIG
    assert all(file.is_file() and file.is_relative_to(tmp_path) for file in checkpoint.files)
    assert LlamaConfig.from_hf(checkpoint.fields).num_layers == 2


@pytest.mark.parametrize("form", FORMS)
def test_without_weights_the_config_is_enough(form: str, state: State, tmp_path: Path) -> None:
    FORMS[form](tmp_path, state)
    for file in tmp_path.rglob("*"):
        if file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json"):
            file.unlink()
    checkpoint = open_checkpoint(str(tmp_path), weights=False)
    assert (checkpoint.tensors, checkpoint.files) == ({}, ())
    assert {name: checkpoint.fields[name] for name in CONFIG} == CONFIG
    with pytest.raises(UserError, match=r"found no model in .* expected (weights beside|config)"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_without_weights_none_is_opened(form: str, state: State, tmp_path: Path) -> None:
    FORMS[form](tmp_path, state)
    for file in tmp_path.rglob("*"):
        if file.suffix in (".safetensors", ".bin", ".pt", ".pth"):
            file.write_bytes(b"")
    assert open_checkpoint(str(tmp_path), weights=False).fields["hidden_size"] == 64


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_that_is_a_link_is_its_target(form: str, state: State, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "target", state)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(tmp_path / "target")
    holds(open_checkpoint(str(link)), state)


@pytest.mark.parametrize("form", ["hf-index", "bin", "meta", "original", "torchtune-hf"])
def test_a_folder_that_cannot_be_written(form: str, state: State, tmp_path: Path) -> None:
    FORMS[form](tmp_path, state)
    for path in (*tmp_path.rglob("*"), tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(tmp_path.rglob("*"))
    holds(open_checkpoint(str(tmp_path)), state)
    assert sorted(tmp_path.rglob("*")) == before


def write_tokenizer(path: Path, vocabulary: str = "ab") -> None:
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(vocabulary)}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def num_tokens(checkpoint: Checkpoint) -> int:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    return len(tokenizer)


@pytest.mark.parametrize("weights", [True, False])
def test_the_original_s_tokenizer_is_hugging_face_s_where_there_is_one(
    state: State, tmp_path: Path, weights: bool
) -> None:
    write_original(tmp_path, state)
    assert open_checkpoint(str(tmp_path), weights).tokenizer() is None
    ranks = formats.write_tiktoken(tmp_path / "original" / "tokenizer.model")
    assert num_tokens(open_checkpoint(str(tmp_path), weights)) == len(ranks) + 256
    write_tokenizer(tmp_path)
    assert num_tokens(open_checkpoint(str(tmp_path), weights)) == 2


def test_hugging_face_s_form_is_preferred_to_the_original(state: State, tmp_path: Path) -> None:
    write_hf(tmp_path, state)
    write_original(tmp_path, {name: torch.zeros_like(value) for name, value in state.items()})
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    assert checkpoint.path == tmp_path


def test_what_is_not_read_need_not_be_whole(state: State, tmp_path: Path) -> None:
    """A download without *.bin still has their index."""
    write_hf(tmp_path, state)
    index = {"weight_map": {Q: "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    assert checkpoint.files == (tmp_path / "model.safetensors",)


# A base model lends what is missing.


@pytest.fixture
def base(tmp_path: Path, state: State) -> Path:
    path = tmp_path / "base"
    write_config(path, rope_theta=77.0, eos_token_id=[5, 6])
    write_layout(path, {name: value + 1 for name, value in state.items()}, "safetensors")
    write_tokenizer(path, "abc")
    return path


@pytest.mark.parametrize("form", ["torchtune-meta", "torchtune-hf", "torchtune-old-hf", "bin", "meta", "original"])
def test_the_base_lends_config_and_tokenizer(
    form: str, state: State, tmp_path: Path, base: Path, fails: Callable[..., None]
) -> None:
    path = tmp_path / "tuned"
    FORMS[form](path, state)
    for file in path.rglob("*"):
        if file.name == "tokenizer.model":
            file.unlink()
    checkpoint = open_checkpoint(str(path), base=str(base))
    assert checkpoint.fields.get("rope_theta") != 77.0
    assert num_tokens(checkpoint) == 3
    assert checkpoint.base_path == base
    if form == "original":
        return
    for config in ("config.json", "params.json"):
        (path / config).unlink(missing_ok=True)
    fails(lambda: open_checkpoint(str(path)), str(path), "--llama-model BASE")
    checkpoint = open_checkpoint(str(path), base=str(base))
    holds(checkpoint, state)
    assert checkpoint.fields["rope_theta"] == 77.0
    assert checkpoint.eos_token_ids == (5, 6)
    assert num_tokens(checkpoint) == 3
    write_tokenizer(path, "abcd")
    assert num_tokens(open_checkpoint(str(path), base=str(base))) == 4
    without = open_checkpoint(str(path), weights=False, base=str(base))
    assert (without.tensors, without.fields["rope_theta"]) == ({}, 77.0)


@pytest.mark.parametrize("weights", [True, False])
def test_the_base_s_tokenizer_serves_weights_made_up_too(
    state: State, tmp_path: Path, base: Path, weights: bool
) -> None:
    write_hf(tmp_path / "tuned", state)
    assert num_tokens(open_checkpoint(str(tmp_path / "tuned"), weights, str(base))) == 3


@pytest.mark.parametrize("form", ["hf", "meta", "original", "torchtune-hf"])
def test_a_base_that_is_not_needed_is_not_opened(form: str, state: State, tmp_path: Path) -> None:
    path = tmp_path / "tuned"
    FORMS[form](path, state)
    write_tokenizer(path)
    for weights in (True, False):
        checkpoint = open_checkpoint(str(path), weights, base=str(tmp_path / "none"))
        where = path / "original" if form == "original" else path
        note = f"{where} has config and tokenizer: --llama-model {tmp_path / 'none'} is not read"
        assert (checkpoint.notes, checkpoint.base_path) == ((note,), None)
        assert num_tokens(checkpoint) == 2


@pytest.mark.parametrize("form", ["hf", "meta", "torchtune-old-hf"])
def test_epochs_of_weights_alone_with_weights_made_up(
    form: str, state: State, tmp_path: Path, base: Path, fails: Any
) -> None:
    run = tmp_path / "run"
    for epoch in ("epoch_0", "epoch_1"):
        (run / epoch).mkdir(parents=True)
        FORMS[form](run / epoch, state)
        for config in ("config.json", "params.json"):
            (run / epoch / config).unlink(missing_ok=True)
    fails(lambda: open_checkpoint(str(run), weights=False), "no complete one")
    holds(open_checkpoint(str(run), base=str(base)), state)
    without = open_checkpoint(str(run), weights=False, base=str(base))
    assert (without.tensors, without.fields["rope_theta"], num_tokens(without)) == ({}, 77.0, 3)
    (run / "epoch_1" / "config.json").write_text("{")
    fails(lambda: open_checkpoint(str(run), weights=False, base=str(base)), "no complete one", "invalid JSON")


def test_an_old_meta_file_needs_the_base(state: State, tmp_path: Path, base: Path, fails: Any) -> None:
    path = tmp_path / "tuned"
    path.mkdir()
    for epoch, factor in ((2, 1), (10, 0), (9, 1)):
        zeros_or_state = {name: value * (1 - factor) for name, value in state.items()}
        torch.save(formats.meta_state(zeros_or_state, CONFIG), path / f"meta_model_{epoch}.pt")
    fails(lambda: open_checkpoint(str(path)), str(path), "params.json", "--llama-model BASE")
    checkpoint = open_checkpoint(str(path), base=str(base))
    holds(checkpoint, state)
    assert checkpoint.files == (path / "meta_model_10.pt",)
    notes_are(checkpoint, "of 3 epochs")


@pytest.mark.parametrize("weights", [True, False])
def test_a_base_that_is_not_there(state: State, tmp_path: Path, fails: Any, weights: bool) -> None:
    write_hf(tmp_path, state)
    fails(lambda: open_checkpoint(str(tmp_path), weights, base=str(tmp_path / "none")), str(tmp_path / "none"))


# Adapters.


def write_adapter(path: Path, base: str | None, name: str = "adapter_model.safetensors") -> None:
    path.mkdir(parents=True, exist_ok=True)
    key = f"base_model.model.{Q.removesuffix('.weight')}"
    factors = {f"{key}.lora_A.weight": torch.ones(2, 64), f"{key}.lora_B.weight": torch.ones(64, 2)}
    save_file(factors, path / name) if name.endswith("safetensors") else torch.save(factors, path / name)
    config = {"r": 2, "lora_alpha": 2} | ({"base_model_name_or_path": base} if base else {})
    (path / "adapter_config.json").write_text(json.dumps(config))


def is_adapted(checkpoint: Checkpoint, state: State) -> None:
    """Checks that the checkpoint is `state` with write_adapter's adapter, which adds 2 to all of Q."""
    index = tuple(slice(0, size) for size in state[Q].shape)
    assert torch.equal(checkpoint.read(Q, index), state[Q].float() + 2)
    other = Q.replace("q_proj", "k_proj")
    index = tuple(slice(0, size) for size in state[other].shape)
    assert torch.equal(checkpoint.read(other, index), state[other])


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter/adapter.pth"])
def test_an_adapter_is_merged_into_its_base(state: State, tmp_path: Path, base: Path, name: str, given: bool) -> None:
    plus_one = {name: value + 1 for name, value in state.items()}
    path = tmp_path / "adapter_run"
    write_adapter((path / name).parent, None if given else str(base), Path(name).name)
    checkpoint = open_checkpoint(str(path), base=str(base) if given else None)
    is_adapted(checkpoint, plus_one)
    assert checkpoint.base_path == base
    assert num_tokens(checkpoint) == 3
    notes_are(checkpoint, "merged LoRA adapter")
    write_tokenizer(path, "abcd")
    assert num_tokens(open_checkpoint(str(path), base=str(base))) == 4
    without = open_checkpoint(str(path), weights=False, base=str(base) if given else None)
    assert (without.tensors, without.fields["rope_theta"], without.base_path) == ({}, 77.0, base)
    assert num_tokens(without) == 4


def test_the_given_base_goes_before_the_named_one(state: State, tmp_path: Path, base: Path) -> None:
    write_adapter(tmp_path / "adapter", str(tmp_path / "none"))
    is_adapted(open_checkpoint(str(tmp_path / "adapter"), base=str(base)), {n: v + 1 for n, v in state.items()})


@pytest.mark.parametrize("weights", [True, False])
def test_an_adapter_without_a_base(tmp_path: Path, fails: Any, weights: bool) -> None:
    write_adapter(tmp_path / "adapter", None)
    fails(lambda: open_checkpoint(str(tmp_path / "adapter"), weights), "--llama-model BASE", str(tmp_path))
    write_adapter(tmp_path / "adapter", str(tmp_path / "none"))
    fails(
        lambda: open_checkpoint(str(tmp_path / "adapter"), weights),
        "--llama-model BASE", str(tmp_path / "none"), str(tmp_path / "adapter"),
    )  # fmt: skip


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("with_config", [True, False])
def test_adapters_whose_bases_are_adapters(
    state: State, tmp_path: Path, fails: Any, weights: bool, with_config: bool
) -> None:
    """Two that name each other, one that names itself, one that names the run it belongs to."""
    for name, named in (("a", "b"), ("b", "a"), ("c", "c"), ("run/epoch_0", "run")):
        write_adapter(tmp_path / name, str(tmp_path / named))
        if with_config and weights:
            write_config(tmp_path / name)
    for name in ("a", "b", "c", "run"):
        fails(lambda name=name: open_checkpoint(str(tmp_path / name), weights), "no whole model", "--llama-model BASE")
    write_hf(tmp_path / "base", state)
    is_adapted(open_checkpoint(str(tmp_path / "a"), base=str(tmp_path / "base")), state)


def test_a_base_of_meta_s(state: State, tmp_path: Path) -> None:
    write_original(tmp_path / "base", state)
    write_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    is_adapted(open_checkpoint(str(tmp_path / "adapter")), state)
    assert open_checkpoint(str(tmp_path / "adapter"), weights=False).fields["hidden_size"] == 64


# Folders of several epochs.


@pytest.mark.parametrize("prefix", ["epoch_", "step_", "checkpoint-", "Llama3.2-3B-Instruct-sft-"])
def test_the_newest_epoch(state: State, tmp_path: Path, prefix: str) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    for number in (1, 9, 10):
        write_hf(tmp_path / f"{prefix}{number}", state if number == 10 else zeros)
    (tmp_path / "epoch_last").mkdir()
    (tmp_path / "epoch_11").write_text("no folder")
    (tmp_path / "logs").mkdir()
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    notes_are(checkpoint, f"of 3 epochs in {tmp_path}, {prefix}10 is the newest complete one")
    assert open_checkpoint(str(tmp_path), weights=False).path == tmp_path / f"{prefix}10"


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ORIGINAL])
def test_an_epoch_of_every_form(form: str, state: State, tmp_path: Path) -> None:
    epoch = tmp_path / "epoch_0"
    epoch.mkdir()
    FORMS[form](epoch, state)
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    notes_are(checkpoint, "epoch_0 is the newest", *NOTES.get(form, []))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_incomplete_epochs_are_skipped_with_the_reason(state: State, tmp_path: Path, fails: Any) -> None:
    write_hf(tmp_path / "epoch_1", state)
    (tmp_path / "epoch_2").mkdir()
    write_hf(tmp_path / "epoch_3", state, "sharded-safetensors")
    (tmp_path / "epoch_3" / "model-00002-of-00002.safetensors").unlink()
    write_without_index(tmp_path / "epoch_4", state, "sharded-bin")
    (tmp_path / "epoch_4" / "pytorch_model-00001-of-00002.bin").unlink()
    write_hf(tmp_path / "epoch_5", state)
    truncate(tmp_path / "epoch_5" / "model.safetensors")
    truncate(formats.write_torchtune_meta(tmp_path / "epoch_6", state, CONFIG)[0])
    write_config(tmp_path / "epoch_7")
    write_hf(tmp_path / "epoch_8", state)
    (tmp_path / "epoch_8" / "config.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    write_hf(tmp_path / "elsewhere" / "model", state)
    (tmp_path / "epoch_9").symlink_to(tmp_path / "elsewhere" / "model")
    write_hf(tmp_path / "epoch_10", state)
    (tmp_path / "epoch_10" / "model.safetensors").write_bytes(b"")
    write_hf(tmp_path / "epoch_11", state)
    (tmp_path / "epoch_11" / "config.json").write_text("{")
    (tmp_path / "epoch_12" / "model.safetensors").mkdir(parents=True)
    reasons = [
        *("skipped epoch_12: no model in it (it holds model.safetensors/)", "skipped epoch_11: found invalid JSON"),
        *("skipped epoch_10: found a damaged", "skipped epoch_8: found weights but no config.json"),
        *("skipped epoch_7: no model in it (it holds config.json)", "skipped epoch_6: found a damaged"),
        *("skipped epoch_5: found a damaged", "skipped epoch_4: found 1 of 2 weight files"),
        *("skipped epoch_3: found no file", "skipped epoch_2: no model in it (it is empty)"),
    ]
    # A link to a folder inside is none that leads out.
    holds(open_checkpoint(str(tmp_path)), state)
    (tmp_path / "epoch_9").unlink()
    checkpoint = open_checkpoint(str(tmp_path))
    holds(checkpoint, state)
    notes_are(checkpoint, *reasons, "of 11 epochs in")
    assert checkpoint.path == tmp_path / "epoch_1"
    shutil.rmtree(tmp_path / "epoch_1")
    fails(lambda: open_checkpoint(str(tmp_path)), "found 10 epochs", *reasons)


def test_an_epoch_that_leads_out_of_the_folder(state: State, tmp_path: Path) -> None:
    write_hf(tmp_path / "secret", state)
    write_hf(tmp_path / "run" / "epoch_0", state)
    (tmp_path / "run" / "epoch_1").symlink_to(tmp_path / "secret")
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    notes_are(checkpoint, "skipped epoch_1: found", "epoch_0 is the newest")
    assert checkpoint.path.name == "epoch_0"


def test_a_whole_model_beside_epochs_is_the_model(state: State, tmp_path: Path) -> None:
    write_hf(tmp_path, state)
    write_hf(tmp_path / "checkpoint-5", {name: torch.zeros_like(value) for name, value in state.items()})
    holds(open_checkpoint(str(tmp_path)), state)


def test_epochs_beside_an_original_without_weights(state: State, tmp_path: Path) -> None:
    formats.write_torchtune_hf(tmp_path, state, CONFIG)
    for file in tmp_path.iterdir():
        if file.is_file():
            file.unlink()
    write_hf(tmp_path / "epoch_0", state)
    holds(open_checkpoint(str(tmp_path)), state)


@pytest.mark.parametrize("weights", [True, False])
def test_several_runs_in_one_folder(state: State, tmp_path: Path, fails: Any, weights: bool) -> None:
    for name in ("a-sft-0", "b-sft-1", "epoch_0"):
        write_hf(tmp_path / name, state)
    fails(lambda: open_checkpoint(str(tmp_path), weights), str(tmp_path), "a-sft-N, b-sft-N, epoch_N")


# Nothing, and what can't be read.


def test_an_adapter_beside_nothing_else_leads_nowhere_outside(state: State, tmp_path: Path, fails: Any) -> None:
    write_hf(tmp_path / "base", state)
    write_adapter(tmp_path / "elsewhere", str(tmp_path / "base"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(tmp_path / "elsewhere")
    fails(lambda: open_checkpoint(str(tmp_path / "run")), str(tmp_path / "run" / "adapter"), "linked to")


def test_an_empty_folder_and_one_of_other_things(tmp_path: Path, fails: Any) -> None:
    fails(lambda: open_checkpoint(str(tmp_path)), str(tmp_path), "it is empty")
    fails(lambda: open_checkpoint(str(tmp_path), weights=False), str(tmp_path), "it is empty")
    for number in range(11):
        (tmp_path / f"{number:02d}.dat").write_text("")
    (tmp_path / "00\n.dat").write_text("")
    fails(lambda: open_checkpoint(str(tmp_path)), "'00\\n.dat'", "and 4 more")


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that a user without rights can enter, and the test run as that user."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def when_unprivileged(action: Callable[[], object]) -> object:
    """Runs `action` as a user who is not root."""
    if os.geteuid() != 0:
        return action()
    os.seteuid(65534)
    try:
        return action()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("weights", [True, False])
def test_a_folder_without_permission(state: State, as_nobody: Path, fails: Any, weights: bool) -> None:
    path = as_nobody / "model"
    write_hf(path, state)
    open_checkpoint(str(path), weights).tokenizer()  # imports what is needed, as who may read it
    for mode in (0o000, 0o644):
        path.chmod(mode)
        when_unprivileged(lambda: fails(lambda: open_checkpoint(str(path), weights), str(path), "permission"))
    path.chmod(0o755)


@pytest.mark.parametrize("form", ["hf", "hf-index", "bin", "bin-legacy", "meta", "original"])
def test_files_without_permission(state: State, as_nobody: Path, fails: Any, form: str) -> None:
    FORMS[form](as_nobody / "model", state)
    open_checkpoint(str(as_nobody / "model"))
    for file in (as_nobody / "model").rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    for file in (as_nobody / "model").rglob("*"):
        if file.is_file():
            file.chmod(0o000)
            action = partial(open_checkpoint, str(as_nobody / "model"))
            when_unprivileged(partial(fails, action, str(file), "unreadable (Permission denied)"))
            file.chmod(0o644)


def test_an_epoch_without_permission_is_skipped(state: State, as_nobody: Path) -> None:
    for epoch in ("epoch_0", "epoch_1"):
        write_hf(as_nobody / epoch, state)
    open_checkpoint(str(as_nobody))
    (as_nobody / "epoch_0" / "model.safetensors").chmod(0o644)
    (as_nobody / "epoch_1").chmod(0o000)
    checkpoint = when_unprivileged(lambda: open_checkpoint(str(as_nobody)))
    assert isinstance(checkpoint.notes, tuple)  # type: ignore[attr-defined]
    notes_are(checkpoint, "skipped epoch_1: ", "epoch_0 is the newest")  # type: ignore[arg-type]
