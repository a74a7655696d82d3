"""Random weights for `--load-format dummy`, from a model's shapes alone.

Owns which value each element has. A value depends on the seed, the tensor's name, the row and the
column, never on the slice asked for: the weights are the same at any degree of tensor parallelism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import Checkpoint, StoredWeight, TensorInfo
from tpllama.checkpoint.tiles import TILE, tiles

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_STD = 0.02
_BOUND = _STD * 3**0.5  # A uniform distribution on [-a, a] has the standard deviation a / sqrt(3).


class DummyCheckpoint:
    """Config and tokenizer of `inner`, with made-up weights of the given shapes."""

    def __init__(self, inner: Checkpoint, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._inner = inner
        self._seed = seed
        self.quantized: Mapping[str, StoredWeight] = {}
        self.tensors: Mapping[str, TensorInfo] = {name: TensorInfo(tuple(shape)) for name, shape in shapes.items()}

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def base_path(self) -> Path | None:
        return self._inner.base_path

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        return self._inner.notes

    @property
    def fields(self) -> Mapping[str, Any]:
        return self._inner.fields

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._inner.eos_token_ids

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        """Nothing is read."""

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._inner.tokenizer()

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        import torch

        shape = self.tensors[name].shape
        assert len(index) == len(shape) <= 2, "weights are matrices and vectors"
        part = torch.ones([part.stop - part.start for part in index])
        if not name.endswith("norm.weight"):
            # A vector is a matrix of one row.
            rows, columns = index if len(index) == 2 else (slice(0, 1), index[0])
            num_columns = shape[-1]
            self._fill(
                name, part.view(rows.stop - rows.start, columns.stop - columns.start), rows, columns, num_columns
            )
        return part

    def _fill(self, name: str, part: torch.Tensor, rows: slice, columns: slice, num_columns: int) -> None:
        """Writes rows x columns of the made-up matrix into `part`, tile by tile."""
        import torch

        # Each tile has its own generator, so a slice costs the tiles it touches and no more memory.
        generator, tile = torch.Generator(), torch.empty(TILE)
        for corner, inside, target in tiles(rows, columns):
            generator.manual_seed(_tile_seed(self._seed, name, *corner))
            tile.uniform_(-_BOUND, _BOUND, generator=generator)
            part[target] = tile[inside]


def _tile_seed(seed: int, name: str, top: int, left: int) -> int:
    # Not hash(): it differs between processes.
    digest = hashlib.blake2b(f"{seed} {name} {top} {left}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
