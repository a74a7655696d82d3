"""Worlds of many ranks without their hardware: what each would build, hold and read of Llama 3 8B, 70B and 405B.

A fake process group makes any rank of any world. The real loader runs on the meta device and on a checkpoint that notes
which slices it is asked for, so nothing is read and no memory is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import resource
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpllama import build, reading
from tpllama.blueprint import Blueprint, meta_model, named_linears
from tpllama.checkpoint.open import TensorInfo
from tpllama.config import EngineConfig, UserError
from tpllama.llama_config import LlamaConfig
from tpllama.model.llama import Llama
from tpllama.parallel.collectives import OneRank

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return COMMON | sizes | {"num_attention_heads": heads, "max_position_embeddings": 8192} | more


# As published, and how many parameters that makes.
MODELS = {
    "8B": llama(4096, 14336, 32, 32),
    "70B": llama(8192, 28672, 80, 64),
    "405B": llama(16384, 53248, 126, 128, max_position_embeddings=131072, rope_scaling=LLAMA3_ROPE),
}
PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496, "405B": 405_853_388_800}
# (start, stop) in each dimension.
Rectangle = tuple[tuple[int, int], ...]


class RecordingCheckpoint:
    """A checkpoint of the given config whose weights have no values. reads: the slices that were asked for."""

    path, base_path, files, notes = Path("recorded"), None, (), ()
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields, self.quantized = fields, {}
        shapes = meta_model(LlamaConfig.from_hf(fields)).named_parameters()
        self.tensors = {name: TensorInfo(tuple(parameter.shape), "bf16") for name, parameter in shapes}
        self.reads: dict[str, list[Rectangle]] = defaultdict(list)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        self.reads[name].append(tuple((part.start, part.stop) for part in index))
        return torch.empty([part.stop - part.start for part in index], dtype=torch.bfloat16, device="meta")

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        pass

    def tokenizer(self) -> None:
        return None


class Member(OneRank):
    """One rank of many, the others of which say nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@contextmanager
def world(rank: int, size: int) -> Iterator[Any]:
    """The mesh of a world in which this process is one rank."""
    # Named for the rank: DTensor reuses what it knows of an equal mesh.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=(f"tp as {rank}",))
    finally:
        dist.destroy_process_group()


@functools.cache
def blueprint_of(model: str, tp: int, recipe: str = "none") -> Blueprint:
    engine = EngineConfig(model, tp=tp, torchao_config=recipe, device="cpu")
    checkpoint: Any = RecordingCheckpoint(MODELS[model])
    return Blueprint.of(engine, checkpoint, "cpu")


def load(blueprint: Blueprint, rank: int) -> tuple[Llama, dict[str, list[Rectangle]]]:
    """A rank's model, and what it read."""
    checkpoint: Any = RecordingCheckpoint(MODELS[blueprint.name])
    ranks: Any = Member(rank, blueprint.tp)
    with world(rank, blueprint.tp) as mesh:
        loader = build.LlamaLoader(blueprint, checkpoint, mesh, ranks, torch.device("meta"))
        return loader.load(), checkpoint.reads


@pytest.fixture(autouse=True)
def _on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows as on a CPU, but larger, for there are many; a part of a weight is its own quantized form."""
    monkeypatch.setitem(reading._BLOCK_ELEMENTS, "meta", 1 << 24)
    monkeypatch.setattr(build, "quantize", lambda weight, recipe, own, agree_max: weight[:, own])
    monkeypatch.setattr(build, "join_rows", lambda parts, rows: torch.cat(list(parts)))


def owned(reads: list[Rectangle]) -> Rectangle:
    """The one rectangle that a rank's reads of a weight make up, without a gap and with nothing twice."""
    (columns,) = {index[1:] for index in reads}
    rows = sorted(index[0] for index in reads)
    assert all(above[1] == below[0] for above, below in itertools.pairwise(rows)), rows
    return (rows[0][0], rows[-1][1]), *columns


def assert_partition(ranges: list[tuple[int, int]], size: int) -> None:
    """Each of 0..size belongs to exactly one range."""
    assert all(start < stop for start, stop in ranges)
    assert [start for start, _ in sorted(ranges)] == [0, *sorted(stop for _, stop in ranges)][: len(ranges)]
    assert max(stop for _, stop in ranges) == size


def check_all_reads(model: str, tp: int) -> None:
    blueprint = blueprint_of(model, tp)
    config = blueprint.config
    per_rank = [load(blueprint, rank)[1] for rank in range(tp)]
    local_shapes = {layer["name"]: layer["local_shapes"] for layer in blueprint.layer_rows()}
    linears = {name: linear.weight.shape for name, linear in named_linears(meta_model(config))}
    assert len(linears) == 7 * config.num_layers + 1
    of: dict[str, list[Rectangle]] = {}
    for name, (rows, columns) in linears.items():
        of[name] = mine = [owned(reads[f"{name}.weight"]) for reads in per_rank]
        assert [[stop - start for start, stop in rectangle] for rectangle in mine] == local_shapes[name]
        is_row_split = name.endswith(("o_proj", "down_proj"))
        split, whole = ([rectangle[dim] for rectangle in mine] for dim in ((1, 0) if is_row_split else (0, 1)))
        assert set(whole) == {(0, rows if is_row_split else columns)}
        if not name.endswith(("k_proj", "v_proj")):
            assert_partition(split, columns if is_row_split else rows)
    rows_per_group = config.num_heads // config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        part = {name.rpartition(".")[2]: of[name] for name in linears if f".{layer}." in name}
        for rank in range(tp):
            (first, last), _ = part["q_proj"][rank]
            assert first % config.head_dim == last % config.head_dim == 0
            # Of keys and values a rank owns the heads that its queries look at, no others, whoever else does too.
            heads = (first // rows_per_group, -(-last // rows_per_group))
            for name in ("k_proj", "v_proj"):
                assert part[name][rank][0] == tuple(head * config.head_dim for head in heads)
            assert part["o_proj"][rank][1] == (first, last)
            assert part["gate_proj"][rank][0] == part["up_proj"][rank][0] == part["down_proj"][rank][1]
        assert_partition(sorted({rectangle[0] for rectangle in part["k_proj"]}), config.num_kv_heads * config.head_dim)
    assert_partition([owned(reads["model.embed_tokens.weight"])[0] for reads in per_rank], config.vocab_size)
    for reads in per_rank:
        assert set(reads) == set(blueprint.shapes)
        assert all(len(each) == 1 for name, each in reads.items() if "norm" in name)


DEGREES = (1, 2, 3, 5, 8, 16)


@pytest.mark.parametrize("tp", [tp if tp < 16 else pytest.param(tp, marks=pytest.mark.slow) for tp in DEGREES])
def test_every_byte_of_8b_is_read_by_the_ranks_that_own_it_and_once(tp: int) -> None:
    check_all_reads("8B", tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("model", ["70B", "405B"])
def test_every_byte_of_the_large_ones_is_read_by_the_ranks_that_own_it_and_once(model: str, tp: int) -> None:
    check_all_reads(model, tp)


@pytest.mark.parametrize(("model", "size"), [("70B", 3), ("405B", 16)])
def test_no_byte_of_shallow_large_ones_is_read_twice(model: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of the large ones' sizes in the default run, with two of their layers."""
    monkeypatch.setitem(MODELS, "shallow", MODELS[model] | {"num_hidden_layers": 2})
    blueprint_of.cache_clear()
    check_all_reads("shallow", size)


@pytest.mark.parametrize("model", MODELS)
def test_the_configs_are_the_published_ones(model: str) -> None:
    parameters = meta_model(LlamaConfig.from_hf(MODELS[model])).parameters()
    assert sum(parameter.numel() for parameter in parameters) == PARAMETERS[model]
    assert blueprint_of(model, 1).bytes_per_rank() == [2 * PARAMETERS[model]]


def held(model: Llama) -> int:
    """Bytes of a loaded model's weights: all that it has but RoPE's tables."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    rotary = {id(each) for each in model.model.rotary.buffers()}
    return sum(each.nbytes for key, each in tensors.items() if key not in rotary)


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize(
    "model", [each if each == "8B" else pytest.param(each, marks=pytest.mark.slow) for each in MODELS]
)
def test_a_wide_worlds_ranks_are_built_as_planned(model: str, size: int) -> None:
    """First and last rank: shapes through a whole forward, bytes against the plan's."""
    if size > MODELS[model]["num_attention_heads"]:
        with pytest.raises(UserError, match=f"found tensor-parallel degree {size}, expected 1 to 32"):
            blueprint_of(model, size)
        return
    blueprint = blueprint_of(model, size)
    config, bytes_per_rank = blueprint.config, blueprint.bytes_per_rank()
    for rank in (0, size - 1):
        built, _ = load(blueprint, rank)
        assert held(built) == bytes_per_rank[rank]
        start, stop = blueprint.owned_tokens(rank)
        logits = built(torch.zeros(1, 5, dtype=torch.long, device="meta"))
        assert logits.shape == (1, 5, stop - start)
        assert blueprint.heads(rank)[0] == config.num_heads // size  # all of these divide
        assert blueprint.heads(rank)[1] == max(config.num_kv_heads // size, 1)
    copies = max(size // config.num_kv_heads, 1)
    key_value_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
    norm_bytes = 2 * (2 * config.num_layers + 1) * config.hidden_size
    everything = 2 * PARAMETERS[model] + (copies - 1) * key_value_bytes + (size - 1) * norm_bytes
    assert sum(bytes_per_rank) == everything
    cache = [2 * 2 * config.num_layers * config.head_dim * max(config.num_kv_heads // size, 1)] * size
    assert blueprint.kv_bytes_per_token_per_rank() == cache


@pytest.mark.parametrize("rank", [0, 1, 63])
def test_ranks_read_on_to_the_borders_of_their_groups_and_no_further(rank: int) -> None:
    """405B's MLP on 64 ranks: 832 columns each, six and a half groups of 128."""
    blueprint = blueprint_of("405B", 64, "int4wo-128")
    shallow = dataclasses.replace(blueprint.config, num_layers=1)
    shapes = {name: shape for name, shape in blueprint.shapes.items() if ".layers." not in name or ".layers.0." in name}
    _, reads = load(dataclasses.replace(blueprint, config=shallow, shapes=shapes), rank)
    columns = owned(reads["model.layers.0.mlp.down_proj.weight"])[1]
    first, last = rank * 832, (rank + 1) * 832
    assert columns == (first // 128 * 128, -(-last // 128) * 128)
    assert columns != (first, last)
    assert owned(reads["model.layers.0.self_attn.o_proj.weight"])[1] == (rank * 256, (rank + 1) * 256)
    assert owned(reads["model.layers.0.mlp.up_proj.weight"])[0] == (first, last)


@pytest.mark.parametrize("size", [8, 16])
def test_405b_is_planned_within_seconds_from_its_config_alone(
    size: int, tmp_path: Path, tpllama: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["405B"]))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = tpllama(
        "plan", "--model", tmp_path, "--load-format", "dummy", "--device", "cpu", "--tp", str(size), "--json"
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Of the processor: how long it takes on a busy machine says nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    report = json.loads(done.stdout)
    assert report["legal_tp"] == list(range(1, 129))
    assert report["bytes_per_rank"] == blueprint_of("405B", size).bytes_per_rank()
    assert len(report["layers"]) == 9 * 126 + 3
    if size == 16:
        table = tpllama("plan", "--model", tmp_path, "--load-format", "dummy", "--device", "cpu", "--tp", "16").stdout
        assert "tp 16 (legal: 1 to 128)" in table
        assert "weights per rank: 47.8 GiB, 47.8 GiB" in table


def test_no_process_group_is_left() -> None:
    assert not dist.is_initialized()
