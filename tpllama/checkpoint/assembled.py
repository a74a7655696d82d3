"""A checkpoint put together from a model and what another one lends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import Checkpoint, StoredWeight, TensorInfo

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Tokenizer = Callable[[], "PreTrainedTokenizerBase | None"]


class Assembled:
    """A checkpoint with remarks, whose tokenizer is the first that is found, the lender's last."""

    def __init__(
        self, whole: Checkpoint, lender: Checkpoint | None, tokenizers: Sequence[Tokenizer],
        notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._whole = whole
        self._tokenizers = [*tokenizers, lender.tokenizer] if lender else tokenizers
        self.path: Path = whole.path
        self.files: tuple[Path, ...] = whole.files
        self.base_path: Path | None = lender.path if lender else whole.base_path
        self.notes: tuple[str, ...] = (*notes, *whole.notes)
        self.fields: Mapping[str, Any] = whole.fields
        self.tensors: Mapping[str, TensorInfo] = whole.tensors
        self.quantized: Mapping[str, StoredWeight] = whole.quantized
        lent = lender.eos_token_ids if lender else ()
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*whole.eos_token_ids, *lent)))

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._whole.read(name, index)

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        self._whole.prefetch(name, index)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return next((found for tokenizer in self._tokenizers if (found := tokenizer()) is not None), None)
