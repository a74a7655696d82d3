"""Tensors of Meta's checkpoints, which lie in pieces in several files.

Owns how pieces fit together, and which slice of which piece a slice of the whole is. Knows no values, and of tensors
only their shapes and Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tpllama.checkpoint.weight_files import WeightFile
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """One file's part of a tensor, by the name it has there. It starts at `start` along the dimension that is split."""

    file: WeightFile
    name: str
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shapes[self.name]


@dataclass(frozen=True)
class SplitTensor:
    """A tensor that lies in one file, or in pieces along dimension `dim` in several."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dim: int = 0

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """One slice, from the pieces it touches."""
        parts = self.parts(index)
        if len(parts) == 1:
            return parts[0]
        import torch

        return torch.cat(parts, self.dim)

    def parts(self, index: tuple[slice, ...]) -> list[torch.Tensor]:
        """What a slice consists of, as it lies in the files."""
        if len(self.pieces) == 1:
            return [self.pieces[0].file.read(self.pieces[0].name, index)]
        wanted = index[self.dim]
        parts: list[torch.Tensor] = []
        for piece in self.pieces:
            size = piece.shape[self.dim]
            # Clamped, so that what the piece does not hold is an empty slice.
            first, last = (min(max(bound - piece.start, 0), size) for bound in (wanted.start, wanted.stop))
            if first < last or wanted.start == wanted.stop:
                part = (*index[: self.dim], slice(first, last), *index[self.dim + 1 :])
                parts.append(piece.file.read(piece.name, part))
        return parts


def joined(name: str, pieces: list[Piece], files: Sequence[WeightFile], config: LlamaConfig) -> SplitTensor:
    """What the pieces are together: one whole tensor, copies of one, or its split along one dimension.

    Meta splits the outputs of wq, wk, wv, w1, w3 and output, the inputs of wo and w2, and tok_embeddings by rows
    (Llama 3) or columns (Llama 1 and 2). The shapes say which, beside the one that the config expects.
    """
    expected = _expected_shape(name, config)
    first, shapes, is_in_all = pieces[0], [piece.shape for piece in pieces], len(pieces) == len(files)
    is_whole = all(shape == expected for shape in shapes)
    if len(files) == 1 or (is_whole and (is_in_all or len(pieces) == 1)):
        return SplitTensor(first.shape, (first,))
    for dim, size in enumerate(expected):
        others = (*expected[:dim], *expected[dim + 1 :])
        fit = all(len(shape) == len(expected) and (*shape[:dim], *shape[dim + 1 :]) == others for shape in shapes)
        if is_in_all and fit and sum(shape[dim] for shape in shapes) == size:
            starts = accumulate((shape[dim] for shape in shapes[:-1]), initial=0)
            split = (Piece(piece.file, piece.name, start) for piece, start in zip(pieces, starts, strict=True))
            return SplitTensor(expected, tuple(split), dim)
    found = ", ".join(f"{list(piece.shape)} in {piece.file.path.name}" for piece in pieces[:8])
    raise UserError(
        f"found tensor {first.name} of shape {found} ({len(pieces)} of {len(files)} files in "
        f"{first.file.path.parent}), expected {list(expected)}, whole in one file, or in all files whole or in parts "
        f"along one dimension, get all files of the model, of one version"
    )


def _expected_shape(name: str, config: LlamaConfig) -> tuple[int, ...]:
    """The whole tensor's shape: (out_features, in_features) of a matrix, (features,) of a vector."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    module, kind = name.split(".")[-2:]
    outputs, inputs = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }.get(module, (hidden, 0))
    return (outputs, inputs) if inputs and kind == "weight" else (outputs,)
