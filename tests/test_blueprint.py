"""What a blueprint knows before any weight is read: the report, sizes, the context, and tensors that don't fit.

That the bytes it promises are those that loading holds is shown in test_matrix.py, for every recipe and degree.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tpllama import blueprint as blueprint_module
from tpllama.blueprint import Blueprint, meta_model, named_linears
from tpllama.checkpoint.matching import check_tensors
from tpllama.checkpoint.open import TensorInfo, open_checkpoint
from tpllama.config import EngineConfig, UserError
from tpllama.kernels import cuda
from tpllama.llama_config import LlamaConfig
from tpllama.start import draw_blueprint

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def draw(make_checkpoint: MakeCheckpoint) -> Callable[..., Blueprint]:
    """`draw({config changes}, **engine)`: the blueprint of a checkpoint of TINY with changes."""

    def draw(changes: dict[str, Any] | None = None, **engine: Any) -> Blueprint:
        path = str(make_checkpoint(**(changes or {})))
        return draw_blueprint(EngineConfig(path, device="cpu", **engine), open_checkpoint(path))

    return draw


Draw = Callable[..., Blueprint]


def test_the_report_has_the_contracts_fields(draw: Draw) -> None:
    report = json.loads(json.dumps(draw(tp=2, torchao_config="int4wo-64").report()))
    assert list(report) == [
        "model", "tp", "recipe", "legal_tp", "bytes_per_rank", "kv_bytes_per_token_per_rank",
        "kv_cache_bytes_per_rank", "layers",
    ]  # fmt: skip
    assert (report["tp"], report["recipe"], report["legal_tp"]) == (2, "int4wo-64", [1, 2, 3, 4, 5, 6])
    assert len(report["bytes_per_rank"]) == len(report["kv_bytes_per_token_per_rank"]) == 2
    for layer in report["layers"]:
        assert list(layer) == [
            "name", "plan", "global_shape", "local_shapes", "action", "recipe", "group_size", "reason", "kernel",
        ]  # fmt: skip
        assert layer["plan"] in ("column", "row", "vocab", "replicate")
        assert layer["action"] in ("quantized", "kept")
        assert len(layer["local_shapes"]) == 2


def test_each_layer_is_reported_with_its_plan_and_fate(draw: Draw) -> None:
    layers = {layer["name"]: layer for layer in draw(tp=2, torchao_config="int4wo-64").report()["layers"]}
    # in_features 96: groups of 32. Two of three key-value heads on the first rank: 4 of 6 query heads of 32.
    q_proj = layers["model.layers.0.self_attn.q_proj"]
    assert q_proj.pop("kernel")
    assert q_proj == {
        "name": "model.layers.0.self_attn.q_proj",
        "plan": "column",
        "global_shape": [192, 96],
        "local_shapes": [[128, 96], [64, 96]],
        "action": "quantized",
        "recipe": "int4wo-32",
        "group_size": 32,
        "reason": "in_features 96 is not a multiple of 64, group size 32 is used",
    }
    assert layers["model.layers.1.self_attn.o_proj"]["plan"] == "row"
    assert layers["model.layers.1.self_attn.o_proj"]["local_shapes"] == [[96, 128], [96, 64]]
    assert layers["model.layers.1.self_attn.o_proj"]["group_size"] == 64
    assert layers["model.layers.0.mlp.down_proj"]["local_shapes"] == [[96, 112], [96, 112]]
    assert layers["model.embed_tokens"]["plan"] == layers["lm_head"]["plan"] == "vocab"
    assert layers["model.embed_tokens"]["reason"] == "not a linear layer"
    assert layers["model.embed_tokens"]["kernel"] is None
    assert layers["lm_head"]["action"] == "kept"
    assert layers["lm_head"]["group_size"] is None
    assert layers["model.norm"]["plan"] == "replicate"
    assert layers["model.norm"]["local_shapes"] == [[96], [96]]


def test_a_gpu_without_a_kernel_is_reported(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is described: none is here."""
    checkpoint = open_checkpoint(str(make_checkpoint()))

    def reasons(recipe: str, capability: tuple[int, int], **fields: Any) -> set[str]:
        for module in (cuda, blueprint_module):
            monkeypatch.setattr(module, "capability", lambda: capability)
        engine = EngineConfig(model=checkpoint.path.name, torchao_config=recipe, **fields)
        rows = Blueprint.of(engine, checkpoint, "cuda").report()["layers"]
        return {row["reason"] for row in rows if row["action"] == "quantized"}

    assert reasons("int4wo-32", (9, 0)) == reasons("int8dq", (7, 5)) == {"as asked"}
    old = "dequantized on each call, for its kernel needs compute capability 8.0, this GPU has 7.5"
    assert reasons("int4wo-32", (7, 5)) == {old}
    assert f"in_features 96 is not a multiple of 64, group size 32 is used; {old}" in reasons("int4wo-64", (7, 5))
    wide = "dequantized on each call, for its kernel takes bfloat16, not float32"
    assert reasons("8da4w-32", (9, 0), dtype="float32") == {wide}
    with pytest.raises(UserError, match=r"'fp8dq-per_row' on a GPU of 8.6, expected a GPU of compute capability 8.9"):
        reasons("fp8dq-per_row", (8, 6))
    assert reasons("fp8dq-per_row", (8, 9)) == {"as asked"}


@pytest.mark.parametrize("tied", [True, False])
def test_every_module_with_a_weight_is_reported_once(draw: Draw, tied: bool) -> None:
    blueprint = draw({"tie_word_embeddings": tied}, tp=3)
    names = [layer["name"] for layer in blueprint.report()["layers"]]
    model = meta_model(blueprint.config)
    with_weight = [
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    assert sorted(names) == sorted(with_weight)
    assert {name for name, _ in named_linears(model)} <= set(names)


def test_the_command_prints_the_report(
    draw: Draw, make_checkpoint: MakeCheckpoint, tpllama: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    arguments = ("--model", make_checkpoint(), "--device", "cpu", "--torchao-config", "8da4w-32", "--tp", "4")
    done = tpllama("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == draw(tp=4, torchao_config="8da4w-32").report()


def test_tied_embeddings_are_held_once_unless_the_head_is_quantized(draw: Draw) -> None:
    table = 211 * 96 * 2
    apart, tied = (draw({"tie_word_embeddings": each}).bytes_per_rank()[0] for each in (False, True))
    assert apart - tied == table
    kept, quantized = (
        draw({"tie_word_embeddings": True}, torchao_config="int8wo", quantize_lm_head=head).bytes_per_rank()[0]
        for head in (False, True)
    )
    assert quantized - kept == 211 * 96 + 211 * 2


def test_one_ranks_bytes_are_all_parameters(draw: Draw) -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        blueprint = draw(dtype=dtype)
        parameters = sum(parameter.numel() for parameter in meta_model(blueprint.config).parameters())
        assert blueprint.bytes_per_rank() == [parameters * size]


def test_heads_tokens_and_cache_of_each_rank(draw: Draw) -> None:
    blueprint = draw(tp=2)
    assert [blueprint.heads(rank) for rank in range(2)] == [(4, 2), (2, 1)]
    assert [blueprint.owned_tokens(rank) for rank in range(2)] == [(0, 106), (106, 211)]
    assert blueprint.kv_bytes_per_token_per_rank() == [2 * 2 * 32 * 2 * heads for heads in (2, 1)]
    replicated = draw(tp=5)
    assert [replicated.heads(rank) for rank in range(5)] == [(1, 1), (1, 1), (1, 1), (1, 1), (2, 1)]
    assert len(set(replicated.kv_bytes_per_token_per_rank())) == 1


def test_overrides_change_the_model(draw: Draw) -> None:
    shallow = draw(json_model_override_args={"num_hidden_layers": 1}, load_format="dummy")
    assert shallow.config.num_layers == 1
    assert not any("layers.1" in name for name in shallow.shapes)


def test_the_context_is_the_models_own_or_less(draw: Draw) -> None:
    assert draw().context_length == 128
    assert draw(max_seq_len=64).context_length == 64
    assert draw(max_seq_len=128).context_length == 128
    with pytest.raises(UserError, match="found max_seq_len 129, expected at most the model's 128, lower it"):
        draw(max_seq_len=129)


def test_rope_types_and_the_context(draw: Draw) -> None:
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}
    assert draw(json_model_override_args=dynamic).context_length == 512
    assert draw(json_model_override_args=dynamic, max_seq_len=300).context_length == 300
    # The others' configs name the stretched length themselves.
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    assert draw(json_model_override_args=linear).context_length == 128


CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
)
SHAPES = {name: tuple(parameter.shape) for name, parameter in meta_model(CONFIG).named_parameters()}
NORM = "model.layers.1.input_layernorm.weight"


def found(changes: dict[str, tuple[int, ...] | None] | None = None) -> dict[str, TensorInfo]:
    """A complete checkpoint's tensors, with changes; None takes one away."""
    shapes = SHAPES | (changes or {})
    return {name: TensorInfo(shape) for name, shape in shapes.items() if shape is not None}


def test_a_complete_checkpoint_fits() -> None:
    check_tensors(CONFIG, SHAPES, found())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"found no tensor {NORM} in the checkpoint, expected {len(SHAPES)}, complete the checkpoint"),
        (
            {NORM: None, "model.norm.weight": None},
            f"found no tensor {NORM} and 1 more in the checkpoint, expected {len(SHAPES)}, complete the checkpoint",
        ),
        (
            {NORM: None, "model.layers.1.input_norm.weight": (8,)},
            f"found no tensor {NORM} in the checkpoint (found model.layers.1.input_norm.weight), "
            f"expected {len(SHAPES)}, complete the checkpoint",
        ),
        (
            {"model.layers.2.input_layernorm.weight": (8,)},
            "found tensor model.layers.2.input_layernorm.weight in the checkpoint, which this Llama doesn't have, "
            "expected only its own, check the config",
        ),
        (
            {"model.layers.0.self_attn.q_norm.weight": (8,), "extra": (1,)},
            "found tensor model.layers.0.self_attn.q_norm.weight and 1 more in the checkpoint, which this Llama "
            "doesn't have, expected only its own, check the config",
        ),
        (
            {NORM: (9,)},
            f"found tensor {NORM} of shape [9], expected [8] by the config, "
            f"check that config and weights belong together",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight": (8, 16)},
            "found tensor model.layers.0.mlp.up_proj.weight of shape [8, 16], expected [16, 8] by the config, "
            "check that config and weights belong together",
        ),
    ],
    ids=["missing", "two missing", "misnamed", "extra", "two extra", "misshaped", "transposed"],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, tuple[int, ...] | None], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_tensors(CONFIG, SHAPES, found(changes))
    assert str(error.value) == message


def test_a_missing_head_has_its_own_remedy() -> None:
    with pytest.raises(UserError, match=r"found no tensor lm_head.weight.*\"tie_word_embeddings\": true"):
        check_tensors(CONFIG, SHAPES, found({"lm_head.weight": None}))


def test_buffers_that_old_checkpoints_store_are_ignored() -> None:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (2,) for layer in (0, 1)}
    check_tensors(CONFIG, SHAPES, found({**buffers, "model.rotary_emb.inv_freq": (2,)}))


def test_a_tied_models_stored_head_is_ignored(make_checkpoint: MakeCheckpoint) -> None:
    path = str(make_checkpoint())  # stores its own head
    overrides = {"tie_word_embeddings": True}
    blueprint = draw_blueprint(
        EngineConfig(path, device="cpu", json_model_override_args=overrides), open_checkpoint(path)
    )
    assert "lm_head.weight" not in blueprint.shapes


def test_tensors_are_not_asked_for_under_dummy_weights(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    (tmp_path / "config.json").write_text((make_checkpoint() / "config.json").read_text())
    engine = EngineConfig(str(tmp_path), load_format="dummy", device="cpu")
    assert draw_blueprint(engine, open_checkpoint(str(tmp_path), weights=False)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tp": 7}, "found tensor-parallel degree 7, expected 1 to 6"),
        ({"torchao_config": "int4"}, "found torchao config 'int4'"),
        ({"torchao_config": "fp8dq-per_row"}, "found torchao config 'fp8dq-per_row' on cpu"),
        ({"torchao_config": "int4wo-128", "strict": True}, "found layer model.layers.0.self_attn.q_proj that can't"),
    ],
)
def test_what_cannot_work_is_said_before_weights_are_read(draw: Draw, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw(**engine)
