"""Meta's own checkpoints: params.json, weights in any number of shards, tokenizer.model.

Owns which of Meta's tensors is which of Hugging Face's, and whether the output head is tied. How pieces of a tensor fit
together is meta_shards.py's concern, where the files lie weight_set.py's, what params.json means meta_config.py's, the
tokenizer tokenizer_model.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint import names
from tpllama.checkpoint.meta_config import config_fields
from tpllama.checkpoint.meta_shards import Piece, SplitTensor, joined
from tpllama.checkpoint.open import StoredWeight, TensorInfo
from tpllama.checkpoint.rotary_rows import is_rotated, read_rotated
from tpllama.checkpoint.tokenizer_model import (
    build_tokenizer,
    eos_token_ids,
    instruct_name,
    is_sentencepiece,
    vocabulary_size,
)
from tpllama.checkpoint.weight_files import WeightFile, fetch_pages, open_weight_file
from tpllama.checkpoint.weight_set import read_json
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

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
# Rows of the embedding that are compared with the head.
_COMPARED = 48


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
        self._tensors = {name: joined(name, found, files, self._config) for name, found in pieces.items()}
        self._instruct_name = instruct_name(self._tokenizer_file) if self._tokenizer_file else None
        self.notes: tuple[str, ...] = (*(self._tie() if files else ()), *self._tokenizer_notes())
        self.fields: Mapping[str, Any] = self._fields
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape) for name, tensor in self._tensors.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        read = self._tensors[name].read
        return read_rotated(read, index, self._config.head_dim) if is_rotated(name) else read(index)

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        for part in self._tensors[name].parts(index):
            fetch_pages(part)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return build_tokenizer(self._tokenizer_file, self._instruct_name is not None) if self._tokenizer_file else None

    def _own_fields(self, pieces: Mapping[str, list[Piece]]) -> dict[str, Any]:
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
        head, embedding = self._tensors.get(_HEAD), self._tensors.get(_EMBEDDING)
        compared = _equality(head, embedding) if head and embedding else None
        self._fields["tie_word_embeddings"] = head is None or compared is not None
        if compared is None:
            return ()
        # Llama 3.2's smaller models have it, though they are tied.
        del self._tensors[_HEAD]
        return (f"the output head in {self.path} equals the embedding ({compared}): read as tied",)

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


def _by_name(files: Sequence[WeightFile]) -> dict[str, list[Piece]]:
    """The pieces of every tensor, under Hugging Face's name, in the files' order."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for stored in file.shapes:
            name = names.from_meta(stored)
            if name is not None:
                pieces.setdefault(name, []).append(Piece(file, stored))
            elif stored != _ROPE_BUFFER:
                raise UserError(
                    f"found tensor {stored} in {file.path}, expected those of a plain Llama, use another model"
                )
    return pieces


def _equality(head: SplitTensor, embedding: SplitTensor) -> str | None:
    """How it is known that the head is a copy of the embedding; None where it is none.

    Some rows tell: opening reads no weights, and these are large. A head of its own differs in every row, as the
    softmax of each training step moves the logits of all tokens; a copy is exact.
    """
    if head.shape != embedding.shape or len(head.shape) != 2:
        return None
    whole = tuple(slice(0, size) for size in head.shape)
    parts, others = head.parts(whole), embedding.parts(whole)  # views, of which nothing is read yet
    if [(part.data_ptr(), part.stride()) for part in parts] == [(part.data_ptr(), part.stride()) for part in others]:
        return "they are one in the file"
    import torch

    num_rows, num_columns = head.shape
    last = min(_COMPARED, num_rows) - 1
    rows = [number * (num_rows - 1) // max(last, 1) for number in range(last + 1)]
    for row in rows:
        index = (slice(row, row + 1), slice(0, num_columns))
        if not torch.equal(head.read(index), embedding.read(index)):
            return None
    return f"in the {len(rows)} rows compared, of {num_rows}"


def _num_rows(pieces: Mapping[str, list[Piece]]) -> int | None:
    """The vocabulary, from the output head, whose rows are split in all generations, or from a whole embedding."""
    if _HEAD in pieces:
        return sum(piece.shape[0] for piece in pieces[_HEAD] if piece.shape)
    embedding = pieces.get(_EMBEDDING, [])
    return embedding[0].shape[0] if len(embedding) == 1 and embedding[0].shape else None
