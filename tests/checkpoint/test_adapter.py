"""LoRA adapters: merged slice by slice they equal PEFT's merge of the whole model, in every spelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tpllama.checkpoint.adapted import AdaptedCheckpoint
from tpllama.checkpoint.adapter import base_model, find_adapter, open_adapter
from tpllama.checkpoint.open import Checkpoint, StoredWeight, open_checkpoint

# Larger than a tile of the merge in both dimensions, with ragged edges, and with fewer key than query heads.
CONFIG = {
    "vocab_size": 300,
    "hidden_size": 288,
    "intermediate_size": 1100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEAD_DIM = 72
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
Q_KEY = "base_model.model.model.layers.0.self_attn.q_proj"
TORCHTUNE = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
}
META = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
State = dict[str, torch.Tensor]
MakeBase = Callable[..., Path]
Train = Callable[..., Path]


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> MakeBase:
    """Directories of random models, each made once."""
    made: dict[tuple[torch.dtype, bool, bool], Path] = {}

    def make(dtype: torch.dtype = torch.float32, bias: bool = False, tied: bool = False) -> Path:
        if (dtype, bias, tied) not in made:
            torch.manual_seed(0)
            config = LlamaConfig(**CONFIG, attention_bias=bias, mlp_bias=bias, tie_word_embeddings=tied)
            model = LlamaForCausalLM(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.05)
            made[dtype, bias, tied] = tmp_path_factory.mktemp("base")
            model.to(dtype).save_pretrained(made[dtype, bias, tied])
        return made[dtype, bias, tied]

    return make


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Saves an adapter as PEFT does, all of whose own tensors are random."""

    def save(base: Path, **options: Any) -> Path:
        torch.manual_seed(1)
        config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": LINEAR, **options})
        model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(tmp_path / "adapter_of_peft")
        return tmp_path / "adapter_of_peft"

    return save


def merged_by_peft(base: Path, adapter: Path) -> State:
    model = LlamaForCausalLM.from_pretrained(base)
    merged: State = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return merged


def adapted(base: Path | Checkpoint, adapter: Path) -> AdaptedCheckpoint:
    files = find_adapter(adapter)
    assert files is not None
    return AdaptedCheckpoint(open_checkpoint(str(base)) if isinstance(base, Path) else base, open_adapter(files))


def read_all(checkpoint: Checkpoint) -> State:
    return {
        name: checkpoint.read(name, tuple(slice(0, size) for size in info.shape))
        for name, info in checkpoint.tensors.items()
    }


def with_changes(base: Checkpoint, **attributes: Any) -> Any:
    """A checkpoint of which only some attributes are another's."""
    names = ("path", "files", "notes", "fields", "tensors", "quantized", "eos_token_ids", "read")
    return SimpleNamespace(**{name: getattr(base, name) for name in names} | attributes)


def assert_merged_alike(found: State, expected: State, base: Path) -> None:
    """The same but for the last bits of the product, which are BLAS's, and their rare effect on bfloat16."""
    stored = load_file(base / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, unrounded in found.items():
        assert expected[name].dtype == stored[name].dtype
        value = unrounded.to(expected[name].dtype)  # as the program does, once
        if value.dtype in (torch.float32, torch.float64):
            epsilon = torch.finfo(value.dtype).eps
            torch.testing.assert_close(value, expected[name], rtol=8 * epsilon, atol=epsilon / 10)
        else:
            assert (value != expected[name]).float().mean() < 1e-3, name
            torch.testing.assert_close(value, expected[name], rtol=2**-7, atol=2**-20)


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Hugging Face's order of rotated rows to Meta's."""
    halves = rows.reshape(-1, 2, HEAD_DIM // 2, rows.shape[1])
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(rows.shape)


def respelled(path: Path, modules: dict[str, str]) -> State:
    """PEFT's adapter in the spelling and order of rows of torchtune or Meta."""
    state: State = {}
    for name, value in load_file(path / "adapter_model.safetensors").items():
        layer, _, rest = name.removeprefix("base_model.model.model.").partition(".self_attn.")
        part = "self_attn." if rest else "mlp."
        if not rest:
            layer, _, rest = layer.partition(".mlp.")
        module, factor, _ = rest.rsplit(".", 2)
        is_rotated = module in ("q_proj", "k_proj") and factor == "lora_B"
        state[f"{layer}.{modules[part + module]}.{factor.lower()}.weight"] = interleaved(value) if is_rotated else value
    return state


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank": {"rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.down_proj": 12, "v_pro": 2}},
    "alpha": {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "proj": 5, "(k|v)_proj": 7}, "use_rslora": True},
    "both": {"rank_pattern": {"gate_proj": 3}, "alpha_pattern": {"mlp.gate_proj": 4.5}, "use_rslora": True},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "saved-attention": {"target_modules": ["gate_proj"], "modules_to_save": ["v_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["k_proj", "embed_tokens"], "r": 6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_merged_equals_peft(make_base: MakeBase, train: Train, options: dict[str, Any], dtype: torch.dtype) -> None:
    base = make_base(dtype, bias=True)
    adapter = train(base, **options)
    assert_merged_alike(read_all(adapted(base, adapter)), merged_by_peft(base, adapter), base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["float16", "float64"])
def test_merged_equals_peft_in_other_dtypes_without_biases(
    make_base: MakeBase, train: Train, dtype: torch.dtype
) -> None:
    base = make_base(dtype)
    adapter = train(base)
    assert_merged_alike(read_all(adapted(base, adapter)), merged_by_peft(base, adapter), base)


def test_an_adapter_in_bfloat16_merges_in_float32(make_base: MakeBase, train: Train) -> None:
    base = make_base()
    adapter = train(base)
    state = load_file(adapter / "adapter_model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, adapter / "adapter_model.safetensors")
    assert_merged_alike(read_all(adapted(base, adapter)), merged_by_peft(base, adapter), base)


@pytest.mark.parametrize("change", ["bin", "default", "no-prefix"])
def test_peft_s_spellings_give_the_same(make_base: MakeBase, train: Train, change: str) -> None:
    base = make_base()
    adapter = train(base, target_modules=["q_proj", "embed_tokens"])
    expected = read_all(adapted(base, adapter))
    state = load_file(adapter / "adapter_model.safetensors")
    match change:
        case "bin":
            (adapter / "adapter_model.safetensors").unlink()
            torch.save(state, adapter / "adapter_model.bin")
        case "default":
            renamed = {name.replace(".weight", ".default.weight"): value for name, value in state.items()}
            renamed = {name.replace("base_layer.default", "base_layer"): value for name, value in renamed.items()}
            renamed = {f"{name}.default" if name[-2:] in ("_A", "_B") else name: v for name, v in renamed.items()}
            assert renamed.keys().isdisjoint({f"{Q_KEY}.lora_A.weight"})
            save_file(renamed, adapter / "adapter_model.safetensors")
        case "no-prefix":
            state = {name.removeprefix("base_model.model."): value for name, value in state.items()}
            save_file(state, adapter / "adapter_model.safetensors")
    found = read_all(adapted(base, adapter))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found[Q], load_file(base / "model.safetensors")[Q])


@pytest.mark.parametrize("middle", ["", ".base_layer", ".modules_to_save", ".modules_to_save.default"])
def test_a_replaced_tensor_is_the_adapter_s_as_it_is(make_base: MakeBase, tmp_path: Path, middle: str) -> None:
    write_adapter(tmp_path)
    head = torch.randn(300, 288)
    state = load_file(tmp_path / "adapter_model.safetensors") | {f"base_model.model.lm_head{middle}.weight": head}
    write_adapter(tmp_path, state)
    base = open_checkpoint(str(make_base(torch.bfloat16)))
    read: list[str] = []

    def recorded(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        read.append(name)
        return base.read(name, index)

    checkpoint = adapted(with_changes(base, read=recorded), tmp_path)
    found = checkpoint.read("lm_head.weight", (slice(3, 300), slice(0, 280)))
    assert read == []  # nothing of the base's is needed
    assert torch.equal(found, head[3:, :280])


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_factors_of_a_weight_are_read_once(
    make_base: MakeBase, tmp_path: Path, monkeypatch: Any, interleaved: bool
) -> None:
    """Weights are read in blocks of rows, each of which needs both factors."""
    names = [f"layers.0.attention.{module}" if interleaved else f"{Q_KEY[:-6]}{module}" for module in ("wq", "wk")]
    names = names if interleaved else [Q_KEY, Q_KEY.replace("q_", "k_")]
    factors = ("lora_a", "lora_b") if interleaved else ("lora_A", "lora_B")
    state: State = {}
    for name, rows in zip(names, (288, 144), strict=True):
        state |= {
            f"{name}.{factors[0]}.weight": torch.randn(2, 288),
            f"{name}.{factors[1]}.weight": torch.randn(rows, 2),
        }
    write_adapter(tmp_path, state)
    checkpoint = adapted(make_base(), tmp_path)
    read: list[str] = []
    original = type(checkpoint)._read_factor
    monkeypatch.setattr(type(checkpoint), "_read_factor", lambda self, key: (read.append(key), original(self, key))[1])
    for name in (Q, Q.replace("q_", "k_"), Q):
        blocks = [checkpoint.read(name, (slice(top, top + 48), slice(0, 288))) for top in (0, 48, 96)]
        fresh = adapted(make_base(), tmp_path).read(name, (slice(0, 144), slice(0, 288)))
        assert torch.equal(torch.cat(blocks), fresh)
    once = [f"{name}.{factor}.weight" for name in (*names, names[0]) for factor in factors]
    assert [key for place, key in enumerate(read) if place % 4 < 2] == once  # the others are the fresh one's


@pytest.mark.parametrize("modules", [TORCHTUNE, META], ids=["torchtune", "meta"])
@pytest.mark.parametrize("scale_from", ["config", "params", "parent"])
def test_torchtune_s_and_meta_s_files_give_the_same(
    make_base: MakeBase, train: Train, tmp_path: Path, modules: dict[str, str], scale_from: str
) -> None:
    base = make_base(bias=True)
    adapter = train(base)
    other = tmp_path / "run"
    (other / "adapter").mkdir(parents=True)
    torch.save(respelled(adapter, modules), other / "adapter" / "adapter.pth")
    file, content = {
        "config": ("adapter/adapter_config.json", {"r": 8, "lora_alpha": 16}),
        "params": ("adapter/params.json", {"dim": 288, "lora_args": {"rank": 8, "scale": 2.0}}),
        "parent": ("params.json", {"lora_args": {"rank": 8, "scale": 2}}),
    }[scale_from]
    (other / file).write_text(json.dumps(content))
    found, expected = read_all(adapted(base, other)), read_all(adapted(base, adapter))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("spelling", ["output", "lm_head"])
def test_torchtune_s_output_is_the_head(make_base: MakeBase, tmp_path: Path, spelling: str) -> None:
    a, b = torch.randn(2, 288), torch.randn(300, 2)
    names = ("lora_a", "lora_b") if spelling == "output" else ("lora_A", "lora_B")
    torch.save(
        {f"{spelling}.{name}.weight": value for name, value in zip(names, (a, b), strict=True)},
        tmp_path / "adapter_0.pt",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    base = make_base()
    expected = load_file(base / "model.safetensors")["lm_head.weight"] + 3 * b @ a
    torch.testing.assert_close(read_all(adapted(base, tmp_path))["lm_head.weight"], expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_has_the_bits_of_the_whole(
    make_base: MakeBase, wide: tuple[AdaptedCheckpoint, State], data: st.DataObject
) -> None:
    checkpoint, whole = wide
    name = data.draw(st.sampled_from(sorted(whole)))
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, size)]))) for size in whole[name].shape]
    index = tuple(slice(*pair) for pair in bounds)
    assert torch.equal(checkpoint.read(name, index), whole[name][index])


@pytest.fixture(scope="session")
def wide(make_base: MakeBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdaptedCheckpoint, State]:
    """An adapter in Meta's order, of weights and the embedding, so large that its float32 bits show."""
    torch.manual_seed(2)
    state = {
        "layers.0.attention.wq.lora_a.weight": torch.randn(9, 288),
        "layers.0.attention.wq.lora_b.weight": torch.randn(288, 9),
        "model.layers.1.mlp.down_proj.lora_A.weight": torch.randn(9, 1100),
        "model.layers.1.mlp.down_proj.lora_B.weight": torch.randn(288, 9),
        "model.embed_tokens.lora_embedding_A": torch.randn(9, 300),
        "model.embed_tokens.lora_embedding_B": torch.randn(288, 9),
        "lm_head.weight": torch.randn(300, 288),
    }
    path = tmp_path_factory.mktemp("wide")
    torch.save(state, path / "adapter_model.bin")
    (path / "adapter_config.json").write_text(json.dumps({"r": 9, "lora_alpha": 5}))
    checkpoint = adapted(make_base(), path)
    names = (Q, DOWN, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    return checkpoint, {name: value for name, value in read_all(checkpoint).items() if name in names}


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("columns", [1, 5, 8])
def test_a_small_corner_has_the_bits_of_the_whole(
    wide: tuple[AdaptedCheckpoint, State], rows: int, columns: int
) -> None:
    checkpoint, whole = wide
    for name in (Q, DOWN, "model.embed_tokens.weight"):
        height, width = whole[name].shape
        for top, left in ((height - rows, width - columns), (256, 0), (0, width - columns)):
            index = (slice(top, top + rows), slice(left, left + columns))
            assert torch.equal(checkpoint.read(name, index), whole[name][index])


@pytest.mark.parametrize("degree", [2, 4])
def test_every_degree_of_tensor_parallelism_reads_the_same(wide: tuple[AdaptedCheckpoint, State], degree: int) -> None:
    checkpoint, whole = wide
    for name, dim in ((Q, 0), (DOWN, 1), ("model.embed_tokens.weight", 0)):
        parts = []
        for rank in range(degree):
            index = [slice(0, size) for size in whole[name].shape]
            size = whole[name].shape[dim] // degree
            index[dim] = slice(rank * size, (rank + 1) * size)
            parts.append(checkpoint.read(name, tuple(index)))
        assert torch.equal(torch.cat(parts, dim), whole[name])


def test_other_tensors_and_fields_are_the_base_s(make_base: MakeBase, train: Train) -> None:
    base = open_checkpoint(str(make_base()))
    checkpoint = adapted(base, train(base.path, target_modules=["q_proj"], layers_to_transform=[0]))
    found, stored = read_all(checkpoint), load_file(base.path / "model.safetensors")
    assert [name for name in stored if not torch.equal(found[name], stored[name])] == [Q]
    assert checkpoint.fields == base.fields
    assert checkpoint.eos_token_ids == base.eos_token_ids
    assert checkpoint.tokenizer() is None
    assert checkpoint.base_path == base.path


def test_the_note_says_what_was_merged(make_base: MakeBase, train: Train) -> None:
    base = open_checkpoint(str(make_base()))
    adapter = train(base.path, rank_pattern={"o_proj": 4}, modules_to_save=["lm_head"])
    base = with_changes(base, notes=("of the base",))
    checkpoint = adapted(base, adapter)
    note = (
        f"merged LoRA adapter {adapter / 'adapter_model.safetensors'} (rank 8 or 4, scale 2.0 or 4.0, 14 weights, "
        f"tensors replaced: 1) into {base.path}"
    )
    assert checkpoint.notes == ("of the base", note)
    assert checkpoint.path == adapter


def test_a_base_without_weights_is_not_compared(make_base: MakeBase, tmp_path: Path) -> None:
    write_adapter(tmp_path, {f"{Q_KEY}.lora_A.weight": torch.ones(2, 5), f"{Q_KEY}.lora_B.weight": torch.ones(5, 2)})
    checkpoint = adapted(open_checkpoint(str(make_base()), weights=False), tmp_path)
    assert checkpoint.tensors == {}
    assert checkpoint.fields["hidden_size"] == 288


# Finding


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), None),
        (("adapter_config.json", "adapter_x.pt", "model.safetensors"), None),
        (("adapter_model.pt", "adapter_model.safetensors"), "adapter_model.safetensors"),
        (("adapter_9.pt", "adapter_10.pt", "adapter_x.pt"), "adapter_10.pt"),
        (("adapter_model.bin", "adapter/adapter.pth"), "adapter_model.bin"),
        (("consolidated.00.pth", "adapter/adapter.pth"), "adapter/adapter.pth"),
    ],
)
def test_the_adapter_of_a_folder(tmp_path: Path, files: tuple[str, ...], found: str | None) -> None:
    (tmp_path / "adapter").mkdir()
    for file in files:
        (tmp_path / file).touch()
    adapter = find_adapter(tmp_path)
    assert (adapter.weights if adapter else None) == (tmp_path / found if found else None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"base_model_name_or_path": "org/name"}, "org/name"),
        ({"base_model_name_or_path": ""}, None),
        ({"base_model_name_or_path": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_base_model_is_the_config_s(tmp_path: Path, config: dict[str, Any] | None, expected: str | None) -> None:
    (tmp_path / "adapter_0.pt").touch()
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    files = find_adapter(tmp_path)
    assert files is not None
    assert base_model(files) == expected


# Refusals


def write_adapter(path: Path, state: State | None = None, **options: Any) -> None:
    """PEFT's form of an adapter of q_proj in the first layer, or of `state`."""
    if state is None:
        state = {f"{Q_KEY}.lora_A.weight": torch.ones(2, 288), f"{Q_KEY}.lora_B.weight": torch.ones(288, 2)}
    save_file(state, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **options}))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"use_dora": True}, ["use_dora"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"layer_replication": [[0, 1], [0, 2]]}, ["layer_replication"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices"]),
        ({"alora_invocation_tokens": [1]}, ["alora_invocation_tokens"]),
        ({"bias": "all"}, ["bias 'all'", "'none'"]),
        ({"peft_type": "IA3"}, ["'IA3'", "'LORA'"]),
        ({"init_lora_weights": "pissa_niter_16"}, ["pissa_niter_16", "path_initial_model_for_weight_conversion"]),
        ({"r": 0}, ["r 0", "positive integer"]),
        ({"r": 2.5}, ["r 2.5", "positive integer"]),
        ({"r": None}, ["r None"]),
        ({"lora_alpha": 0}, ["lora_alpha 0", "positive number"]),
        ({"lora_alpha": -1}, ["lora_alpha -1"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha nan"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha inf"]),
        ({"lora_alpha": True}, ["lora_alpha True"]),
        ({"use_rslora": "yes"}, ["use_rslora 'yes'"]),
        ({"rank_pattern": {"q_proj": -2}}, ["rank_pattern q_proj -2"]),
        ({"alpha_pattern": {"q_proj": "a"}}, ["alpha_pattern q_proj 'a'"]),
        ({"rank_pattern": [1]}, ["rank_pattern [1]"]),
        ({"rank_pattern": {"(": 2}}, ["rank_pattern '('", "regular expression"]),
        ({"r": 3}, [f"{Q_KEY}.lora_A.weight", "[2, 288]", "[3, 288]", "rank 3"]),
        ({"rank_pattern": {"q_proj": 4}}, ["[2, 288]", "[4, 288]", "rank 4"]),
    ],
)
def test_options_are_refused(
    make_base: MakeBase, tmp_path: Path, fails: Any, options: dict[str, Any], parts: list[str]
) -> None:
    write_adapter(tmp_path, **options)
    fails(lambda: adapted(make_base(), tmp_path), *parts, str(tmp_path))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({f"{Q_KEY}.lora_magnitude_vector": ones(288)}, ["DoRA", "lora_magnitude_vector"]),
        ({"layers.0.attn.q_proj.magnitude": ones(288)}, ["DoRA", "layers.0.attn.q_proj.magnitude"]),
        ({f"{Q_KEY}.lora_B.bias": ones(288)}, ["LoRA bias", "lora_B.bias"]),
        ({"model.embed_tokens.token_adapter.trainable_tokens_delta": ones(1, 288)}, ["trainable_tokens_delta"]),
        ({f"{Q_KEY}.lora_C.weight": ones(288, 288)}, ["lora_C", "as PEFT, torchtune or Meta spells them"]),
        ({"layers.0.attn.qkv.lora_a.weight": ones(2, 288)}, ["layers.0.attn.qkv"]),
        ({"decoder.layers.0.attn.q_proj.weight": ones(2, 288)}, ["decoder."]),
        ({f"{Q_KEY.replace('q_', 'k_')}.lora_A.weight": ones(2, 288)}, ["k_proj.lora_A.weight", "factor B"]),
        ({f"{Q_KEY.replace('q_', 'k_')}.lora_B.weight": ones(2, 288)}, ["k_proj.lora_B.weight", "factor A"]),
        ({"layers.0.attn.q_proj.lora_a.weight": ones(2, 288)}, [f"{Q_KEY}.lora_A.weight", "attn.q_proj.lora_a"]),
        ({"lm_head.weight": ones(301, 288)}, ["lm_head.weight", "[301, 288]", "[300, 288]"]),
        ({"model.layers.2.input_layernorm.weight": ones(288)}, ["model.layers.2.input_layernorm.weight", "none"]),
    ],
)
def test_tensors_are_refused(make_base: MakeBase, tmp_path: Path, fails: Any, extra: State, parts: list[str]) -> None:
    write_adapter(tmp_path)
    write_adapter(tmp_path, load_file(tmp_path / "adapter_model.safetensors") | extra)
    fails(lambda: adapted(make_base(), tmp_path), *parts)


@pytest.mark.parametrize(
    ("module", "a", "b", "parts"),
    [
        ("model.layers.0.self_attn.q_proj", (2, 289), (288, 2), ["lora_A", "[2, 289]", "[2, 288]", Q, "[288, 288]"]),
        ("model.layers.0.self_attn.k_proj", (2, 288), (288, 2), ["lora_B", "[288, 2]", "[144, 2]", "[144, 288]"]),
        ("model.layers.0.self_attn.q_proj", (2, 288), (288, 3), ["lora_B", "[288, 3]", "[288, 2]", "rank 2"]),
        ("model.layers.2.self_attn.q_proj", (2, 288), (288, 2), ["model.layers.2.self_attn.q_proj.weight", "none"]),
        ("model.norm", (2, 288), (288, 2), ["model.norm.weight", "matrix"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    make_base: MakeBase, tmp_path: Path, fails: Any, module: str, a: Any, b: Any, parts: list[str]
) -> None:
    write_adapter(tmp_path, {f"{module}.lora_A.weight": ones(*a), f"{module}.lora_B.weight": ones(*b)})
    fails(lambda: adapted(make_base(), tmp_path), *parts)


def test_an_adapter_without_lora_is_refused(make_base: MakeBase, tmp_path: Path, fails: Any) -> None:
    write_adapter(tmp_path, {"lm_head.weight": ones(300, 288)})
    fails(lambda: adapted(make_base(), tmp_path), "no LoRA tensors", str(tmp_path))


@pytest.mark.parametrize("params", [None, "{}", '{"lora_args": null}'])
def test_a_missing_scale_names_the_file_to_write(
    make_base: MakeBase, tmp_path: Path, fails: Any, params: str | None
) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    if params:
        (tmp_path / "params.json").write_text(params)
    path = str(tmp_path / "adapter_config.json")
    fails(lambda: adapted(make_base(), tmp_path), path, '{"r": RANK, "lora_alpha": ALPHA}')


@pytest.mark.parametrize(
    ("args", "part"), [({"rank": 2}, "lora_args.scale None"), ({"rank": "2", "scale": 1}, "lora_args.rank '2'")]
)
def test_lora_args_need_both_numbers(
    make_base: MakeBase, tmp_path: Path, fails: Any, args: dict[str, Any], part: str
) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "params.json").write_text(json.dumps({"lora_args": args}))
    fails(lambda: adapted(make_base(), tmp_path), part, "params.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_damaged_json_is_refused(make_base: MakeBase, tmp_path: Path, fails: Any, content: bytes) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(content)
    fails(lambda: adapted(make_base(), tmp_path), "adapter_config.json")


def test_a_config_that_leads_elsewhere_is_refused(make_base: MakeBase, tmp_path: Path, fails: Any) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(adapter)
    (adapter / "adapter_config.json").rename(tmp_path / "secret.json")
    (adapter / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    fails(lambda: adapted(make_base(), adapter), "secret.json")


def test_a_damaged_weight_file_is_refused(make_base: MakeBase, tmp_path: Path, fails: Any) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 4)
    fails(lambda: adapted(make_base(), tmp_path), "damaged", "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("kind", ["lora", "saved"])
def test_the_one_embedding_of_a_tied_model_is_refused(
    make_base: MakeBase, tmp_path: Path, fails: Any, name: str, kind: str
) -> None:
    write_adapter(tmp_path)
    if kind == "lora":
        extra = {f"{name}.lora_A.weight": ones(2, 288), f"{name}.lora_B.weight": ones(300, 2)}
    else:
        extra = {f"{name}.weight": ones(300, 288)}
    write_adapter(tmp_path, load_file(tmp_path / "adapter_model.safetensors") | extra)
    adapted(make_base(), tmp_path)
    fails(lambda: adapted(make_base(tied=True), tmp_path), name, "one tensor", "both")


def test_a_tied_model_s_layers_merge(make_base: MakeBase, train: Train) -> None:
    base = make_base(tied=True)
    adapter = train(base)
    expected = merged_by_peft(base, adapter)
    del expected["lm_head.weight"]
    assert_merged_alike(read_all(adapted(base, adapter)), expected, base)


def test_a_quantized_weight_is_refused(make_base: MakeBase, tmp_path: Path, fails: Any) -> None:
    plain = open_checkpoint(str(make_base()))
    quantized = {Q: StoredWeight("Int4Tensor", {}, {})}
    tensors = {name: info for name, info in plain.tensors.items() if name != Q}
    base = with_changes(plain, tensors=tensors, quantized=quantized)
    write_adapter(tmp_path)
    fails(lambda: adapted(base, tmp_path), Q, "quantized", "before quantizing")
    k = Q_KEY.replace("q_", "k_")
    write_adapter(tmp_path, {f"{k}.lora_A.weight": ones(2, 288), f"{k}.lora_B.weight": ones(144, 2)})
    assert adapted(base, tmp_path).quantized == quantized
