"""The plan table, and the DTensors that it makes of a meta model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpllama.blueprint import Blueprint, meta_model
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import EngineConfig, UserError
from tpllama.llama_config import LlamaConfig
from tpllama.parallel.plan import Placement, llama_plan, style_of
from tpllama.parallel.shard import RangeShard, distribute_parameter, owned_slices, shard

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_3_70B = LLAMA_3_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LLAMA_3_405B = LLAMA_3_8B | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
BILLIONS = {"8B": LLAMA_3_8B, "70B": LLAMA_3_70B, "405B": LLAMA_3_405B}


@contextmanager
def fake_mesh(size: int, rank: int) -> Iterator[DeviceMesh]:
    """A mesh of `size` ranks of which this process is the only one: enough to place meta tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which takes this rank's mesh for the next one's


def test_every_linear_and_the_embedding_are_in_the_plan(config: LlamaConfig) -> None:
    plan = llama_plan(config, 2)
    for name, module in meta_model(config).named_modules():
        style = style_of(plan, name)
        assert (style is not None) == isinstance(module, nn.Linear | nn.Embedding), name


def test_every_pattern_names_a_module(config: LlamaConfig) -> None:
    names = [name for name, _ in meta_model(config).named_modules()]
    plan = llama_plan(config, 2)
    assert {id(style_of(plan, name)) for name in names} >= {id(style) for style in plan.values()}


def test_what_the_plan_does_not_name_is_replicated(config: LlamaConfig) -> None:
    placement = Placement.of(llama_plan(config, 3), "model.norm", (96,), 3)
    assert placement == Placement("replicate", ((96,), (96,), (96,)))


def test_layers_of_two_digits_are_matched(config: LlamaConfig) -> None:
    plan = llama_plan(config, 2)
    assert style_of(plan, "model.layers.17.mlp.down_proj") is style_of(plan, "model.layers.0.mlp.down_proj")
    assert style_of(plan, "model.layers.17.mlp") is None


def test_an_impossible_degree_is_an_error(config: LlamaConfig) -> None:
    with pytest.raises(UserError, match="found tensor-parallel degree 7, expected 1 to 6"):
        llama_plan(config, 7)


@pytest.mark.parametrize("size", [2, 3])
def test_real_ranks_own_what_the_plan_says(run_ranks: Callable[..., list[Any]], config: LlamaConfig, size: int) -> None:
    plan = llama_plan(config, size)
    for rank, found in enumerate(run_ranks("shard_model", size)):
        for parameter, shape in found["global"].items():
            module, _, kind = parameter.rpartition(".")
            style = style_of(plan, module)
            owned = [(0, length) for length in shape]
            if style is not None and style.dim < len(shape):
                owned[style.dim] = style.ranges[rank]
            assert found["owned"][parameter] == owned, (rank, parameter)
            assert found["local"][parameter] == tuple(stop - start for start, stop in owned)
            if kind == "weight":
                placement = Placement.of(plan, module, shape, size)
                assert found["local"][parameter] == placement.local_shapes[rank]


def test_only_the_first_rank_adds_a_row_split_bias(run_ranks: Callable[..., list[Any]]) -> None:
    first, *others = run_ranks("shard_model", 3)
    row_biases = {name for name in first["global"] if name.endswith(("o_proj.bias", "down_proj.bias"))}
    assert len(row_biases) == 4
    assert all(row_biases.isdisjoint(other["global"]) for other in others)
    assert first["global"].keys() - row_biases == others[0]["global"].keys()


def test_a_plain_tensor_is_owned_whole() -> None:
    assert owned_slices(torch.empty(3, 5, device="meta")) == (slice(0, 3), slice(0, 5))


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("name", BILLIONS)
def test_large_models_are_placed_on_many_ranks(name: str, size: int) -> None:
    config = LlamaConfig.from_hf(BILLIONS[name])
    if size > config.num_heads:
        with pytest.raises(UserError, match=f"expected 1 to {config.num_heads}"):
            llama_plan(config, size)
        return
    plan = llama_plan(config, size)
    whole = {name: tuple(parameter.shape) for name, parameter in meta_model(config).named_parameters()}
    for rank in (0, size // 2, size - 1):
        with fake_mesh(size, rank) as mesh:
            model = meta_model(config)
            shard(model, mesh, plan)
            for parameter_name, parameter in model.named_parameters():
                module = parameter_name.removesuffix(".weight")
                expected = Placement.of(plan, module, whole[parameter_name], size).local_shapes[rank]
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                assert tuple(parameter.shape) == whole[parameter_name]
                assert tuple(local.shape) == expected
                assert tuple(part.stop - part.start for part in owned_slices(parameter)) == expected
                assert local.device.type == "meta"


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("name", BILLIONS)
def test_ranks_of_large_models_hold_everything_once(name: str, size: int) -> None:
    config = LlamaConfig.from_hf(BILLIONS[name])
    if size > config.num_heads:
        pytest.skip("more ranks than heads")
    plan = llama_plan(config, size)
    for parameter, tensor in meta_model(config).named_parameters():
        module, shape = parameter.removesuffix(".weight"), tuple(tensor.shape)
        placement = Placement.of(plan, module, shape, size)
        held = sum(math.prod(local) for local in placement.local_shapes)
        copies = 1
        if placement.plan == "replicate":
            copies = size
        elif module.endswith(("k_proj", "v_proj")):
            copies = max(1, size // config.num_kv_heads)  # ranks that share a key-value head have a replica each
        assert held == copies * math.prod(shape), parameter


@pytest.mark.parametrize(("name", "size"), [("8B", 8), ("8B", 16), ("70B", 8), ("70B", 64), ("405B", 16), ("405B", 64)])
@pytest.mark.parametrize("recipe", ["none", "int8wo", "int4wo-128"])
def test_large_models_are_balanced_in_bytes(tmp_path: Any, name: str, size: int, recipe: str) -> None:
    fields = BILLIONS[name] | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engine = EngineConfig(str(tmp_path), size, recipe, device="cpu", load_format="dummy")
    blueprint = Blueprint.of(engine, open_checkpoint(str(tmp_path), weights=False), "cpu")
    held = blueprint.bytes_per_rank()
    assert len(held) == size
    # The MLP, two thirds of a layer, may be uneven by 1/16.
    assert max(held) <= 17 / 16 * sum(held) / size
    bits = {"none": 16, "int8wo": 8, "int4wo-128": 4.25}[recipe]
    linears = sum(math.prod(shape) for name, shape in blueprint.shapes.items() if "proj" in name)
    others = sum(math.prod(shape) for name, shape in blueprint.shapes.items() if "proj" not in name)
    whole = linears * bits / 8 + others * 2
    kv = sum(math.prod(shape) for name, shape in blueprint.shapes.items() if "k_proj" in name or "v_proj" in name)
    replicas = kv * (max(1, size // 8) - 1) * bits / 8
    # int4 fills up a rank's columns to whole blocks of 128.
    assert sum(held) == pytest.approx(whole + replicas, rel=0.02 if recipe.startswith("int4") else 0.01)


def test_a_range_shard_gives_each_rank_its_own_range() -> None:
    placement = RangeShard(0, ((0, 5), (5, 6), (3, 9)))
    assert [placement._local_shard_size_and_offset(9, 3, rank) for rank in range(3)] == [(5, 0), (1, 5), (6, 3)]
    assert "(3, 9)" in repr(placement)
    assert placement == RangeShard(0, ((0, 5), (5, 6), (3, 9)))
    assert placement != RangeShard(0, ((0, 4), (4, 6), (3, 9)))


def test_equal_shapes_with_different_ranges_are_not_mixed_up() -> None:
    """DTensor reuses results for placements that compare equal."""
    with fake_mesh(2, 0) as mesh:
        linears = [nn.Linear(4, 6, bias=False, device="meta") for _ in range(2)]
        for linear, stop in zip(linears, (4, 3), strict=True):
            distribute_parameter(linear, "weight", mesh, RangeShard(0, ((0, stop), (stop, 6))))
        assert [owned_slices(linear.weight)[0] for linear in linears] == [slice(0, 4), slice(0, 3)]


@pytest.fixture
def config(parallel_fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig.from_hf(parallel_fields)
