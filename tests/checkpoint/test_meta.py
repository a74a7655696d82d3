"""Meta's checkpoints: however many shards, they read as the Hugging Face model they were written from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import formats
from checkpoint.conftest import SIZES as CONFIG
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tpllama.checkpoint.meta import MetaCheckpoint
from tpllama.checkpoint.meta_shards import SplitTensor
from tpllama.checkpoint.open import TensorInfo
from tpllama.llama_config import LlamaConfig

State = dict[str, torch.Tensor]
# Four shards cut the two key-value heads in the middle.
KINDS = [(shards, style) for shards in (1, 2, 4) for style in ("llama3", "llama2")]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WQ, WK = "layers.0.attention.wq.weight", "layers.1.attention.wk.weight"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def written(request: Any, state: State, tmp_path_factory: pytest.TempPathFactory) -> MetaCheckpoint:
    shards, style = request.param
    path = tmp_path_factory.mktemp("meta")
    return MetaCheckpoint(path, formats.write_meta(path, state, CONFIG, shards, style))


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of a .pth file, dots spelled as two underscores; None removes one."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    content = torch.load(file) | named
    torch.save({name: value for name, value in content.items() if value is not None}, file)


def test_every_number_of_shards_gives_the_same_tensors(written: MetaCheckpoint, state: State, read_whole: Any) -> None:
    assert written.tensors == {name: TensorInfo(tuple(value.shape)) for name, value in state.items()}
    for name, value in state.items():
        read = read_whole(written, name)
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, value), name


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_that_slice_of_the_whole(written: MetaCheckpoint, state: State, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(state)))
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, size)]))) for size in state[name].shape]
    index = tuple(slice(*pair) for pair in bounds)
    part = written.read(name, index)
    assert part.dtype == torch.bfloat16
    assert torch.equal(part, state[name][index])


def test_config(written: MetaCheckpoint) -> None:
    config = LlamaConfig.from_hf(written.fields)
    assert {name: written.fields[name] for name in CONFIG} == CONFIG
    assert config.head_dim == 16
    assert not config.attention_bias
    assert not config.mlp_bias
    assert not config.tie_word_embeddings
    assert (written.notes, written.quantized, written.eos_token_ids, written.base_path) == ((), {}, (), None)
    assert written.tokenizer() is None


def test_only_the_shards_that_a_slice_touches_are_read(state: State, tmp_path: Path, monkeypatch: Any) -> None:
    from tpllama.checkpoint.weight_files import PickleFile

    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, state, CONFIG, shards=4))
    touched: list[tuple[str, tuple[slice, ...]]] = []
    read = PickleFile.read

    def recorded(file: PickleFile, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        touched.append((file.path.name, index))
        return read(file, name, index)

    monkeypatch.setattr(PickleFile, "read", recorded)
    checkpoint.read("model.layers.0.mlp.down_proj.weight", (slice(3, 5), slice(30, 49)))
    rows = slice(3, 5)
    assert touched == [("consolidated.01.pth", (rows, slice(6, 24))), ("consolidated.02.pth", (rows, slice(0, 1)))]
    touched.clear()
    checkpoint.read("model.layers.0.self_attn.q_proj.weight", (slice(16, 32), slice(0, 64)))
    assert touched == [("consolidated.01.pth", (slice(0, 16), slice(0, 64)))]


@pytest.mark.parametrize("files", [1, 2])
def test_torchtune_files_hold_whole_tensors(state: State, tmp_path: Path, files: int, read_whole: Any) -> None:
    checkpoint = MetaCheckpoint(tmp_path, formats.write_torchtune_meta(tmp_path, state, CONFIG, files))
    assert checkpoint.tensors.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(read_whole(checkpoint, name), value), name


def test_torchtune_hf_output_has_a_config_of_meta_too(state: State, tmp_path: Path) -> None:
    formats.write_torchtune_hf(tmp_path, state, CONFIG)
    checkpoint = MetaCheckpoint(tmp_path / "original")
    assert checkpoint.tensors == {}
    assert checkpoint.fields["intermediate_size"] == 96
    assert checkpoint.tokenizer() is not None


@pytest.mark.parametrize("shards", [1, 2])
def test_biases(tiny_state: State, tmp_path: Path, shards: int, read_whole: Any) -> None:
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, tiny_state, CONFIG, shards))
    assert checkpoint.fields["attention_bias"] is True
    assert checkpoint.fields["mlp_bias"] is True
    for name, value in tiny_state.items():
        assert torch.equal(read_whole(checkpoint, name), value), name
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(checkpoint.read(name, (slice(5, 21),)), tiny_state[name][5:21])


def test_safetensors_and_uneven_shards(state: State, tmp_path: Path, read_whole: Any) -> None:
    files = []
    formats.write_meta(tmp_path, state, CONFIG, shards=3, style="llama2")
    for file in sorted(tmp_path.glob("*.pth")):
        files.append(file.with_suffix(".safetensors"))
        content = torch.load(file)
        assert "rope.freqs" in content
        save_file(content, files[-1])
    assert len({file.stat().st_size for file in files}) > 1
    checkpoint = MetaCheckpoint(tmp_path, files)
    for name, value in state.items():
        assert torch.equal(read_whole(checkpoint, name), value), name


def test_a_base_models_config_takes_the_place_of_params_json(state: State, tmp_path: Path, read_whole: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards=2)
    (tmp_path / "params.json").unlink()
    base = {**CONFIG, "rope_theta": 1234.0, "tie_word_embeddings": True, "some_field": 1}
    checkpoint = MetaCheckpoint(tmp_path, files, base)
    assert checkpoint.fields == base | {"tie_word_embeddings": False}
    assert base["tie_word_embeddings"] is True
    for name, value in state.items():
        assert torch.equal(read_whole(checkpoint, name), value), name


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("style", ["llama3", "llama2"])
def test_a_head_that_is_a_copy_of_the_embedding_is_tied(state: State, tmp_path: Path, shards: int, style: str) -> None:
    copied = state | {HEAD: state[EMBEDDING]}
    files = formats.write_meta(tmp_path, copied, CONFIG, shards, style)
    checkpoint = MetaCheckpoint(tmp_path, files)
    assert checkpoint.fields["tie_word_embeddings"] is True
    assert HEAD not in checkpoint.tensors
    assert EMBEDDING in checkpoint.tensors
    note = f"the output head in {tmp_path} equals the embedding (in the 40 rows compared, of 40): read as tied"
    assert checkpoint.notes == (note,)

    head = state[EMBEDDING].clone()
    head[-1, -1] += 1
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, state | {HEAD: head}, CONFIG, shards, style))
    assert checkpoint.fields["tie_word_embeddings"] is False
    assert HEAD in checkpoint.tensors
    assert checkpoint.notes == ()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("style", ["llama3", "llama2"])
def test_some_rows_tell_whether_the_head_is_the_embedding(
    state: State, tmp_path: Path, shards: int, style: str, monkeypatch: Any
) -> None:
    """Opening reads few rows of a large vocabulary. A head that was trained differs in all."""
    config, rows = CONFIG | {"vocab_size": 5000}, torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    read: list[tuple[slice, ...]] = []
    original = SplitTensor.read

    def recorded(tensor: SplitTensor, index: tuple[slice, ...]) -> torch.Tensor:
        read.append(index)
        return original(tensor, index)

    monkeypatch.setattr(SplitTensor, "read", recorded)
    copied = state | {EMBEDDING: rows, HEAD: rows.clone()}
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, copied, config, shards, style))
    assert checkpoint.fields["tie_word_embeddings"] is True
    assert "in the 48 rows compared, of 5000" in checkpoint.notes[0]
    places = sorted({index[0].start for index in read})
    assert (places[0], places[-1], len(places), len(read)) == (0, 4999, 48, 96)
    assert max(second - first for first, second in itertools.pairwise(places)) < 120
    assert all(index[0].stop == index[0].start + 1 for index in read)

    trained = state | {EMBEDDING: rows, HEAD: rows * (1 + 2**-20)}
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, trained, config, shards, style))
    assert checkpoint.fields["tie_word_embeddings"] is False
    assert checkpoint.notes == ()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_head_that_is_the_embedding_in_the_file_is_tied(
    state: State, tmp_path: Path, monkeypatch: Any, suffix: str
) -> None:
    """torch.save writes what two names share once; safetensors knows no sharing."""
    (file,) = formats.write_meta(tmp_path, state, CONFIG)
    content = torch.load(file)
    content["output.weight"] = content["tok_embeddings.weight"]
    torch.save(content, file)
    if suffix == "safetensors":
        content["output.weight"] = content["output.weight"].clone()
        save_file(content, file := file.with_suffix(".safetensors"))
    monkeypatch.setattr("tpllama.checkpoint.meta._COMPARED", 7)
    checkpoint = MetaCheckpoint(tmp_path, [file])
    assert checkpoint.fields["tie_word_embeddings"] is True
    how = "they are one in the file" if suffix == "pth" else "in the 7 rows compared, of 40"
    assert checkpoint.notes == (f"the output head in {tmp_path} equals the embedding ({how}): read as tied",)


def test_without_a_head_the_model_is_tied(state: State, tmp_path: Path) -> None:
    without = {name: value for name, value in state.items() if name != HEAD}
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, without, CONFIG, style="llama2"))
    assert checkpoint.fields["tie_word_embeddings"] is True
    assert checkpoint.fields["vocab_size"] == 40
    assert checkpoint.notes == ()


def test_a_head_of_another_shape_is_not_compared(state: State, tmp_path: Path) -> None:
    other = state | {HEAD: state[EMBEDDING][:30].clone()}
    checkpoint = MetaCheckpoint(tmp_path, formats.write_meta(tmp_path, other, CONFIG))
    assert checkpoint.fields["tie_word_embeddings"] is False
    assert checkpoint.tensors[HEAD].shape == (30, 64)


def test_vocabulary_without_weights_is_the_tokenizers(state: State, tmp_path: Path, fails: Any) -> None:
    formats.write_meta(tmp_path, state, CONFIG, style="llama2")
    fails(lambda: MetaCheckpoint(tmp_path), "vocab_size -1")
    formats.write_sentencepiece(tmp_path / "tokenizer.model")
    checkpoint = MetaCheckpoint(tmp_path)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert checkpoint.fields["vocab_size"] == len(tokenizer)
    assert checkpoint.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("folder", "sentencepiece", "expected"),
    [
        ("Llama3.2-1B-Instruct", False, "Llama 3's"),
        ("Llama3.2-1B-Instruct", True, "Llama 2's"),
        ("llama-2-7b-chat", True, "Llama 2's"),
        ("llama-2-7b-chat", False, None),
        ("Llama3.2-1B", False, None),
        ("the-instructor", False, None),
    ],
)
def test_the_folders_name_says_whether_it_chats(
    state: State, tmp_path: Path, folder: str, sentencepiece: bool, expected: str | None
) -> None:
    path = tmp_path / folder / "original"
    formats.write_meta(path, state, CONFIG)
    tokenizer_file = path / "tokenizer.model"
    (formats.write_sentencepiece if sentencepiece else formats.write_tiktoken)(tokenizer_file)
    params = formats.meta_params(CONFIG)
    size = len(MetaCheckpoint(path).tokenizer())  # type: ignore[arg-type]
    (path / "params.json").write_text(json.dumps(params | {"vocab_size": size}))
    checkpoint = MetaCheckpoint(path)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert bool(tokenizer.chat_template) is (expected is not None)
    assert len(checkpoint.notes) == int(expected is not None)
    for note in checkpoint.notes:
        assert expected in note
        assert folder in note


def test_a_tokenizer_of_another_size_is_noted(state: State, tmp_path: Path) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG)
    ranks = formats.write_tiktoken(tmp_path / "tokenizer.model")
    checkpoint = MetaCheckpoint(tmp_path, files)
    assert f"{len(ranks) + 256} tokens" in checkpoint.notes[0]
    assert "model 40" in checkpoint.notes[0]
    assert checkpoint.eos_token_ids == tuple(len(ranks) + place for place in (1, 8, 9))


def test_missing_params_json(state: State, tmp_path: Path, fails: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG)
    (tmp_path / "params.json").unlink()
    fails(lambda: MetaCheckpoint(tmp_path, files), "params.json", str(tmp_path))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tensor_that_no_llama_has(state: State, tmp_path: Path, fails: Any, shards: int) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards)
    rewrite(files[-1], layers__0__attention__q_norm__weight=torch.ones(16))
    fails(lambda: MetaCheckpoint(tmp_path, files), "layers.0.attention.q_norm.weight", files[-1].name, "plain Llama")


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", [WQ, WK, "norm.weight"])
def test_a_tensor_that_a_shard_lacks(state: State, tmp_path: Path, fails: Any, shards: int, name: str) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards)
    rewrite(files[0], **{name.replace(".", "__"): None})
    # One copy left of two is a whole tensor in one file, which is as good.
    if name == "norm.weight" and shards == 2:
        assert "model.norm.weight" in MetaCheckpoint(tmp_path, files).tensors
        return
    fails(lambda: MetaCheckpoint(tmp_path, files), name, f"{shards - 1} of {shards} files", "consolidated.01.pth")


def test_parts_in_some_of_the_files(state: State, tmp_path: Path, fails: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards=3)
    name = "layers.1.feed_forward.w1.weight"
    for file, part in zip(files, (*torch.zeros(96, 64).split(48), None), strict=True):
        rewrite(file, **{name.replace(".", "__"): part})
    fails(lambda: MetaCheckpoint(tmp_path, files), name, "2 of 3 files", "[48, 64]", "[96, 64]")


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        (WQ, (31, 64)),
        (WQ, (33, 64)),
        (WQ, (32, 63)),
        (WQ, (32,)),
        (WQ, (32, 64, 1)),
        ("layers.0.attention.wo.weight", (63, 32)),
        ("layers.0.attention.wo.weight", (64, 64)),
        ("tok_embeddings.weight", (21, 64)),
        ("norm.weight", (63,)),
        ("norm.weight", (1, 64)),
    ],
)
def test_shards_that_do_not_fit_together(
    state: State, tmp_path: Path, fails: Any, changed: str, shape: tuple[int, ...]
) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards=2)
    rewrite(files[1], **{changed.replace(".", "__"): torch.zeros(shape)})
    parts = (changed, str(list(shape)), "consolidated.00.pth", "consolidated.01.pth", "2 of 2 files")
    fails(lambda: MetaCheckpoint(tmp_path, files), *parts)


def test_a_missing_file_shows_in_the_shapes(state: State, tmp_path: Path, fails: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, shards=4)
    fails(lambda: MetaCheckpoint(tmp_path, files[:3]), "tok_embeddings.weight", "[40, 64]", "get all files")


def test_files_of_another_dtype_or_damaged(state: State, tmp_path: Path, fails: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG)
    rewrite(files[0], norm__weight=torch.ones(64, dtype=torch.int8))
    fails(lambda: MetaCheckpoint(tmp_path, files), "norm.weight", "int8")
    files[0].write_bytes(files[0].read_bytes()[:5000])
    fails(lambda: MetaCheckpoint(tmp_path, files), files[0].name)


def test_params_json_is_checked(state: State, tmp_path: Path, fails: Any) -> None:
    files = formats.write_meta(tmp_path, state, CONFIG, quantization_args={"spinquant": True})
    fails(lambda: MetaCheckpoint(tmp_path, files), "quantization_args", str(tmp_path / "params.json"))
    (tmp_path / "params.json").write_text("[1]")
    fails(lambda: MetaCheckpoint(tmp_path, files), str(tmp_path / "params.json"))
