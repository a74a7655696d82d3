"""Gumbel noise that is a pure function of a draw's key and a token's id: no state, no order, no batch.

A key becomes two 32-bit words by SplitMix64's finalizer (Steele et al. 2014), and each token's bits come from one
round of MurmurHash3's (Appleby, public domain) over its id and them. All of it is int32 arithmetic, which wraps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Key = tuple[int, int, int]

_MASK_64 = 2**64 - 1
# MurmurHash3's multipliers 0x85EBCA6B and 0xC2B2AE35, and the golden ratio, as int32.
_FIRST_MULTIPLIER = -2048144789
_SECOND_MULTIPLIER = -1028477387
_GOLDEN = -1640531527


def key_words(keys: Iterable[Key], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two words for each key, int32 [n] each. Integers beyond 64 bits are cut off."""
    words = [_hash(key) for key in keys]
    signed = torch.tensor(words, dtype=torch.int64).reshape(-1, 2).to(torch.int32)
    first, second = signed.to(device).unbind(1)
    return first, second


def gumbel(words: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, for each of `tokens` (int32) and key words, broadcast against each other.

    It is -log(E), where E = -log(1 - v) is exponential and v uniform. Large noise, which decides draws, comes from
    small v, of which float32 has plenty: v is a multiple of 2^-31 with its full precision, from 2^-32 on.
    """
    bits = _mix(tokens + _GOLDEN, 0) ^ words[0]
    bits = _mix(bits, words[1]).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-31)
    # Rounding may have made it 1, for which the noise would be -infinity.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor, word: Tensor | int) -> Tensor:
    """MurmurHash3's finalizer, in place, on int32; `word` is added on the way. Shifts carry the sign, so are masked."""
    rest = torch.bitwise_right_shift(x, 16).bitwise_and_(0xFFFF)
    x.bitwise_xor_(rest).mul_(_FIRST_MULTIPLIER).add_(word)
    torch.bitwise_right_shift(x, 13, out=rest)
    x.bitwise_xor_(rest.bitwise_and_(0x7FFFF)).mul_(_SECOND_MULTIPLIER)
    torch.bitwise_right_shift(x, 16, out=rest)
    return x.bitwise_xor_(rest.bitwise_and_(0xFFFF))


def _hash(key: Key) -> tuple[int, int]:
    """The lower and the upper half of 64 bits."""
    state = 0
    for part in key:
        x = (state ^ part) + 0x9E3779B97F4A7C15 & _MASK_64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK_64
        state = x ^ x >> 31
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
