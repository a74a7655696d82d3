"""Fused layers: the plain ones' results, whatever their linears are, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels.making import ON_CPU, make, neutral
from torch import Tensor, nn

from tpllama import LLM, SamplingParams
from tpllama.blueprint import meta_model
from tpllama.build import weight_bytes
from tpllama.engine.batch import Batch, Chunk
from tpllama.engine.cache import PagedCache
from tpllama.engine.memory import CacheShape
from tpllama.kernels import fused, tiles
from tpllama.kernels.layer import FusedLayer, FusedNorm, join
from tpllama.kernels.linear import DequantizingLinear
from tpllama.kernels.pack import pack
from tpllama.kernels.pages import WeightMemory
from tpllama.llama_config import LlamaConfig
from tpllama.model.llama import DecoderLayer, Llama

pytestmark = pytest.mark.skipif(not fused.is_available(), reason="no C++ compiler")
BFLOAT16 = torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "odd": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    "wide heads": {"hidden_size": 64, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 80},
}
# Relative RMS between two ways to compute layers in bfloat16. Measured: 0 to 4e-3, where a difference in one bit went
# through two layers; dynamic recipes make a step of 1/256 of it.
NOISE = 2e-2


def random_model(recipe: str | dict[str, str], **changes: Any) -> Llama:
    """recipe: one for all linears, or by the name's last part."""
    fields = {"vocab_size": 97, "intermediate_size": 224, "num_hidden_layers": 2, "max_position_embeddings": 512}
    model = meta_model(LlamaConfig.from_hf(SHAPES["small"] | fields | changes))
    generator = torch.Generator().manual_seed(0)

    def values(like: Tensor, std: float) -> Tensor:
        return (torch.randn(like.shape, generator=generator) * std).to(BFLOAT16)

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            own = recipe if isinstance(recipe, str) else recipe.get(name.rsplit(".", 1)[-1], "none")
            weight = neutral(own, values(module.weight, module.weight.shape[1] ** -0.5))
            model.set_submodule(name, pack(weight, None if module.bias is None else values(module.bias, 0.1), "cpu"))
        elif getattr(module, "weight", None) is not None:
            std = 1.0 if isinstance(module, nn.Embedding) else 0.0
            fresh = values(module.weight, std) if std else 1 + values(module.weight, 0.2)  # type: ignore[arg-type]
            module.weight = nn.Parameter(fresh.to(BFLOAT16), requires_grad=False)
    return model


@torch.inference_mode()
def steps(model: Llama, stored: str = "bfloat16", is_alone: bool = False) -> Tensor:
    """Hidden states of a mixed run of steps: prompts, texts, both, in blocks that lie apart."""
    config = model.config
    shape = CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, stored, 4, 60)
    group, scale = config.num_heads // config.num_kv_heads, config.head_dim**-0.5
    cache = PagedCache(shape, group, scale, BFLOAT16, torch.device("cpu"), is_alone)
    generator = torch.Generator().manual_seed(1)
    found = []
    first, second, third = ((0, 5), (20, 5)), ((5, 15),), ((40, 2), (30, 3))
    for wanted in (
        [(0, 21, first)], [(21, 1, first), (0, 30, second)], [(22, 1, first), (30, 1, second), (0, 1, third)],
        [(23, 1, first), (31, 2, second), (1, 3, third)], [(24, 1, first)],
    ):  # fmt: skip
        chunks = tuple(Chunk(start, (0,) * count, 0, runs) for start, count, runs in wanted)
        positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        tokens = torch.randint(0, config.vocab_size, positions.shape, generator=generator)
        cache.begin(Batch(chunks), len(tokens))
        found.append(model(tokens, positions, positions + 1, cache.layers))
    return torch.cat(found)


def noise(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def fuse(model: Llama) -> None:
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = FusedLayer(layer)
    model.model.set_submodule("norm", FusedNorm(model.model.norm))


def fused_and_plain(model: Llama, **options: Any) -> tuple[Tensor, Tensor]:
    expected = steps(model, **options)
    fuse(model)
    return steps(model, **options), expected


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fused_model_computes_what_the_plain_one_does(shape: str, name: str) -> None:
    model = random_model(name, **SHAPES[shape], attention_bias=shape == "odd", mlp_bias=shape == "odd")
    held = weight_bytes(model)
    found, expected = fused_and_plain(model)
    assert weight_bytes(model) == held
    assert noise(found, expected) < NOISE
    assert any(each.joint is not None for each in (model.model.layers[0].qkv, model.model.layers[0].gate_up))


@pytest.mark.parametrize(
    "options", [{"stored": "int8"}, {"stored": "float8_e4m3fn"}, {"is_alone": True}], ids=["int8", "fp8", "alone"]
)
def test_any_cache(options: dict[str, Any]) -> None:
    assert noise(*fused_and_plain(random_model("none"), **options)) < NOISE


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "swish"])
def test_any_activation(activation: str) -> None:
    assert noise(*fused_and_plain(random_model("int8wo", hidden_act=activation))) < NOISE


def test_layers_of_mixed_recipes() -> None:
    model = random_model({"q_proj": "int8wo", "gate_proj": "int4wo-32", "down_proj": "int8dq"})
    assert noise(*fused_and_plain(model)) < NOISE
    assert [layer.qkv.joint for layer in model.model.layers] == [None, None]
    assert [layer.gate_up.joint for layer in model.model.layers] == [None, None]


@torch.inference_mode()
def test_without_a_cache_it_is_the_plain_layer() -> None:
    model = random_model("int8dq")
    ids = torch.arange(34).view(2, 17)
    expected = model(ids)
    plain = list(model.model.layers)
    fuse(model)
    assert noise(model(ids), expected) < 5e-3  # of the last norm alone
    for layer, old in zip(model.model.layers, plain, strict=True):
        assert isinstance(layer, FusedLayer)
        assert isinstance(old, DecoderLayer)
        assert layer.self_attn.q_proj is old.self_attn.q_proj


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def linears(name: str, sizes: tuple[int, ...] = (64, 32, 96), columns: int = 256, with_bias: bool = False) -> list[Any]:
    made = [make(name, (size, columns), BFLOAT16, seed) for seed, size in enumerate(sizes)]
    return [pack(weight, bias if with_bias else None, "cpu") for weight, bias in made]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ON_CPU)
def test_joint_linears_have_all_outputs_in_the_same_memory(name: str, with_bias: bool) -> None:
    parts = linears(name, with_bias=with_bias)
    held = weight_bytes(nn.ModuleList(parts))
    for count in (1, 5, 70):
        x = torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(BFLOAT16)
        alone = linears(name, with_bias=with_bias)
        expected = torch.cat([part(x) for part in alone], -1)
        joint = join(alone, WeightMemory().place)
        if joint is None:
            assert isinstance(alone[0], DequantizingLinear)
            return
        assert torch.equal(torch.cat([part(x) for part in alone], -1), expected)
        assert noise(joint(x), expected) < 1e-2
        assert weight_bytes(nn.ModuleList([*alone, joint])) == weight_bytes(joint) == held


def test_what_differs_is_not_joined() -> None:
    some_biases = linears("int8wo")[:1] + linears("int8wo", with_bias=True)[1:]
    hooked = linears("none")
    hooked[1].register_forward_hook(lambda _module, _inputs, output: output)
    agreeing = linears("int8dq")
    agreeing[0].agree_max = lambda extremes: extremes
    kinds = [linears("int8wo"), linears("int8dq"), linears("none"), linears("int4wo-32"), linears("int4wo-64")]
    for parts in (some_biases, hooked, agreeing, [each[i % 3] for i, each in enumerate(kinds)]):
        assert join(parts, as_it_is) is None
    assert join([linears("int4wo-32")[0], linears("int4wo-64")[0]], as_it_is) is None


@pytest.mark.parametrize("tp", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["none", "int8dq", "int4wo-32"])
def test_ranks_agree_with_the_reference_forward(make_checkpoint: Callable[..., Path], recipe: str, tp: int) -> None:
    """Uneven heads and biases: prompts' log-probabilities through fused layers and the cache against plain layers."""
    path = str(make_checkpoint())
    ids = [(7 * place + 3) % 211 for place in range(60)]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(path, tp=tp, dtype="bfloat16", torchao_config=recipe) as llm:
        [output] = llm.generate([ids], params)
        expected = llm.engine.logits([ids])[0].log_softmax(-1)
    found = [each.logprob for each in output.prompt_logprobs if each is not None]
    wanted = expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert len(found) == len(ids) - 1
    assert noise(torch.tensor(found) - wanted.mean(), wanted - wanted.mean()) < 0.1


def test_who_gets_fused_layers(make_checkpoint: Callable[..., Path]) -> None:
    path = str(make_checkpoint())

    def layer(**options: Any) -> Any:
        with LLM(path, **options) as llm:
            return llm.engine.executor.model.model.layers[0]  # type: ignore[attr-defined]

    found = layer(dtype="bfloat16")
    assert isinstance(found, FusedLayer)
    # One memory for the joint weight and its parts.
    attention, held = found.self_attn, "tiles" if tiles.is_there() else "weight"
    parts = [getattr(proj, held) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)]
    whole = getattr(found.qkv.joint, held).untyped_storage()
    assert {part.untyped_storage().data_ptr() for part in parts} == {whole.data_ptr()}
    assert whole.nbytes() == sum(part.nbytes for part in parts)
    assert isinstance(layer(dtype="float32"), DecoderLayer)
    with patch.object(fused, "is_available", lambda: False):
        assert isinstance(layer(dtype="bfloat16"), DecoderLayer)
