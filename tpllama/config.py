"""What the user asked for, frozen and validated once, here. This module knows no torch and no other module of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any


class UserError(ValueError):
    """Something the user gave can't work. One line: found, expected, what to do. Exit code 2.

    rank: of the one rank that found it, in its own part of the weights; None where all find the same.
    """

    rank: int | None = None


DTYPES = ("bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
# Beyond these a number is a mistake, and would only exhaust memory.
_LARGEST = {"tp": 1 << 16, "max_batch_size": 1 << 16, "max_batch_tokens": 1 << 20, "block_size": 1 << 16}


@dataclass(frozen=True)
class EngineConfig:
    """What the user asked for: the common flags of `tpllama generate --help`. Memory is in bytes, on each rank."""

    model: str = "smollm2"
    tp: int = 1
    torchao_config: str = "none"
    quantize_lm_head: bool = False
    dtype: str = "bfloat16"
    device: str = "auto"
    max_seq_len: int | None = None
    seed: int = 0
    compile: str = "auto"
    json_model_override_args: Mapping[str, Any] | None = None
    load_format: str = "auto"
    batch_invariant: bool = False
    strict: bool = False
    max_batch_size: int = 32
    llama_model: str | None = None
    max_batch_tokens: int = 512
    block_size: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    swap_memory: int | None = None
    prefix_caching: bool = True
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("device", self.device, ("auto", "cpu", "cuda")),
            ("compile", self.compile, ("auto", "on", "off")),
            ("load_format", self.load_format, ("auto", "dummy")),
            ("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
        ):
            if value not in allowed:
                raise UserError(f"found {name} {value!r}, expected one of {', '.join(allowed)}")
        for name, kinds, expected in (
            ("model", (str, PathLike), "a checkpoint's name or path"),
            ("torchao_config", str, "a recipe's name or @file.json"),
            ("llama_model", (str, type(None)), "a name or None"),
            ("json_model_override_args", (Mapping, type(None)), "an object of config fields or None"),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise UserError(f"found {name} {str(getattr(self, name))[:60]!r}, expected {expected}")
        for name, least, is_optional in (
            ("tp", 1, False), ("max_batch_size", 1, False), ("max_batch_tokens", 1, False), ("block_size", 1, True),
            ("kv_cache_memory", 1, True), ("swap_memory", 0, True),
        ):  # fmt: skip
            number = getattr(self, name)
            if number is None and is_optional:
                continue
            limit = _LARGEST.get(name, 1 << 60)
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= limit:
                raise UserError(f"found {name} {number!r}, expected a whole number from {least} to {limit}")
        for name in ("quantize_lm_head", "batch_invariant", "strict", "prefix_caching", "chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"found {name} {getattr(self, name)!r}, expected True or False")
        if self.max_batch_tokens < self.max_batch_size:
            raise UserError(
                f"found max_batch_tokens {self.max_batch_tokens}, expected at least max_batch_size's "
                f"{self.max_batch_size}, raise it or lower --max-batch-size"
            )
        if not isinstance(self.seed, int):
            raise UserError(f"found seed {self.seed!r}, expected a whole number")
        if self.max_seq_len is not None and (not isinstance(self.max_seq_len, int) or self.max_seq_len < 2):
            raise UserError(f"found max_seq_len {self.max_seq_len!r}, expected a whole number from 2")
