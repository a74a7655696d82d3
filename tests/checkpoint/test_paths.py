"""A checkpoint reads no file outside its directory: not by links, not by names in its index or manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from tpllama.checkpoint.paths import check_inside, file_named_in
from tpllama.checkpoint.weight_set import find_weights

State = dict[str, torch.Tensor]
NAMES = ["../a.json", "/etc/hostname", "part/../../a.json", "..", ".", "", "..\\a.json", "part\\a.json", "a\0.json"]
NAMES += ["a\n.json", "x" * 300, "\ud800", "part/" * 100 + "a.json"]


def write_hf(path: Path, state: State) -> None:
    """Every small file that a model can have, and weights in shards."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages }}").save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    for name, content in {
        "generation_config.json": {"eos_token_id": 3}, "special_tokens_map.json": {}, "added_tokens.json": {},
    }.items():  # fmt: skip
        (path / name).write_text(json.dumps(content))
    write_layout(path, state, "sharded-safetensors")


def write_bin(path: Path, state: State) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    write_layout(path, state, "sharded-bin")


def write_meta(path: Path, state: State) -> None:
    formats.write_meta(path, state, CONFIG, shards=2)
    formats.write_tiktoken(path / "tokenizer.model")


def write_original(path: Path, state: State) -> None:
    write_meta(path / "original", state)


def write_adapter(path: Path, state: State) -> None:
    write_hf(path.parent / "base", state)
    path.mkdir()
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{key}.lora_A.weight": torch.ones(2, 64), f"{key}.lora_B.weight": torch.ones(64, 2)}
    save_file(factors, path / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 2, "base_model_name_or_path": str(path.parent / "base")}
    (path / "adapter_config.json").write_text(json.dumps(config))


def write_epoch(path: Path, state: State) -> None:
    write_hf(path / "epoch_0", state)


WRITERS: dict[str, Callable[[Path, State], None]] = {
    "hf": write_hf,
    "bin": write_bin,
    "meta": write_meta,
    "original": write_original,
    "adapter": write_adapter,
    "epoch": write_epoch,
}


def open_all(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(path))
    checkpoint.tokenizer()
    return checkpoint


@pytest.mark.parametrize("form", WRITERS)
def test_a_link_out_of_the_directory_is_refused_for_every_file(
    state: State, tmp_path: Path, fails: Any, form: str
) -> None:
    path, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    WRITERS[form](path, state)
    open_all(path)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) >= {"hf": 10, "epoch": 10, "adapter": 2}.get(form, 4)
    for file in files:
        target = elsewhere / file.name
        file.rename(target)
        file.symlink_to(target)
        fails(lambda: open_all(path), str(file), f"linked to {target}")
        file.unlink()
        target.rename(file)
    open_all(path)


@pytest.mark.parametrize("form", WRITERS)
def test_a_link_out_of_the_directory_is_refused_without_weights(
    state: State, tmp_path: Path, fails: Any, form: str
) -> None:
    path, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    WRITERS[form](path, state)
    for file in [file for file in path.rglob("*") if file.suffix in (".json", ".jinja", ".model")]:
        target = elsewhere / file.name
        file.rename(target)
        file.symlink_to(target)
        fails(lambda: open_checkpoint(str(path), weights=False), str(file), f"linked to {target}")
        file.unlink()
        target.rename(file)


@pytest.mark.parametrize("folder", ["original", "adapter", "epoch_0"])
def test_a_folder_that_leads_out_of_the_directory(state: State, tmp_path: Path, fails: Any, folder: str) -> None:
    form = {"original": "meta", "adapter": "adapter", "epoch_0": "hf"}[folder]
    WRITERS[form](tmp_path / "elsewhere" / "model", state) if form != "adapter" else (
        (tmp_path / "elsewhere").mkdir(), write_adapter(tmp_path / "elsewhere" / "model", state)
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folder).symlink_to(tmp_path / "elsewhere" / "model")
    for weights in (True, False) if folder != "adapter" else (True,):
        fails(lambda weights=weights: open_checkpoint(str(tmp_path / "run"), weights), "linked to")


def test_links_within_the_directory_are_followed(state: State, tmp_path: Path) -> None:
    write_hf(tmp_path, state)
    (tmp_path / "store").mkdir()
    for file in [file for file in tmp_path.iterdir() if file.is_file()]:
        file.rename(tmp_path / "store" / file.name)
        file.symlink_to(f"store/{file.name}")
    assert open_all(tmp_path).tensors.keys() == state.keys()


def test_a_directory_given_as_a_link(state: State, tmp_path: Path) -> None:
    write_hf(tmp_path / "a" / "model", state)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a" / "model")
    assert open_all(tmp_path / "b" / "link").tensors.keys() == state.keys()


# The hub's cache, in which every file is a link.


def cache(path: Path, name: str, state: State, writer: Callable[[Path, State], None]) -> Path:
    """A snapshot as huggingface_hub lays it out."""
    repository = path / f"models--org--{name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    writer(snapshot, state)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        file.rename(blob)
        ups = "../" * len(file.relative_to(repository).parent.parts)
        file.symlink_to(f"{ups}blobs/{blob.name}")
    return snapshot


@pytest.mark.parametrize("form", ["hf", "bin", "meta", "original"])
def test_the_hub_cache_s_links_are_followed(state: State, tmp_path: Path, form: str) -> None:
    snapshot = cache(tmp_path, "a", state, WRITERS[form])
    assert open_all(snapshot).tensors.keys() == state.keys()
    (tmp_path / "link").symlink_to(snapshot)
    assert open_all(tmp_path / "link").tensors.keys() == state.keys()


@pytest.mark.parametrize("form", ["hf", "meta"])
def test_another_repository_s_blobs_are_not(state: State, tmp_path: Path, fails: Any, form: str) -> None:
    first, second = (cache(tmp_path, name, state, WRITERS[form]) for name in ("a", "b"))
    for file in sorted(first.iterdir()):
        own, other = file.readlink(), (second / file.name).resolve()
        file.unlink()
        file.symlink_to(other)
        fails(lambda: open_all(first), str(file), str(other))
        file.unlink()
        file.symlink_to(own)
    open_all(first)


@pytest.mark.parametrize("target", ["refs/a", "blobs/part/a", "snapshots/1/a", "a", "../a"])
def test_in_a_repository_only_blobs_are_outside_the_snapshot(tmp_path: Path, fails: Any, target: str) -> None:
    repository = tmp_path / "models--org--a"
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (repository / target).parent.mkdir(parents=True, exist_ok=True)
    (repository / target).write_text("")
    (snapshot / "a").symlink_to(repository / target)
    fails(lambda: check_inside(snapshot / "a"), str(snapshot / "a"))


def test_a_folder_called_snapshots_is_no_cache(tmp_path: Path, fails: Any) -> None:
    for folder in ("a/snapshots/0", "a/blobs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a/blobs/x").write_text("")
    (tmp_path / "a/snapshots/0/x").symlink_to(tmp_path / "a/blobs/x")
    fails(lambda: check_inside(tmp_path / "a/snapshots/0/x"), "linked to")


def test_another_folder_of_a_repository_is_no_snapshot(tmp_path: Path, fails: Any) -> None:
    (tmp_path / "models--org--a" / "blobs").mkdir(parents=True)
    (tmp_path / "models--org--a" / "blobs" / "x").write_text("")
    for folder in ("other/0", "refs/snapshots"):
        link = tmp_path / "models--org--a" / folder / "x"
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "models--org--a" / "blobs" / "x")
        fails(lambda link=link: check_inside(link), "linked to")


def test_the_index_alone_is_not_read_through_a_link(tmp_path: Path, fails: Any) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.json").write_text('{"weight_map": {"a": "b"}}')
    link = tmp_path / "model" / "model.safetensors.index.json"
    link.symlink_to(tmp_path / "secret.json")
    fails(lambda: find_weights(tmp_path / "model"), str(link), "linked to")


def test_links_in_a_circle_lead_nowhere(tmp_path: Path, fails: Any) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    fails(lambda: check_inside(tmp_path / "a"), str(tmp_path / "a"))


# Names that files say.


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(tmp_path: Path, fails: Any, name: str) -> None:
    (tmp_path / "model" / "part").mkdir(parents=True)
    (tmp_path / "a.json").write_text("")
    index = tmp_path / "model" / "index.json"
    for file in ("..\\a.json", "part\\a.json"):
        (tmp_path / "model" / file).write_text("")  # a name like others here, of a folder on other systems
    fails(lambda: file_named_in(index, name), str(index.parent), "index.json")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "manifest"])
def test_an_index_or_manifest_that_leads_elsewhere(
    state: State, tmp_path: Path, fails: Any, name: str, file: str
) -> None:
    path = tmp_path / "model"
    (write_bin if "bin" in file else write_hf)(path, state)
    open_checkpoint(str(path))
    if file == "manifest":
        content: dict[str, Any] = {"version": 1, "files": {name: {"bytes": 1}}}
        (path / "tpllama_manifest.json").write_text(json.dumps(content))
    else:
        weight_map = json.loads((path / file).read_text())["weight_map"]
        (path / file).write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": name}}))
    fails(lambda: open_checkpoint(str(path)), "manifest" if file == "manifest" else file)


def test_an_index_leads_through_no_link(state: State, tmp_path: Path, fails: Any) -> None:
    """A folder in the directory may be a link, and a file in that folder lies beside its link's target."""
    path = tmp_path / "model"
    write_hf(path, state)
    (tmp_path / "elsewhere").mkdir()
    (path / "part").symlink_to(tmp_path / "elsewhere")
    shard = "model-00001-of-00002.safetensors"
    shutil.move(path / shard, tmp_path / "elsewhere" / shard)
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard, f"part/{shard}"))
    fails(lambda: open_checkpoint(str(path)), f"part/{shard}", str(tmp_path / "elsewhere"))
    (path / "part").unlink()
    shutil.move(tmp_path / "elsewhere", path / "part")
    assert open_checkpoint(str(path)).tensors.keys() == state.keys()
