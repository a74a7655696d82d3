"""Rotary position embedding: frequencies for every type that Llama configs name, and the rotation itself.

Formulas: RoPE (arXiv 2104.09864); linear interpolation (2306.15595); dynamic NTK, as transformers
applies it; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's smoothed scaling as published with it.
Everything is computed in float32 and cast at the end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tpllama.llama_config import LlamaConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotation angles of given positions."""

    inv_freq: Tensor
    long_inv_freq: Tensor | None
    exponents: Tensor | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        # The model is built on the meta device; these few numbers are real from the start.
        with torch.device("cpu"):
            inv_freq, self.attention_factor = inverse_frequencies(config)
            long = None
            if config.rope.rope_type == "longrope":
                long = _scaled(_exponents(config), config.rope.theta, config.rope.parameters["long_factor"])
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("long_inv_freq", long, persistent=False)
        # On the device, as the others: a step that is recorded can't fetch them.
        exponents = _exponents(config) if config.rope.rope_type == "dynamic" else None
        self.register_buffer("exponents", exponents, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each of shape positions.shape + (1, head_dim), to be broadcast over heads.

        positions: int64, any shape. lengths: int64, of a shape that broadcasts to it: the length so far of
        the sequence each token belongs to; only the dynamic and longrope types look at it.
        """
        angles = positions[..., None].float() * self._frequencies(lengths)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)

    def _frequencies(self, lengths: Tensor) -> Tensor:
        rope = self.config.rope
        if self.long_inv_freq is not None:
            is_long = lengths[..., None] > rope.original_max_position
            return torch.where(is_long, self.long_inv_freq, self.inv_freq)
        if self.exponents is not None:
            # The base grows with the sequence once it is past the length the model was trained for.
            limit, factor, dim = self.config.max_position, rope.parameters["factor"], self.config.head_dim
            stretch = factor * lengths.clamp(min=limit).float() / limit - (factor - 1)
            base = rope.theta * stretch ** (dim / (dim - 2))
            return base[..., None] ** -self.exponents
        return self.inv_freq


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of the last dimension of x: [..., heads, head_dim]."""
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def inverse_frequencies(config: LlamaConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], for sequences of trained length, and the factor on cos and sin."""
    rope, exponents = config.rope, _exponents(config)
    plain = 1.0 / rope.theta**exponents
    parameters = rope.parameters
    match rope.rope_type:
        case "linear":
            return plain / parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope.original_max_position, parameters), 1.0
        case "yarn":
            return _yarn(config), _yarn_attention_factor(parameters)
        case "longrope":
            short = _scaled(exponents, rope.theta, parameters["short_factor"])
            return short, _longrope_attention_factor(config)
        case _:
            return plain, 1.0


def _exponents(config: LlamaConfig) -> Tensor:
    return torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim


def _scaled(exponents: Tensor, theta: float, factors: tuple[float, ...]) -> Tensor:
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)


def _llama3(plain: Tensor, trained: int, parameters: Any) -> Tensor:
    """Long wavelengths are interpolated by `factor`, short ones kept, those between blended linearly."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = trained * plain / (2 * math.pi)  # full rotations within the trained length
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * blend + plain / parameters["factor"] * (1 - blend)


def _yarn(config: LlamaConfig) -> Tensor:
    """YaRN section 3.2: dimensions that turn often are kept, those that turn seldom are interpolated."""
    rope, dim = config.rope, config.head_dim
    parameters = rope.parameters

    def dimension_turning(times: float) -> float:
        return dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_turning(parameters.get("beta_fast") or 32)
    high = dimension_turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = 1.0 / rope.theta ** _exponents(config)
    return plain / parameters["factor"] * interpolated + plain * (1 - interpolated)


def _yarn_attention_factor(parameters: Any) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = parameters["factor"]

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return temperature(scale) / temperature(scale_all) if scale and scale_all else temperature(1.0)


def _longrope_attention_factor(config: LlamaConfig) -> float:
    parameters, trained = config.rope.parameters, config.rope.original_max_position
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = parameters.get("factor") or config.max_position / trained
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
