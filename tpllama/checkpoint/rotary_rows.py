"""Query and key rows in the order that Meta and GGUF store them, and the order that Hugging Face's RoPE expects.

RoPE rotates pairs of rows. Meta stores a pair side by side: (head_dim / 2, 2) rows per head. Hugging Face puts first
members in the first half of the head and second members in the second: (2, head_dim / 2). Heads stay where they are,
so whole heads can be cut before or after, and any rows are cut from whole heads. Queries and keys have their own number
of heads, and the same head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

Rows = TypeVar("Rows")


def is_rotated(name: str) -> bool:
    """Whether RoPE rotates the rows of Hugging Face's tensor `name`: weights and biases of q and k."""
    return ".self_attn.q_proj." in name or ".self_attn.k_proj." in name


def read_rotated(read: Callable[[tuple[slice, ...]], Rows], index: tuple[slice, ...], head_dim: int) -> Rows:
    """One slice in Hugging Face's order of a tensor that `read` reads in Meta's: of the whole heads that it touches."""
    rows, *others = index
    first, last = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    heads: Any = read((slice(first, last), *others))
    if math.prod(heads.shape):
        heads = from_interleaved(heads, head_dim)
    return heads[rows.start - first : rows.stop - first]


def from_interleaved(rows: Rows, head_dim: int) -> Rows:
    """Rows of whole heads, a torch tensor or a numpy array, from Meta's order to Hugging Face's."""
    part: Any = rows
    assert part.shape[0] % head_dim == 0, "slices of q and k start and end between heads"
    pairs = part.reshape(-1, head_dim // 2, 2, *part.shape[1:])
    return pairs.swapaxes(1, 2).reshape(part.shape)
