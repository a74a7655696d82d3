"""GGUF tensors: any slice of any type equals the same slice of the whole, and q and k have Hugging Face's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpllama import reading
from tpllama.checkpoint.gguf import GgufCheckpoint
from tpllama.checkpoint.names import from_gguf
from tpllama.checkpoint.open import Checkpoint, TensorInfo, open_checkpoint

State = dict[str, torch.Tensor]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# Byte offsets of the half-precision scales in a block, for types the gguf package can't write.
K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ROWS, COLUMNS = 24, 768


def stored(kind: str, rows: int, columns: int) -> np.ndarray:
    """Random content of a tensor of this type, as the file holds it."""
    generator = np.random.default_rng(0)
    if kind not in K_SCALES:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        quantized: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return quantized
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for offset in K_SCALES[kind]:
        scales = generator.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def whole(content: np.ndarray, kind: str) -> torch.Tensor:
    """The values of all of `content`, by the gguf package."""
    return torch.from_numpy(gguf.quants.dequantize(content, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(
    write_gguf: Any, tiny_metadata: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    content = stored(kind, ROWS, COLUMNS)
    checkpoint = GgufCheckpoint(write_gguf(tiny_metadata, {"token_embd.weight": (content, kind)}))
    assert checkpoint.tensors["model.embed_tokens.weight"] == TensorInfo((ROWS, COLUMNS))
    bounds = [sorted(data.draw(st.tuples(*2 * [st.integers(0, size)]))) for size in (ROWS, COLUMNS)]
    index = tuple(slice(*pair) for pair in bounds)
    part = checkpoint.read("model.embed_tokens.weight", index)
    assert part.dtype == FLOATS.get(kind, torch.float32)
    assert torch.equal(part.float(), whole(content, kind)[index])
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_only_the_blocks_of_a_slice_are_dequantized(
    monkeypatch: pytest.MonkeyPatch, write_gguf: Any, tiny_metadata: dict[str, Any]
) -> None:
    path = write_gguf(tiny_metadata, {"token_embd.weight": (stored("Q4_K", ROWS, COLUMNS), "Q4_K")})
    sizes: list[int] = []

    def dequantize(blocks: np.ndarray, kind: gguf.GGMLQuantizationType) -> Any:
        sizes.append(blocks.nbytes)
        return gguf.quants.dequantize(blocks, kind)

    monkeypatch.setattr("tpllama.checkpoint.gguf.dequantize", dequantize)
    GgufCheckpoint(path).read("model.embed_tokens.weight", (slice(3, 5), slice(300, 500)))
    assert sizes == [2 * 144]


def to_gguf(state: State, num_heads: int, num_kv_heads: int) -> dict[str, tuple[np.ndarray, str]]:
    """A Hugging Face state dict as the usual converter stores it, in 32 bits."""
    names = {from_gguf(name): name for name in _gguf_names()}
    tensors = {}
    for name, value in state.items():
        array = value.float().numpy()
        if ".q_proj." in name or ".k_proj." in name:
            heads = num_heads if ".q_proj." in name else num_kv_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        tensors[names[name]] = (array, "F32")
    return tensors


def _gguf_names() -> list[str]:
    layer = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    modules = ["token_embd", "output", "output_norm", *(f"blk.{n}.{module}" for n in range(2) for module in layer)]
    return [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]


def test_weights_and_biases_are_those_before_conversion(
    write_gguf: Any, tiny_metadata: dict[str, Any], tiny_state: State, read_whole: Any
) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tiny_metadata, to_gguf(tiny_state, 4, 2)))
    assert checkpoint.tensors.keys() == tiny_state.keys()
    assert (checkpoint.fields["attention_bias"], checkpoint.fields["mlp_bias"]) == (True, True)
    for name, value in tiny_state.items():
        assert torch.equal(read_whole(checkpoint, name), value.float()), name


@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"])
def test_heads_of_q_and_k_can_be_cut_anywhere(
    write_gguf: Any, tiny_metadata: dict[str, Any], tiny_state: State, name: str
) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tiny_metadata, to_gguf(tiny_state, 4, 2)))
    name = f"model.layers.1.self_attn.{name}"
    expected = tiny_state[name].float()
    rest = (slice(5, 50),) * (expected.dim() - 1)
    for first in range(0, len(expected), 4):
        for last in range(first, len(expected) + 1, 4):
            index = (slice(first, last), *rest)
            assert torch.equal(checkpoint.read(name, index), expected[index])


@pytest.mark.parametrize("head_dim", [96, 100])
def test_heads_that_do_not_divide_the_blocks_of_rows(
    write_gguf: Any, tiny_metadata: dict[str, Any], monkeypatch: Any, head_dim: int
) -> None:
    """Rows are read in blocks that end at multiples of 256, which may be within a head."""
    name, hidden = "model.layers.0.self_attn.q_proj.weight", 64
    rows = torch.randn(6 * head_dim, hidden, generator=torch.Generator().manual_seed(0))
    embedding = {"model.embed_tokens.weight": torch.zeros(40, hidden)}
    tensors = to_gguf(embedding | {name: rows}, 6, 2)
    sizes = {"llama.attention.head_count": 6, "llama.attention.key_length": head_dim}
    sizes |= {"llama.attention.value_length": head_dim, "llama.rope.dimension_count": head_dim}
    checkpoint = GgufCheckpoint(write_gguf(tiny_metadata | sizes, tensors))
    for cut in (slice(0, 256), slice(256, 512), slice(511, len(rows)), slice(5, 6), slice(7, 7)):
        for columns in (slice(0, hidden), slice(3, 9), slice(4, 4)):
            assert torch.equal(checkpoint.read(name, (cut, columns)), rows[cut, columns])
    monkeypatch.setattr(reading, "_BLOCK_ELEMENTS", {"cpu": 1})
    reader = reading.BlockReader(checkpoint, torch.float32, torch.device("cpu"), False)
    assert torch.equal(reader.read(name, (slice(0, len(rows)), slice(0, hidden))), rows)


def test_embedded_model_equals_transformers_reading_of_it(
    read_whole: Callable[[Checkpoint, str], torch.Tensor],
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint("smollm2")
    path = checkpoint.path
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state = reference.state_dict()
    layer = [name for name in checkpoint.tensors if ".layers.7." in name]
    assert len(layer) == 9
    for name in (*layer, "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(read_whole(checkpoint, name), state[name]), name


def test_rope_frequencies_are_no_tensor(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    tensors = {
        "token_embd.weight": (np.zeros((40, 64), np.float32), "F32"),
        "rope_freqs.weight": (np.ones(8, np.float32), "F32"),
    }
    assert list(GgufCheckpoint(write_gguf(tiny_metadata, tensors)).tensors) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", ["blk.0.attn_sub_norm.weight", "blk.0.ffn_gate_exps.weight", "extra.weight", "output"])
def test_unknown_tensor(write_gguf: Any, tiny_metadata: dict[str, Any], fails: Any, name: str) -> None:
    zeros = np.zeros((40, 64), np.float32)
    path = write_gguf(tiny_metadata, {"token_embd.weight": (zeros, "F32"), name: (zeros, "F32")})
    fails(lambda: GgufCheckpoint(path), name, str(path))


def test_unsupported_type(write_gguf: Any, tiny_metadata: dict[str, Any], fails: Any) -> None:
    path = write_gguf(tiny_metadata, {"token_embd.weight": (np.zeros((40, 84), np.uint8), "Q2_K")})
    fails(lambda: GgufCheckpoint(path), "token_embd.weight", "Q2_K", "Q4_K")


def test_no_tokenizer_fields_is_no_tokenizer(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    assert GgufCheckpoint(write_gguf(tiny_metadata)).tokenizer() is None
