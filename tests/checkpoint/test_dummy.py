"""Made-up weights: a value depends on the seed, the name, the row and the column alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpllama.checkpoint import dummy
from tpllama.checkpoint.dummy import DummyCheckpoint
from tpllama.checkpoint.open import TensorInfo, open_checkpoint

SHAPES = {
    "model.embed_tokens.weight": (700, 1500),
    "model.layers.0.self_attn.q_proj.weight": (300, 64),
    "model.layers.0.self_attn.q_proj.bias": (2100,),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.norm.weight": (64,),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> DummyCheckpoint:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    return DummyCheckpoint(open_checkpoint(str(path), weights=False), SHAPES, seed=3)


def test_everything_else_is_the_inner_checkpoints(checkpoint: DummyCheckpoint) -> None:
    assert checkpoint.tensors == {name: TensorInfo(shape) for name, shape in SHAPES.items()}
    assert checkpoint.fields == {"model_type": "llama", "eos_token_id": 7}
    assert checkpoint.eos_token_ids == (7,)
    assert checkpoint.tokenizer() is None
    assert checkpoint.path.is_dir()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_equals_the_slice_of_the_whole(
    checkpoint: DummyCheckpoint, read_whole: Any, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, size)]))) for size in SHAPES[name]]
    index = tuple(slice(*pair) for pair in bounds)
    part = checkpoint.read(name, index)
    assert torch.equal(part, read_whole(checkpoint, name)[index])
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.endswith("norm.weight")])
def test_values_are_spread_evenly(checkpoint: DummyCheckpoint, read_whole: Any, name: str) -> None:
    values = read_whole(checkpoint, name)
    assert values.dtype == torch.float32
    assert abs(values.std().item() - 0.02) < 1e-3
    assert abs(values.mean().item()) < 2e-3
    assert values.unique().numel() > 0.9 * values.numel()


@pytest.mark.parametrize("name", [name for name in SHAPES if name.endswith("norm.weight")])
def test_norms_are_ones(checkpoint: DummyCheckpoint, read_whole: Any, name: str) -> None:
    assert torch.equal(read_whole(checkpoint, name), torch.ones(64))


def test_seed_and_name_matter_and_nothing_else(checkpoint: DummyCheckpoint, read_whole: Any) -> None:
    shapes = dict.fromkeys(("a.weight", "b.weight"), (40, 40))
    first, again, other = (DummyCheckpoint(checkpoint, shapes, seed) for seed in (0, 0, 1))
    torch.manual_seed(5)
    before = read_whole(first, "a.weight")
    torch.manual_seed(6)
    assert torch.equal(before, read_whole(again, "a.weight"))
    assert not torch.equal(before, read_whole(other, "a.weight"))
    assert not torch.equal(before, read_whole(first, "b.weight"))


def test_values_are_the_same_in_every_process(checkpoint: DummyCheckpoint) -> None:
    """Ranks make their slices in processes of their own."""
    value = checkpoint.read("model.embed_tokens.weight", (slice(600, 601), slice(1400, 1402)))
    assert dummy._tile_seed(3, "model.embed_tokens.weight", 512, 1024) == 1976479265347875
    assert value.flatten().tolist() == pytest.approx([0.026008116081357002, -0.011396006681025028])


def test_only_the_tiles_of_a_slice_are_made(checkpoint: DummyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def tile_seed(seed: int, name: str, top: int, left: int) -> int:
        made.append((top, left))
        return 0

    monkeypatch.setattr(dummy, "_tile_seed", tile_seed)
    checkpoint.read("model.embed_tokens.weight", (slice(250, 260), slice(1030, 1040)))
    assert made == [(0, 1024), (256, 1024)]


def test_a_huge_tensor_costs_its_slice_alone(checkpoint: DummyCheckpoint) -> None:
    huge = DummyCheckpoint(checkpoint, {"lm_head.weight": (2**20, 2**20)}, seed=0)
    index = (slice(2**19, 2**19 + 3), slice(2**19, 2**19 + 5))
    assert huge.read("lm_head.weight", index).shape == (3, 5)
