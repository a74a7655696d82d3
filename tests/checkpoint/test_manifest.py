"""What becomes of a damaged or tampered quantized checkpoint: one clear error, or the weights that were written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from saving import MIXED, assert_equal_weights, quantize_to, weights_of
from torch import Tensor

from tpllama.checkpoint.manifest import MANIFEST
from tpllama.config import UserError

Fails = Callable[..., None]
Weights = dict[str, dict[str, Tensor]]
INDEX = "model.safetensors.index.json"
ONE_LINE = r"^found [^\n]*$"
UP = "model.layers.0.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def written(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several shards with weights of every class."""
    model = make_checkpoint(num_hidden_layers=1, vocab_size=64)
    return quantize_to(tmp_path_factory.mktemp("written") / "out", model, MIXED, shard_bytes=40_000)


@pytest.fixture(scope="module")
def expected(written: Path) -> Weights:
    return weights_of(written)


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.fixture
def unwatched(copy: Path) -> Path:
    """A copy without manifest, as other programs write."""
    (copy / MANIFEST).unlink()
    return copy


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def holder(path: Path, tensor: str) -> Path:
    return path / json.loads((path / INDEX).read_text())["weight_map"][tensor]


def rewrite(file: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Has safetensors write a shard anew, after a change of its tensors and metadata."""
    with safe_open(file, framework="pt") as read:
        tensors, metadata = {name: read.get_tensor(name) for name in read.keys()}, read.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, file, metadata)


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


def describe(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the metadata of every shard says about a weight."""

    def change_metadata(_: object, metadata: dict[str, str]) -> None:
        said = json.loads(metadata[name])
        change(said)
        metadata[name] = json.dumps(said)

    for shard in shards(path):
        rewrite(shard, change_metadata)


def test_what_was_written(written: Path, expected: Weights) -> None:
    assert len(shards(written)) > 2
    kinds = {len(parts) for parts in expected.values()}
    assert kinds == {1, 2, 3}
    assert expected[f"{UP}.weight"]["qdata"].shape == (224, 48)


# A file of weights or JSON that breaks off, in its header, metadata or values.
@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.2, 0.6, 0.999])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_truncated_files(written: Path, copy: Path, share: float, has_manifest: bool) -> None:
    if not has_manifest:
        (copy / MANIFEST).unlink()
    for name in (*(shard.name for shard in shards(copy)), INDEX, "config.json", MANIFEST):
        if not (copy / name).exists():
            continue
        content = (written / name).read_bytes()
        (copy / name).write_bytes(content[: min(int(len(content) * share), len(content) - 2)])
        with pytest.raises(UserError, match=ONE_LINE):
            weights_of(copy)
        (copy / name).write_bytes(content)
    weights_of(copy)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("has_manifest", [True, False])
def test_flipped_bits_in_headers_change_nothing_silently(
    written: Path, expected: Weights, copy: Path, has_manifest: bool, data: st.DataObject
) -> None:
    if not has_manifest:
        (copy / MANIFEST).unlink(missing_ok=True)
    name = data.draw(st.sampled_from([shard.name for shard in shards(copy)] + [INDEX, MANIFEST][: 1 + has_manifest]))
    content = bytearray((written / name).read_bytes())
    length = int.from_bytes(content[:8], "little") + 8 if name.endswith(".safetensors") else len(content)
    for place in data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3)):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    is_flipped = bytes(content) != (written / name).read_bytes()
    (copy / name).write_bytes(content)
    try:
        found = weights_of(copy)
    except UserError as error:
        assert re.fullmatch(ONE_LINE, str(error))  # noqa: PT017 - either is fine
    else:
        assert_equal_weights(found, expected)
        assert not (is_flipped and has_manifest and name.endswith(".safetensors"))
    finally:
        (copy / name).write_bytes((written / name).read_bytes())


def test_a_missing_shard(copy: Path, fails: Fails) -> None:
    shards(copy)[1].unlink()
    fails(lambda: weights_of(copy), shards(copy)[0].name.replace("00001", "00002"))


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_shard_in_the_place_of_another(copy: Path, fails: Fails, has_manifest: bool) -> None:
    if not has_manifest:
        (copy / MANIFEST).unlink()
    first, second, *_ = shards(copy)
    shutil.copy(second, first)
    fails(lambda: weights_of(copy), first.name)


def test_a_shard_of_another_model(copy: Path, make_checkpoint: Callable[..., Path], fails: Fails) -> None:
    """Of the same recipe and sizes but for one weight: the sizes tell."""
    other = quantize_to(
        copy.parent / "other", make_checkpoint(num_hidden_layers=1, vocab_size=65), MIXED, shard_bytes=40_000
    )
    shutil.copy(shards(other)[0], shards(copy)[0])
    fails(lambda: weights_of(copy), shards(copy)[0].name, "bytes", MANIFEST)


def test_a_header_of_the_same_size(copy: Path, fails: Fails) -> None:
    content = shards(copy)[0].read_bytes()
    assert content.count(b"SYMMETRIC") > 0
    shards(copy)[0].write_bytes(content.replace(b"SYMMETRIC", b"symmetric"))
    fails(lambda: weights_of(copy), shards(copy)[0].name, "another header", MANIFEST)


def test_a_file_that_the_manifest_does_not_name(copy: Path, fails: Fails) -> None:
    files = json.loads((copy / MANIFEST).read_text())["files"]
    dropped = shards(copy)[1].name
    edit(copy / MANIFEST, files={name: entry for name, entry in files.items() if name != dropped})
    fails(lambda: weights_of(copy), dropped, MANIFEST)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", ".", "x" * 300, "é" * 200, "\0", "\ud800", "a\nb"]
)
@pytest.mark.parametrize("file", [MANIFEST, INDEX])
def test_names_that_lead_elsewhere(copy: Path, fails: Fails, name: str, file: str) -> None:
    (copy.parent / "x").write_text("not ours")
    if file == MANIFEST:
        files = json.loads((copy / MANIFEST).read_text())["files"]
        edit(copy / MANIFEST, files={**files, name: {"bytes": 8}})
    else:
        weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
        edit(copy / INDEX, weight_map={**weight_map, "a.weight": name})
    fails(lambda: weights_of(copy), file)


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"version": None}, {"version": [1]}, {"files": None}, {"files": []}, {"files": {"a": 3}}],
    ids=str,
)
def test_a_manifest_of_another_form(copy: Path, fails: Fails, changes: dict[str, Any]) -> None:
    edit(copy / MANIFEST, **changes)
    fails(lambda: weights_of(copy), MANIFEST, "quantize the model again")


def test_a_manifest_elsewhere(copy: Path, fails: Fails) -> None:
    (copy / MANIFEST).rename(copy.parent / "x")
    (copy / MANIFEST).symlink_to("../x")
    fails(lambda: weights_of(copy), MANIFEST, "linked to")


def test_a_manifest_is_not_needed(unwatched: Path, expected: Weights) -> None:
    assert_equal_weights(weights_of(unwatched), expected)


def test_a_config_that_does_not_say_that_the_files_are_quantized(copy: Path, fails: Fails) -> None:
    edit(copy / "config.json", quantization_config=None)
    fails(lambda: weights_of(copy), "quantization_config", "restore the config")


def test_the_files_decide_not_the_config(copy: Path, expected: Weights) -> None:
    edit(copy / "config.json", quantization_config={"quant_method": "torchao", "quant_type": {"default": "int4wo"}})
    assert_equal_weights(weights_of(copy), expected)


def test_other_libraries_weights(copy: Path, fails: Fails) -> None:
    for method in ("bitsandbytes", "gptq", None, 7):
        edit(copy / "config.json", quantization_config={"quant_method": method, "bits": 4})
        fails(lambda: weights_of(copy), "quantized with", repr(method))


def test_parts_in_other_files_than_the_rest(unwatched: Path, expected: Weights) -> None:
    """vllm#28169, transformers#41998: qdata here, scale there, found by the index."""
    source = holder(unwatched, f"{UP}._weight_scale")
    target = next(shard for shard in shards(unwatched) if shard != source)
    moved: dict[str, Tensor] = {}
    rewrite(source, lambda tensors, _: moved.update({f"{UP}._weight_scale": tensors.pop(f"{UP}._weight_scale")}))
    rewrite(target, lambda tensors, _: tensors.update(moved))
    weight_map = json.loads((unwatched / INDEX).read_text())["weight_map"]
    edit(unwatched / INDEX, weight_map=weight_map | {f"{UP}._weight_scale": target.name})
    assert_equal_weights(weights_of(unwatched), expected)
    (unwatched / INDEX).unlink()  # and without one
    assert_equal_weights(weights_of(unwatched), expected)


def test_metadata_that_names_a_shards_own_tensors_only(unwatched: Path, expected: Weights) -> None:
    def keep_own(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        own = [name for name in json.loads(metadata["tensor_names"]) if any(is_part(name, each) for each in tensors)]
        kept = {name: metadata[name] for name in own}
        metadata.clear()
        metadata.update(kept, tensor_names=json.dumps(own))

    for shard in shards(unwatched):
        rewrite(shard, keep_own)
    assert_equal_weights(weights_of(unwatched), expected)
    # One shard without any is one whose integers belong to nothing.
    rewrite(holder(unwatched, f"{Q}._weight_qdata"), lambda _, metadata: metadata.clear())
    with pytest.raises(UserError, match=r"found tensor .*_weight_\w+ .*"):
        weights_of(unwatched)


def is_part(name: str, tensor: str) -> bool:
    module, _, kind = name.rpartition(".")
    return tensor == name or tensor.startswith(f"{module}._{kind}_")


def test_one_shard_without_metadata(unwatched: Path, expected: Weights) -> None:
    """The others say it all."""
    rewrite(shards(unwatched)[0], lambda _, metadata: metadata.clear())
    assert_equal_weights(weights_of(unwatched), expected)


def test_shards_that_contradict_one_another(unwatched: Path, fails: Fails) -> None:
    def change(_: object, metadata: dict[str, str]) -> None:
        metadata[f"{Q}.weight"] = metadata["model.layers.0.self_attn.k_proj.weight"]  # int8wo, where it is int8dq

    rewrite(shards(unwatched)[1], change)
    fails(lambda: weights_of(unwatched), f"{Q}.weight", "two ways")


@pytest.mark.parametrize("part", ["qdata", "scale", "zero_point"])
def test_a_missing_part(unwatched: Path, fails: Fails, part: str) -> None:
    name = f"{UP}._weight_{part}"
    rewrite(holder(unwatched, name), lambda tensors, _: tensors.pop(name))
    fails(lambda: weights_of(unwatched), name)
    (unwatched / INDEX).unlink()
    fails(lambda: weights_of(unwatched), name, "part of the quantized")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_an_extra_part(unwatched: Path, fails: Fails, dtype: torch.dtype) -> None:
    (unwatched / INDEX).unlink()
    extra = f"{UP}._weight_act_pre_scale"
    rewrite(shards(unwatched)[0], lambda tensors, _: tensors.update({extra: torch.ones(96, dtype=dtype)}))
    fails(lambda: weights_of(unwatched), extra)
    describe(unwatched, f"{UP}.weight", lambda said: said["_tensor_data_names"].append("act_pre_scale"))
    fails(lambda: weights_of(unwatched), f"{UP}.weight", "a part act_pre_scale")


def test_a_weight_that_is_there_quantized_and_plain(unwatched: Path, fails: Fails) -> None:
    (unwatched / INDEX).unlink()
    rewrite(shards(unwatched)[0], lambda tensors, _: tensors.update({f"{UP}.weight": torch.ones(224, 96)}))
    fails(lambda: weights_of(unwatched), f"{UP}.weight", "two ways")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("qdata", lambda part: part[:-1], "scale has the shape"),
        ("qdata", lambda part: part.to(torch.int16), "qdata of dtype torch.int16"),
        ("qdata", lambda part: part.float(), "qdata of dtype torch.float32"),
        ("qdata", lambda part: part[0], "it is no matrix"),
        ("scale", lambda part: part.t(), "scale has the shape"),
        ("scale", lambda part: part[:1], "scale has the shape"),
        ("scale", lambda part: part.to(torch.int8), "scale of dtype torch.int8"),
        ("zero_point", lambda part: part.unsqueeze(0), "zero_point has the shape"),
    ],
)
def test_parts_of_another_form(
    unwatched: Path, fails: Fails, part: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    name = f"{UP}._weight_{part}"
    rewrite(holder(unwatched, name), lambda tensors, _: tensors.update({name: change(tensors[name]).contiguous()}))
    fails(lambda: weights_of(unwatched), words)


def test_a_whole_weight_of_other_sizes(unwatched: Path, fails: Fails) -> None:
    for part, dim in (("qdata", 0), ("scale", 1), ("zero_point", 1)):
        name = f"{UP}._weight_{part}"
        rewrite(
            holder(unwatched, name),
            lambda tensors, _, name=name, dim=dim: tensors.update({name: tensors[name].narrow(dim, 0, 128).clone()}),
        )
    fails(lambda: weights_of(unwatched), f"{UP}.weight of shape [128, 96], expected [224, 96]")


@pytest.mark.parametrize(
    "names", ['["qdata", 5]', '[["qdata"]]', '"qdata"', "7", "null", "[]", '["scale"]', '{"qdata": 1}', '["\\ud800"]']
)
def test_odd_lists_of_parts(unwatched: Path, names: str) -> None:
    describe(unwatched, f"{UP}.weight", lambda said: said.update(_tensor_data_names=json.loads(names)))
    with pytest.raises(UserError, match=ONE_LINE):
        weights_of(unwatched)


@pytest.mark.parametrize("names", ["{}", "7", "null", '"abc"', "[[]]", '["nowhere.weight"]', "[" * 5000, "[", "[1]"])
def test_odd_lists_of_tensors(unwatched: Path, names: str) -> None:
    for shard in shards(unwatched):
        rewrite(shard, lambda _, metadata: metadata.update(tensor_names=names))
    with pytest.raises(UserError, match=ONE_LINE):
        weights_of(unwatched)
