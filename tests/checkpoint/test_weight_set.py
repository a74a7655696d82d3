"""Which files are a directory's weights: by name alone, all of one save, or an error that names the files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import formats
from checkpoint.conftest import SIZES as CONFIG
from checkpoint.conftest import write_layout
from safetensors.torch import save_file

from tpllama.checkpoint.open import open_checkpoint
from tpllama.checkpoint.weight_set import find_weights, read_json

State = dict[str, torch.Tensor]
HF_STATE = {"model.norm.weight": torch.ones(2)}
META_STATE = {"norm.weight": torch.ones(2)}


def touch(path: Path, *names: str) -> None:
    """Makes empty files; torchtune's .bin files, which are opened to tell their form, with Meta's names."""
    for name in names:
        if name.startswith(("model-", "ft-model-")) and name.endswith(".bin"):
            torch.save(META_STATE, path / name)
        else:
            (path / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("names", "form", "files"),
    [
        (["model.safetensors"], "huggingface", [0]),
        (["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"], "huggingface", [1, 0]),
        (["pytorch_model.bin"], "huggingface", [0]),
        (["pytorch_model-00001-of-00001.bin"], "huggingface", [0]),
        (["consolidated.pth"], "meta", [0]),
        (["consolidated.safetensors"], "meta", [0]),
        (["consolidated.01.pth", "consolidated.00.pth"], "meta", [1, 0]),
        ([f"consolidated.{number}.pth" for number in range(12)], "meta", list(range(12))),
        (["model-00001-of-00002.bin", "model-00002-of-00002.bin"], "meta", [0, 1]),
        (["ft-model-00001-of-00001.bin"], "meta", [0]),
        (["ft-model-00002-of-00002.safetensors", "ft-model-00001-of-00002.safetensors"], "huggingface", [1, 0]),
        (["meta_model_0.pt"], "meta", [0]),
        (["hf_model_0001_0.pt", "hf_model_0002_0.pt"], "huggingface", [0, 1]),
        (["hf_model_0002_9.pt", "hf_model_0001_10.pt", "hf_model_0001_9.pt"], "huggingface", [1]),
        (["hf_model_0001_0.safetensors"], "huggingface", [0]),
        (["model.safetensors", "optimizer.bin", "training_args.bin", "rng_state.pth", "a.pt"], "huggingface", [0]),
        (["model.safetensors", "adapter_model.safetensors", "adapter_0.pt"], "huggingface", [0]),
    ],
)
def test_the_files_of_each_form(tmp_path: Path, names: list[str], form: str, files: list[int]) -> None:
    touch(tmp_path, *names)
    found = find_weights(tmp_path)
    assert found is not None
    assert (found.form, found.weight_map) == (form, None)
    assert found.files == tuple(tmp_path / names[place] for place in files)


@pytest.mark.parametrize("state", [HF_STATE, META_STATE])
def test_the_tensors_tell_the_form_of_torchtune_s_bin(tmp_path: Path, state: State) -> None:
    torch.save(state, tmp_path / "model-00001-of-00001.bin")
    found = find_weights(tmp_path)
    assert found is not None
    assert found.form == ("meta" if state is META_STATE else "huggingface")


@pytest.mark.parametrize(
    "names",
    [[], ["model.bin", "weights.safetensors", "consolidated.0x.pth", "hf_model_0.pt", "meta_model.pt", "x.pth"]],
)
def test_no_weights(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *names)
    assert find_weights(tmp_path) is None
    assert find_weights(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["model.safetensors", "consolidated.00.pth"], ["more than one form"]),
        (["pytorch_model.bin", "consolidated.pth"], ["more than one form"]),
        (["model.safetensors", "meta_model_0.pt"], ["more than one form"]),
        (["model.safetensors", "model-00001-of-00001.bin"], ["more than one form"]),
        (["consolidated.00.pth", "model-00001-of-00001.bin"], ["more than one form"]),
        (["meta_model_0.pt", "hf_model_0001_0.pt"], ["more than one form"]),
        (["consolidated.pth", "consolidated.00.pth"], ["files of one model"]),
        (["consolidated.pth", "consolidated.safetensors"], ["files of one model"]),
        (["model.safetensors", "model-00001-of-00001.safetensors"], ["expected one, remove the other"]),
        (["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"], ["expected one, remove the other"]),
        # Of two saves.
        (["model-00001-of-00002.safetensors", "model-00001-of-00001.safetensors"], ["shards of one save"]),
        (["model-00001-of-00001.bin", "model-00002-of-00002.bin"], ["shards of one save"]),
        (["model-00001-of-00001.bin", "ft-model-00001-of-00001.bin"], ["numbers 1 to 1 once each"]),
        (["model-00001-of-00001.safetensors", "ft-model-00001-of-00001.safetensors"], ["numbers 1 to 1 once each"]),
        (["ft-model-00001-of-00002.safetensors"], ["1 of 2 weight files", "number 2 is missing"]),
        # Twice and never.
        (["model-00001-of-00002.safetensors", "model-1-of-2.safetensors"], ["number 2 is missing"]),
        (["model-00001-of-00001.safetensors", "model-1-of-1.safetensors"], ["numbers 1 to 1 once each"]),
        (["model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors"], ["numbers 1 to 1 once each"]),
        (["consolidated.00.pth", "consolidated.0.pth"], ["numbers 0 to 0 once each"]),
        (["model-00002-of-00002.safetensors"], ["1 of 2 weight files", "number 1 is missing"]),
        (["pytorch_model-00001-of-00003.bin", "pytorch_model-00003-of-00003.bin"], ["2 of 3", "number 2 is missing"]),
        (["model-00001-of-00002.bin"], ["1 of 2 weight files", "number 2 is missing"]),
        (["consolidated.01.pth"], ["1 of 2 weight files", "number 0 is missing"]),
        (["consolidated.00.pth", "consolidated.02.pth"], ["2 of 3 weight files", "number 1 is missing"]),
        (["hf_model_0001_0.pt", "hf_model_0003_0.pt"], ["2 of 3 weight files", "number 2 is missing"]),
        (["hf_model_0002_1.pt", "hf_model_0001_0.pt"], ["1 of 2 weight files", "number 1 is missing"]),
        (["hf_model_0001_0.pt", "hf_model_0001_0.safetensors"], ["numbers 1 to 1 once each"]),
        (["meta_model_1.pt", "meta_model_01.pt"], ["numbers 1 to 1 once each"]),
        # Numbers of any size cost nothing.
        ([f"model-1-of-{10**40}.safetensors"], ["number 2 is missing"]),
        ([f"consolidated.{10**40}.pth"], ["number 0 is missing"]),
        ([f"hf_model_{10**40}_0.pt"], ["number 1 is missing"]),
    ],
)
def test_what_is_unclear_or_missing(tmp_path: Path, fails: Any, names: list[str], parts: list[str]) -> None:
    touch(tmp_path, *names)
    start = time.monotonic()
    fails(lambda: find_weights(tmp_path), str(tmp_path), *parts)
    assert time.monotonic() - start < 1


def write_index(path: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    (path / name).write_text(json.dumps({"weight_map": weight_map}))
    return path / name


def test_an_index_says_the_files(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    touch(tmp_path, "b.safetensors", "part/a.safetensors", "unnamed.safetensors")
    write_index(tmp_path, {"x": "part/a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    found = find_weights(tmp_path)
    assert found is not None
    a, b = tmp_path / "part" / "a.safetensors", tmp_path / "b.safetensors"
    assert (found.form, found.files, found.weight_map) == ("huggingface", (b, a), {"x": a, "y": b, "z": b})


@pytest.mark.parametrize("count", [1, 5])
def test_shards_that_the_index_does_not_name_are_noted(tmp_path: Path, count: int) -> None:
    stale = [f"model-0000{number}-of-00009.safetensors" for number in range(1, count + 1)]
    touch(tmp_path, "ft-model-00001-of-00001.safetensors", "pytorch_model.bin", *stale)
    write_index(tmp_path, {"x": "ft-model-00001-of-00001.safetensors"})
    found = find_weights(tmp_path)
    assert found is not None
    assert found.files == (tmp_path / "ft-model-00001-of-00001.safetensors",)
    named = ", ".join(stale[:3]) + ", ..." * (count > 3)
    assert found.notes == (
        f"{named}, not named by model.safetensors.index.json in {tmp_path}: not read",
        "ft-model-00001-of-00001.safetensors is read, pytorch_model.bin beside it is not",
    )


def test_an_index_that_names_the_whole_file(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    write_index(tmp_path, {"x": "model.safetensors"})
    found = find_weights(tmp_path)
    assert found is not None
    assert found.files == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(("whole", "shard"), [("model.safetensors", "a.safetensors"), ("pytorch_model.bin", "a.bin")])
def test_a_whole_file_beside_an_index_of_others(tmp_path: Path, fails: Any, whole: str, shard: str) -> None:
    touch(tmp_path, whole, shard)
    write_index(tmp_path, {"x": shard}, f"{whole}.index.json")
    fails(lambda: find_weights(tmp_path), str(tmp_path), f"{whole}.index.json", "names other files")


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, {"x": 1}, {"x": None}, {"x": ["a"]}, {"a\nb": "a.safetensors"}, {"x": "a.bin"}]
)
def test_an_index_that_says_nothing(tmp_path: Path, fails: Any, weight_map: Any) -> None:
    touch(tmp_path, "a.safetensors", "a.bin")
    fails(lambda: find_weights(tmp_path), str(write_index(tmp_path, weight_map)))


def test_an_index_names_a_shard_of_another_kind(tmp_path: Path, fails: Any) -> None:
    touch(tmp_path, "model-00001-of-00001.bin", "consolidated.00.pth")
    write_index(tmp_path, {"x": "model-00001-of-00001.bin"}, "pytorch_model.bin.index.json")
    fails(lambda: find_weights(tmp_path), str(tmp_path), "more than one form")


def test_safetensors_go_before_bin_with_a_note(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00001.safetensors", "pytorch_model.bin")
    found = find_weights(tmp_path)
    assert found is not None
    assert found.files == (tmp_path / "model-00001-of-00001.safetensors",)
    assert found.notes == ("model-00001-of-00001.safetensors is read, pytorch_model.bin beside it is not",)


@pytest.mark.parametrize("broken", ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"])
def test_bin_files_that_are_not_read_may_be_incomplete(tmp_path: Path, fails: Any, broken: str) -> None:
    touch(tmp_path, broken)
    fails(lambda: find_weights(tmp_path), str(tmp_path))
    touch(tmp_path, "model.safetensors")
    found = find_weights(tmp_path)
    assert found is not None
    assert found.files == (tmp_path / "model.safetensors",)


def test_safetensors_that_are_incomplete_are_not_passed_over(tmp_path: Path, fails: Any) -> None:
    touch(tmp_path, "model-00001-of-00002.safetensors", "pytorch_model.bin")
    fails(lambda: find_weights(tmp_path), str(tmp_path), "number 2 is missing")


def test_old_files_of_several_epochs(tmp_path: Path) -> None:
    touch(tmp_path, "hf_model_0001_9.pt", "hf_model_0001_10.pt", "hf_model_0002_10.pt")
    found = find_weights(tmp_path)
    assert found is not None
    assert found.notes == (f"of 2 epochs in {tmp_path}, 10 is the newest: hf_model_0001_10.pt, hf_model_0002_10.pt",)


@pytest.mark.parametrize("layout", ["sharded-safetensors", "sharded-bin"])
def test_a_tensor_in_two_files(tmp_path: Path, tiny_state: State, fails: Any, layout: str) -> None:
    """Without an index it is unclear which is meant; with one it isn't."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    write_layout(tmp_path, tiny_state, layout)
    index = next(tmp_path.glob("*.index.json"))
    first, second = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    named = dict(list(tiny_state.items())[1::2])
    twice = next(iter(tiny_state))
    content = named | {twice: torch.zeros_like(tiny_state[twice])}
    save_file(content, tmp_path / second) if "safetensors" in layout else torch.save(content, tmp_path / second)
    checkpoint = open_checkpoint(str(tmp_path))
    index_of_all = tuple(slice(0, size) for size in tiny_state[twice].shape)
    assert torch.equal(checkpoint.read(twice, index_of_all), tiny_state[twice])
    index.unlink()
    fails(lambda: open_checkpoint(str(tmp_path)), twice, first, second, str(tmp_path), "remove the duplicate")


def test_a_tensor_in_two_old_files(tmp_path: Path, fails: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    for number in (1, 2):
        torch.save(HF_STATE, tmp_path / f"hf_model_000{number}_0.pt")
    fails(lambda: open_checkpoint(str(tmp_path)), "model.norm.weight", "hf_model_0001_0.pt", "hf_model_0002_0.pt")


# Entries that have a weight file's name and are none.

ENTRIES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "broken-link": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.write_bytes(b""),
}
NAMES = (
    *("model.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin", "consolidated.00.pth"),
    *("consolidated.pth", "model-00001-of-00001.bin", "meta_model_0.pt", "adapter_model.safetensors"),
    *("model.safetensors.index.json", "config.json", "params.json"),
)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", NAMES)
def test_entries_that_are_no_weights(tmp_path: Path, fails: Any, entry: str, name: str) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    if name != "params.json":
        (tmp_path / "params.json").write_text(json.dumps(formats.meta_params(CONFIG)))
    ENTRIES[entry](tmp_path / name)
    is_empty_adapter = (entry, name) == ("empty", "adapter_model.safetensors")  # its base is asked for first
    fails(lambda: open_checkpoint(str(tmp_path)), str(tmp_path), "LoRA" if is_empty_adapter else name)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe\xff", b"[" * 100000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_json_that_is_no_object(tmp_path: Path, fails: Any, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    fails(lambda: read_json(tmp_path / "a.json"), str(tmp_path / "a.json"))
    fails(lambda: read_json(tmp_path / "none.json"), str(tmp_path / "none.json"), "No such file")
