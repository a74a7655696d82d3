"""GGUF files of the `llama` architecture: one file with metadata, quantized tensors and the vocabulary.

Owns how a slice of a stored tensor becomes the same slice of Hugging Face's tensor. The container is
gguf_reader.py's, the config gguf_config.py's, the vocabulary gguf_tokenizer.py's concern.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from tpllama.checkpoint import names
from tpllama.checkpoint.gguf_config import config_fields, eos_token_ids
from tpllama.checkpoint.gguf_reader import open_gguf
from tpllama.checkpoint.gguf_tokenizer import build_tokenizer
from tpllama.checkpoint.open import StoredWeight, TensorInfo
from tpllama.checkpoint.rotary_rows import is_rotated, read_rotated
from tpllama.config import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# Not a tensor in Hugging Face's form: gguf_config.py reads it as a RoPE setting.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A .gguf file, opened by memory map."""

    base_path: Path | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._reader = open_gguf(path)
        self.fields = config_fields(self._reader, path)
        self.eos_token_ids = eos_token_ids(self._reader)
        self.quantized: Mapping[str, StoredWeight] = {}
        self._stored = _by_name(self._reader.tensors, path)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(int(n) for n in reversed(tensor.shape))) for name, tensor in self._stored.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        import torch

        tensor = self._stored[name]
        if is_rotated(name):
            part = read_rotated(partial(_dequantized, tensor), index, self.fields["head_dim"])
        else:
            part = _dequantized(tensor, index)
        # BF16 has no numpy type; it comes as 16-bit integers.
        values = torch.from_numpy(np.array(part, order="C"))
        return values.view(torch.bfloat16) if tensor.tensor_type == GGMLQuantizationType.BF16 else values

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        # A byte of every page of the rows, which lie together.
        self._stored[name].data[index[0]].view(np.uint8)[..., :: mmap.PAGESIZE].sum()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return build_tokenizer(self._reader, self.path)


def _by_name(tensors: list[ReaderTensor], path: Path) -> dict[str, ReaderTensor]:
    """Every tensor under Hugging Face's name; refuses what can't be read."""
    stored = {}
    for tensor in tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name = names.from_gguf(tensor.name)
        if name is None:
            raise UserError(f"found tensor {tensor.name} in {path}, expected those of a plain Llama, use another model")
        if tensor.tensor_type.name not in _TYPES:
            raise UserError(
                f"found tensor {tensor.name} of type {tensor.tensor_type.name} in {path}, expected one of "
                f"{', '.join(_TYPES)}, quantize the model to one of these"
            )
        stored[name] = tensor
    return stored


def _dequantized(tensor: ReaderTensor, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """One slice of a stored tensor, as floats. Touches only the blocks that the slice cuts."""
    assert len(index) == len(tensor.shape)
    kind = tensor.tensor_type
    data: np.ndarray[Any, Any] = tensor.data
    if kind == GGMLQuantizationType.BF16:
        return data.view(np.uint16)[index]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if block == 1:
        return data[index]
    # Rows are sequences of blocks: widen the columns to whole blocks, dequantize these, cut.
    *rows, columns = index
    first, last = columns.start // block, -(-columns.stop // block)
    stored = data[(*rows, slice(first * block_bytes, last * block_bytes))]
    if stored.size == 0:  # The package can't.
        return np.empty([part.stop - part.start for part in index], np.float32)
    widened: np.ndarray[Any, Any] = dequantize(np.ascontiguousarray(stored), kind)
    return widened[..., columns.start - first * block : columns.stop - first * block]
