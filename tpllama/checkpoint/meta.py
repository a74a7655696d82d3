"""Meta's own checkpoints: params.json, weights in any number of shards, tokenizer.model.

Owns which slice of which shard is the slice of Hugging Face's tensor, and whether the output head is tied. Where the
files lie is weight_set.py's concern, what params.json means meta_config.py's, the tokenizer tokenizer_model.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint import names
from tpllama.checkpoint.meta_config import config_fields
from tpllama.checkpoint.open import StoredWeight, TensorInfo
from tpllama.checkpoint.rotary_rows import from_interleaved, is_rotated
from tpllama.checkpoint.tokenizer_model import (
    build_tokenizer,
    eos_token_ids,
    instruct_name,
    is_sentencepiece,
    vocabulary_size,
)
from tpllama.checkpoint.weight_files import WeightFile, fetch_pages, open_weight_file
from tpllama.checkpoint.weight_set import read_json
from tpllama.config import LlamaConfig, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# A buffer of Llama 1's and 2's files, which RoPE's settings say anew.
_ROPE_BUFFER = "rope.freqs"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Of the base model's config, what the shapes of weights follow from.
_SIZES = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    )
)
# Elements of the embedding that are compared with the head at a time.
_COMPARED = 1 << 23


@dataclass(frozen=True)
class _Piece:
    """One file's part of a tensor, by the name it has there. It starts at `start` along the dimension that is split."""

    file: WeightFile
    name: str
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shapes[self.name]


@dataclass(frozen=True)
class _Tensor:
    """A tensor that lies in one file, or in pieces along dimension `dim` in several."""

    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
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


class MetaCheckpoint:
    """The model of `path`, a directory with params.json, whose weights are in the files `weights`, in order.

    Without `weights`, of the config and tokenizer alone. With `fields`, a base model's config in Hugging Face's
    spelling, params.json is not read. Raises UserError for anything that is no plain Llama, and for damaged files.
    """

    def __init__(self, path: Path, weights: Sequence[Path] = (), fields: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.files: tuple[Path, ...] = tuple(weights)
        self.base_path: Path | None = None
        self.quantized: Mapping[str, StoredWeight] = {}
        tokenizer = path / "tokenizer.model"
        self._tokenizer_file = tokenizer if tokenizer.is_file() else None
        self.eos_token_ids = eos_token_ids(self._tokenizer_file) if self._tokenizer_file else ()
        files = [open_weight_file(file) for file in weights]
        pieces = _by_name(files)
        self._fields = dict(fields) if fields is not None else self._own_fields(pieces)
        self._config = LlamaConfig.from_hf({name: self._fields[name] for name in _SIZES if name in self._fields})
        self._tensors = {name: _joined(name, found, files, self._config) for name, found in pieces.items()}
        self._instruct_name = instruct_name(self._tokenizer_file) if self._tokenizer_file else None
        self.notes: tuple[str, ...] = (*(self._tie() if files else ()), *self._tokenizer_notes())
        self.fields: Mapping[str, Any] = self._fields
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape) for name, tensor in self._tensors.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = self._tensors[name]
        if not is_rotated(name):
            return tensor.read(index)
        rows, head_dim = index[0], self._config.head_dim
        first, last = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
        heads = tensor.read((slice(first, last), *index[1:]))
        if heads.numel():
            heads = from_interleaved(heads, head_dim)
        return heads[rows.start - first : rows.stop - first]

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        for part in self._tensors[name].parts(index):
            fetch_pages(part)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return build_tokenizer(self._tokenizer_file, self._instruct_name is not None) if self._tokenizer_file else None

    def _own_fields(self, pieces: Mapping[str, list[_Piece]]) -> dict[str, Any]:
        params = self.path / "params.json"
        if not params.is_file():
            raise UserError(f"found no params.json in {self.path}, expected it beside the weights, copy it there")
        num_tokens = _num_rows(pieces)
        if num_tokens is None and self._tokenizer_file:
            num_tokens = vocabulary_size(self._tokenizer_file)
        biases = [name for name in pieces if name.endswith(".bias")]
        return config_fields(read_json(params), params, num_tokens) | {
            "attention_bias": any(".self_attn." in name for name in biases),
            "mlp_bias": any(".mlp." in name for name in biases),
        }

    def _tie(self) -> tuple[str, ...]:
        """Decides whether the output head is the embedding. Drops a head that is a copy, and returns a note of it."""
        is_copy = _HEAD in self._tensors and self._head_equals_embedding()
        self._fields["tie_word_embeddings"] = is_copy or _HEAD not in self._tensors
        if not is_copy:
            return ()
        # Llama 3.2's smaller models have it, though they are tied.
        del self._tensors[_HEAD]
        return (f"the output head in {self.path} equals the embedding: read as tied",)

    def _head_equals_embedding(self) -> bool:
        import torch

        head, embedding = self._tensors[_HEAD].shape, self._tensors.get(_EMBEDDING)
        if embedding is None or head != embedding.shape or len(head) != 2:
            return False
        num_rows, num_columns = head
        step = max(_COMPARED // max(num_columns, 1), 1)
        for start in range(0, num_rows, step):
            index = (slice(start, min(start + step, num_rows)), slice(0, num_columns))
            if not torch.equal(self.read(_HEAD, index), self.read(_EMBEDDING, index)):
                return False
        return True

    def _tokenizer_notes(self) -> tuple[str, ...]:
        if self._tokenizer_file is None:
            return ()
        notes: tuple[str, ...] = ()
        if self._instruct_name is not None:
            generation = "Llama 2" if is_sentencepiece(self._tokenizer_file) else "Llama 3"
            notes += (
                f"no chat template in Meta's files; the name {self._instruct_name!r} says instruct, {generation}'s "
                f"format is used",
            )
        size = vocabulary_size(self._tokenizer_file)
        if size != self._config.vocab_size:
            notes += (
                f"{self._tokenizer_file} has {size} tokens, the model {self._config.vocab_size}: is it whole, and this "
                f"model's?",
            )
        return notes


def _by_name(files: Sequence[WeightFile]) -> dict[str, list[_Piece]]:
    """The pieces of every tensor, under Hugging Face's name, in the files' order."""
    pieces: dict[str, list[_Piece]] = {}
    for file in files:
        for stored in file.shapes:
            name = names.from_meta(stored)
            if name is not None:
                pieces.setdefault(name, []).append(_Piece(file, stored))
            elif stored != _ROPE_BUFFER:
                raise UserError(
                    f"found tensor {stored} in {file.path}, expected those of a plain Llama, use another model"
                )
    return pieces


def _num_rows(pieces: Mapping[str, list[_Piece]]) -> int | None:
    """The vocabulary, from the output head, whose rows are split in all generations, or from a whole embedding."""
    if _HEAD in pieces:
        return sum(piece.shape[0] for piece in pieces[_HEAD] if piece.shape)
    embedding = pieces.get(_EMBEDDING, [])
    return embedding[0].shape[0] if len(embedding) == 1 and embedding[0].shape else None


def _joined(name: str, pieces: list[_Piece], files: Sequence[WeightFile], config: LlamaConfig) -> _Tensor:
    """What the pieces are together: one whole tensor, copies of one, or its split along one dimension.

    Meta splits the outputs of wq, wk, wv, w1, w3 and output, the inputs of wo and w2, and tok_embeddings by rows
    (Llama 3) or columns (Llama 1 and 2). The shapes say which, beside the one that the config expects.
    """
    expected = _expected_shape(name, config)
    first, shapes, is_in_all = pieces[0], [piece.shape for piece in pieces], len(pieces) == len(files)
    is_whole = all(shape == expected for shape in shapes)
    if len(files) == 1 or (is_whole and (is_in_all or len(pieces) == 1)):
        return _Tensor(first.shape, (first,))
    for dim, size in enumerate(expected):
        others = (*expected[:dim], *expected[dim + 1 :])
        fit = all(len(shape) == len(expected) and (*shape[:dim], *shape[dim + 1 :]) == others for shape in shapes)
        if is_in_all and fit and sum(shape[dim] for shape in shapes) == size:
            starts = accumulate((shape[dim] for shape in shapes[:-1]), initial=0)
            split = (_Piece(piece.file, piece.name, start) for piece, start in zip(pieces, starts, strict=True))
            return _Tensor(expected, tuple(split), dim)
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
