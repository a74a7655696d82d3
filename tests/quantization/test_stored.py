"""Weights that others quantized: used as they are where a recipe makes such, refused by name where none does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from saving import quantize_to, weights_of
from torch import Tensor
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

from tpllama import LLM
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig, UserError
from tpllama.quantization.neutral import description
from tpllama.quantization.quantize import quantize
from tpllama.quantization.recipes import RECIPES, Recipe
from tpllama.quantization.stored import recognize
from tpllama.start import draw_blueprint

MakeCheckpoint = Callable[..., Path]
Shapes = dict[str, tuple[int, ...]]
TOKENS = [[1, 5, 9, 20, 33, 4, 77, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
INT4 = torch.int4  # type: ignore[attr-defined]
KNOWN: dict[str, Any] = {
    "int8 per row": Int8WeightOnlyConfig(granularity=PerRow()),
    "int8 per tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8dq": Int8DynamicActivationInt8WeightConfig(),
    "8da4w": Int8DynamicActivationIntxWeightConfig(INT4, PerGroup(32)),
    "8da4w per row": Int8DynamicActivationIntxWeightConfig(INT4, PerAxis(0)),
    "8da4w asymmetric": Int8DynamicActivationIntxWeightConfig(
        INT4, PerGroup(32), weight_mapping_type=MappingType.ASYMMETRIC
    ),
    "fp8 per row": Float8WeightOnlyConfig(granularity=PerRow()),
    "fp8 per tensor": Float8WeightOnlyConfig(granularity=PerTensor()),
}
DYNAMIC = ("int8dq", "8da4w", "8da4w per row", "8da4w asymmetric")
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "int8 per group": (Int8WeightOnlyConfig(granularity=PerGroup(32)), ("Int8Tensor", "[1, 32]")),
    "int8dq asymmetric": (
        Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC),
        ("Int8Tensor", "ASYMMETRIC"),
    ),
    "intx weight-only": (IntxWeightOnlyConfig(INT4, PerGroup(32)), ("IntxUnpackedToInt8Tensor", "activations None")),
    "intx of 8 bits": (
        Int8DynamicActivationIntxWeightConfig(torch.int8, PerGroup(32)),
        ("IntxUnpackedToInt8Tensor", "int8"),
    ),
    "fp8 e5m2": (Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2), ("float8_e5m2",)),
    "embedding": (
        FqnToConfig({"model.embed_tokens": IntxWeightOnlyConfig(torch.int8, PerAxis(0))}),
        ("model.embed_tokens.weight",),
    ),
}


def save_by_transformers(model: Path, config: Any, out: Path, form: str, dtype: torch.dtype = torch.float32) -> Path:
    """`model` quantized by transformers and torchao, saved in one of the forms that people have."""
    quantization = TorchAoConfig(config, include_input_output_embeddings=isinstance(config, FqnToConfig))
    quantized = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=quantization)
    quantized.save_pretrained(out, max_shard_size="60KB")
    if form == "safetensors":
        assert len(list(out.glob("*.safetensors"))) > 2
        return out
    for file in out.glob("model*"):
        file.unlink()
    state = quantized.state_dict()
    if form == "bin":
        torch.save(state, out / "pytorch_model.bin")
        return out
    weight_map = {}
    for number in (1, 2):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        part = dict(list(state.items())[number - 1 :: 2])
        torch.save(part, out / file)
        weight_map |= dict.fromkeys(part, file)
    (out / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return out


@pytest.fixture(scope="module")
def model(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(attention_bias=False, mlp_bias=False)


@torch.no_grad()
def logits_by_transformers(path: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor(TOKENS)).logits


def logits(path: Path, tp: int = 1, dtype: str = "float32") -> Tensor:
    with LLM(str(path), tp=tp, dtype=dtype, device="cpu") as llm:
        return llm.logits(TOKENS)


def assert_near(found: Tensor, expected: Tensor, is_dynamic: bool = False) -> None:
    """As test_matrix.py: dynamic recipes round activations, where the last bit may decide for a whole step."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < (5e-2 if is_dynamic else 1e-5)
    assert (errors < 1e-5).double().mean() >= 0.25


@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_what_transformers_saved(model: Path, tmp_path: Path, name: str) -> None:
    saved = save_by_transformers(model, KNOWN[name], tmp_path / "saved", "safetensors")
    expected = logits_by_transformers(saved)
    assert_near(logits(saved), expected, name in DYNAMIC)
    # And not the plain model's, nearly.
    assert (expected - logits_by_transformers(model)).norm() > 1e-3 * expected.norm()
    for form in ("bin", "sharded bin"):
        pickled = save_by_transformers(model, KNOWN[name], tmp_path / form, form)
        assert torch.equal(logits(pickled), logits(saved)), form


def test_three_ranks_have_ones_logits(model: Path, tmp_path: Path) -> None:
    names = {
        "q_proj": "fp8 per tensor",
        "o_proj": "int8 per tensor",
        "up_proj": "fp8 per row",
        "down_proj": "int8 per row",
    }
    config = FqnToConfig({rf"re:.*\.{layer}": KNOWN[name] for layer, name in names.items()})
    saved = save_by_transformers(model, config, tmp_path / "saved", "sharded bin")
    one = logits(saved)
    assert_near(one, logits_by_transformers(save_by_transformers(model, config, tmp_path / "other", "safetensors")))
    assert_near(logits(saved, tp=3), one)


@pytest.mark.slow
def test_three_ranks_have_ones_logits_with_dynamic_activations(model: Path, tmp_path: Path) -> None:
    names = {"q_proj": "int8dq", "o_proj": "8da4w per row", "up_proj": "int8dq", "down_proj": "8da4w asymmetric"}
    config = FqnToConfig({rf"re:.*\.{layer}": KNOWN[name] for layer, name in names.items()})
    saved = save_by_transformers(model, config, tmp_path / "saved", "safetensors")
    one = logits(saved)
    assert_near(one, logits_by_transformers(saved), is_dynamic=True)
    assert_near(logits(saved, tp=3), one, is_dynamic=True)


@pytest.mark.parametrize("name", ["int8dq", "fp8 per tensor"])
def test_pickled_weights_in_a_process_that_has_not_imported_torchao(model: Path, tmp_path: Path, name: str) -> None:
    """Their settings are classes of torchao's too, which torch.load makes only once it knows them."""
    saved = save_by_transformers(model, KNOWN[name], tmp_path / "saved", "bin")
    script = "import sys\nfrom tpllama.checkpoint.open import open_checkpoint\n"
    script += f"assert 'torchao' not in sys.modules\nassert open_checkpoint({str(saved)!r}).quantized\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bfloat16_weights_are_used_as_they_are(model: Path, tmp_path: Path) -> None:
    for name in ("int8 per tensor", "8da4w asymmetric", "fp8 per row"):
        saved = save_by_transformers(model, KNOWN[name], tmp_path / name, "safetensors", torch.bfloat16)
        files = sorted(saved.glob("*.safetensors"))
        stored = {key: value for file in files for key, value in read_file(file).items()}
        for weight, parts in weights_of(saved, dtype="bfloat16").items():
            module = weight.removesuffix(".weight")
            for part, values in parts.items() if "qdata" in parts else ():
                expected = stored[f"{module}._weight_{part}"]
                assert torch.equal(values.float(), expected.float().expand(values.shape)), (weight, part)


def read_file(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as read:
        return {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_what_no_recipe_makes_is_refused_by_name(model: Path, tmp_path: Path, name: str, form: str) -> None:
    config, words = REFUSED[name]
    saved = save_by_transformers(model, config, tmp_path / "saved", form)
    with pytest.raises(UserError, match=r"^found [^\n]*, expected [^\n]*$") as caught:
        weights_of(saved)
    assert all(word in str(caught.value) for word in words), caught.value


def recipe_named(name: str) -> Recipe:
    recipe = RECIPES[name]
    assert recipe is not None
    return recipe


def said_of(name: str) -> tuple[str, dict[str, Any], Shapes, dict[str, str]]:
    """Class, attributes, shapes and dtypes of the parts that torchao writes for a weight of a recipe [64, 128]."""
    weight = quantize(torch.randn(64, 128), recipe_named(name), slice(0, 128))
    said = json.loads(description(weight))
    parts = {part: getattr(weight, part) for part in said["_tensor_data_names"]}
    shapes = {part: tuple(values.shape) for part, values in parts.items()}
    return said["_type"], said["_data"], shapes, {part: str(values.dtype)[6:] for part, values in parts.items()}


ON_CPU = [
    name for name, recipe in RECIPES.items() if recipe and "cpu" in recipe.family.devices and name != "int4wo-256"
]


@pytest.mark.parametrize("name", ON_CPU)
def test_every_recipe_is_recognized(name: str) -> None:
    kind, attributes, shapes, dtypes = said_of(name)
    form = recognize("a.weight", kind, attributes, shapes, dtypes)
    assert (form.kind, form.recipe, form.shape, form.one_scale) == (kind, recipe_named(name), (64, 128), False)
    weight = quantize(torch.randn(64, 128), recipe_named(name), slice(0, 128))
    _, objects = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    assert recognize("a.weight", kind, objects, shapes, dtypes) == form
    half = dtypes | {part: "bfloat16" for part, dtype in dtypes.items() if dtype == "float32"}
    assert recognize("a.weight", kind, attributes, shapes, half) == form
    short = {"int8": "i8", "float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3"}
    for known in (dtypes, half):
        spelled = {part: short[dtype] for part, dtype in known.items()}
        assert recognize("a.weight", kind, attributes, shapes, spelled) == form


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", ["i16", "float8_e5m2", "f8_e5m2", "bool", "u8", "float32", "i4", ""])
def test_parts_of_dtypes_that_no_recipe_makes(name: str, dtype: str) -> None:
    kind, attributes, shapes, dtypes = said_of(name)
    for part, usual in dtypes.items():
        if (dtype == "float32" and part != "qdata" and usual != "int8") or (dtype == "u8" and kind == "Int4Tensor"):
            continue
        spelled = {"i16": "int16", "u8": "uint8", "i4": "int4", "f8_e5m2": "float8_e5m2"}.get(dtype, dtype)
        words = (
            rf"^found a\.weight stored as torchao's {kind}: it has a {part} of dtype torch\.{spelled}, where .*{usual}"
        )
        with pytest.raises(UserError, match=words):
            recognize("a.weight", kind, attributes, shapes, dtypes | {part: dtype})


def act(**changes: Any) -> dict[str, Any]:
    """Activations as a Float8Tensor for fp8dq describes them."""
    data = {
        "float8_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
        "granularity": {"_type": "PerRow", "_data": {"dim": -1}},
        "mm_config": {"_type": "Float8MMConfig", "_data": {"emulate": False}},
        "hp_value_lb": None,
        "hp_value_ub": None,
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
    }
    return {"act_quant_kwargs": {"_type": "QuantizeTensorToFloat8Kwargs", "_data": data | changes}}


PER_TENSOR: dict[str, Any] = {"granularity": {"_type": "PerTensor", "_data": {}}}


def test_fp8_with_dynamic_activations() -> None:
    kind, attributes, shapes, dtypes = said_of("fp8wo")
    assert recognize("a.weight", kind, attributes | act(), shapes, dtypes).recipe.name == "fp8dq-per_row"
    whole, one = attributes | {"block_size": [64, 128]}, shapes | {"scale": (1, 1)}
    form = recognize("a.weight", kind, whole | act(**PER_TENSOR), one, dtypes)
    assert (form.recipe.name, form.one_scale) == ("fp8dq-per_tensor", True)


@pytest.mark.parametrize(
    ("recipe", "changes", "shapes", "word"),
    [
        ("fp8wo", act(**PER_TENSOR), {}, "activations are quantized by"),
        ("fp8wo", act() | {"block_size": [64, 128]}, {"scale": (1, 1)}, "activations are quantized by"),
        ("fp8wo", act(float8_dtype={"_type": "torch.dtype", "_data": "float8_e5m2"}), {}, "float8_e5m2"),
        ("fp8wo", act(hp_value_ub=1200.0), {}, "clamped"),
        ("fp8wo", {"act_quant_kwargs": "some"}, {}, "'some'"),
        ("fp8wo", {}, {"zero_point": (64, 1)}, "a part zero_point"),
        ("int8wo", {"act_quant_kwargs": [1]}, {}, "[1]"),
        ("int8dq", {"block_size": [64, 128]}, {"scale": (1, 1), "zero_point": (1, 1)}, "one scale a token"),
        ("int8wo", {"block_size": [64]}, {}, "[64]"),
        ("int8wo", {"block_size": None}, {}, "None"),
        ("int8wo", {"block_size": [0, 128]}, {}, "[0, 128]"),
        ("int8wo", {"block_size": [-1, 128]}, {}, "[-1, 128]"),
        ("int8wo", {"block_size": ["1", "128"]}, {}, "['1', '128']"),
        ("int8wo", {"block_size": [2, 128]}, {}, "[2, 128]"),
        ("int8wo", {}, {"scale": (64,)}, "[64]"),
        ("int8wo", {}, {"qdata": (64,)}, "no matrix"),
        ("int8wo", {}, {"act_pre_scale": (128,)}, "act_pre_scale"),
        ("8da4w-32", {"block_size": [1, 48]}, {}, "[1, 48]"),
        ("8da4w-32", {"block_size": [2, 32]}, {}, "[2, 32]"),
        ("8da4w-32", {"block_size": [1, 1]}, {}, "[1, 1]"),
        ("8da4w-32", {"target_dtype": {"_type": "torch.dtype", "_data": "int3"}}, {}, "int3"),
        ("int4wo-32", {"activation_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}, {}, "float8_e4m3fn"),
        ("int4wo-32", {}, {"scale": (64, 4)}, "[4, 64]"),
    ],
    ids=str,
)
def test_attributes_that_no_recipe_makes(recipe: str, changes: dict[str, Any], shapes: Shapes, word: str) -> None:
    kind, attributes, usual, dtypes = said_of(recipe)
    with pytest.raises(UserError, match=rf"^found a\.weight stored as torchao's {kind}: .*, expected ") as caught:
        recognize("a.weight", kind, attributes | changes, usual | shapes, dtypes)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("Int4TilePackedTo4dTensor", "packed for one GPU kernel"),
        ("Int4PlainInt32Tensor", "packed for one device"),
        ("AffineQuantizedTensor", "first version"),
        ("NVFP4Tensor", "no recipe makes such"),
        ("", "no recipe makes such"),
    ],
)
def test_classes_that_no_recipe_makes(kind: str, word: str) -> None:
    with pytest.raises(UserError, match=rf"^found a\.weight stored as torchao's {kind}: .*{word}.*, expected "):
        recognize("a.weight", kind, {}, {"qdata": (8, 8), "scale_and_zero": (8, 8, 2)}, {"qdata": "int32"})


def test_a_description_nested_without_end() -> None:
    kind, attributes, shapes, dtypes = said_of("int8wo")
    deep: Any = 1
    for _ in range(3000):
        deep = {"_data": {"a": deep}}
    with pytest.raises(UserError, match="nested too deeply"):
        recognize("a.weight", kind, attributes | {"reduce_range": deep}, shapes, dtypes)


def change_shards(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as read:
            metadata = read.metadata()
        tensors = read_file(file)
        change(tensors, metadata)
        save_file(tensors, file, metadata)


def test_int4_packed_for_a_gpu_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    saved = quantize_to(tmp_path / "saved", model, "int4wo-32")
    (saved / "tpllama_manifest.json").unlink()
    name = "model.layers.0.mlp.up_proj"

    def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        said = json.loads(metadata[f"{name}.weight"])
        said |= {"_type": "Int4TilePackedTo4dTensor", "_tensor_data_names": ["qdata", "scale_and_zero"]}
        metadata[f"{name}.weight"] = json.dumps(said)
        tensors[f"{name}._weight_scale_and_zero"] = torch.stack(
            [tensors.pop(f"{name}._weight_{part}") for part in ("scale", "zero_point")], dim=-1
        )

    change_shards(saved, pack)
    with pytest.raises(UserError, match=rf"^found {name}\.weight stored as torchao's Int4TilePackedTo4dTensor: it is"):
        weights_of(saved)


def test_int8_weights_with_zero_points(model: Path, tmp_path: Path) -> None:
    """Files may leave them out, or hold zeros; the kernels know no others."""
    saved = quantize_to(tmp_path / "saved", model, "int8wo")
    (saved / "tpllama_manifest.json").unlink()
    part = "model.layers.0.mlp.up_proj._weight_zero_point"
    expected = weights_of(saved)["model.layers.0.mlp.up_proj.weight"]
    assert not expected["zero_point"].any()

    def leave_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for name in [name for name in tensors if name.endswith("_zero_point")]:
            del tensors[name]
        for name, said in metadata.items():
            metadata[name] = said.replace('"zero_point", ', "").replace(', "zero_point"', "")

    without = Path(shutil.copytree(saved, tmp_path / "without"))
    change_shards(without, leave_out)
    found = weights_of(without)["model.layers.0.mlp.up_proj.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    change_shards(saved, lambda tensors, _: tensors[part][7].fill_(1))
    words = (
        r"^found model\.layers\.0\.mlp\.up_proj\.weight stored as torchao's Int8Tensor with a zero_point that is not 0"
    )
    with pytest.raises(UserError, match=words):
        weights_of(saved)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_dtypes_are_checked_before_any_weight_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    saved = save_by_transformers(model, KNOWN["int8 per row"], tmp_path / "saved", form)
    part = "model.layers.1.mlp.down_proj._weight_scale"
    if form == "safetensors":
        change_shards(saved, lambda tensors, _: tensors.update({k: v.int() for k, v in tensors.items() if k == part}))
    else:
        state = torch.load(saved / "pytorch_model.bin", weights_only=False)
        weight = state["model.layers.1.mlp.down_proj.weight"]
        weight.scale = weight.scale.int()
        torch.save(state, saved / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(saved))
    monkeypatch.setattr(checkpoint, "read", None)
    words = r"^found model\.layers\.1\.mlp\.down_proj\.weight stored .*: it has a scale of dtype torch\.int32, where "
    with pytest.raises(UserError, match=words):
        draw_blueprint(EngineConfig(str(saved), device="cpu"), checkpoint)


def strict_logits(path: Path) -> Tensor:
    with LLM(str(path), dtype="float32", device="cpu", strict=True) as llm:
        return llm.logits(TOKENS)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_torchaos_rows_of_zeros_in_float8_are_zeros(model: Path, tmp_path: Path, form: str) -> None:
    """torchao writes NaN there, beside a scale of zero."""
    zeroed = Path(shutil.copytree(model, tmp_path / "zeroed"))
    weight = "model.layers.0.mlp.up_proj.weight"
    change_shards(zeroed, lambda tensors, _: tensors[weight][5].fill_(0))
    saved = save_by_transformers(zeroed, KNOWN["fp8 per row"], tmp_path / "saved", form)
    part = "model.layers.0.mlp.up_proj._weight_qdata"
    read = open_checkpoint(str(saved)).read(part, (slice(5, 6), slice(0, 96)))
    assert read.float().isnan().all()
    with LLM(str(zeroed), dtype="float32", device="cpu", torchao_config="fp8wo") as llm:
        expected = llm.logits(TOKENS)
    assert expected.isfinite().all()
    assert torch.equal(logits(saved), expected)
    assert torch.equal(strict_logits(saved), expected)
    assert not weights_of(saved)[weight]["qdata"][5].float().any()


@pytest.mark.parametrize(
    ("name", "part"),
    [("fp8 per row", "qdata"), ("fp8 per row", "scale"), ("int8 per row", "scale"), ("8da4w", "scale")],
)
def test_values_that_are_no_numbers_in_stored_weights_under_strict(
    model: Path, tmp_path: Path, name: str, part: str
) -> None:
    saved = save_by_transformers(model, KNOWN[name], tmp_path / "saved", "safetensors")
    strict_logits(saved)
    changed = f"model.layers.1.mlp.up_proj._weight_{part}"

    def change(tensors: dict[str, Tensor], _: object) -> None:
        if changed in tensors:
            tensors[changed][7, 0] = torch.nan

    change_shards(saved, change)
    logits(saved)
    with pytest.raises(UserError, match=r"no finite number in tensor model\.layers\.1\.mlp\.up_proj\.weight, "):
        strict_logits(saved)


def test_the_first_versions_pickles(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that torchao has no more. What is unknown is never called, but named."""
    module = types.ModuleType("torchao.dtypes.affine_quantized_tensor")
    kind = type("AffineQuantizedTensor", (), {"__module__": module.__name__, "__qualname__": "AffineQuantizedTensor"})
    module.AffineQuantizedTensor = kind  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        torch.save({"model.layers.0.mlp.up_proj.weight": kind()}, tmp_path / "pytorch_model.bin")
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"^found content .*AffineQuantizedTensor.*, expected [^\n]*$"):
        open_checkpoint(str(tmp_path))


def test_a_recipe_asked_for_may_repeat_the_stored_one_and_never_contradict_it(model: Path, tmp_path: Path) -> None:
    saved = save_by_transformers(model, KNOWN["int8 per row"], tmp_path / "saved", "safetensors")
    weights_of(saved, torchao_config="int8wo")
    for other in ("int8dq", "int4wo-32", "fp8wo"):
        with pytest.raises(UserError, match=rf"q_proj stored as int8wo, expected what --torchao-config {other} makes"):
            weights_of(saved, torchao_config=other)
    with pytest.raises(UserError, match="found lm_head stored as unquantized, expected what"):
        weights_of(saved, torchao_config="int8wo", quantize_lm_head=True)
    (tmp_path / "map.json").write_text('{"lm_head": "none", "*.q_proj": "int8wo", "*": "none"}')
    with pytest.raises(UserError, match="k_proj stored as int8wo, expected what"):
        weights_of(saved, torchao_config=f"@{tmp_path / 'map.json'}")
    weights_of(saved, torchao_config="none")


def test_a_quantized_model_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    saved = save_by_transformers(model, KNOWN["int8 per row"], tmp_path / "saved", "safetensors")
    with pytest.raises(UserError, match="quantized already, expected an original"):
        quantize_to(tmp_path / "out", saved, "int8wo")
    assert not (tmp_path / "out").exists()
