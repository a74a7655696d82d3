"""What a LoRA adapter's JSON says: its base model, and the rank and scale of each module.

Owns the options of PEFT's adapter_config.json and of Meta's lora_args, and which of them are refused. Knows no tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpllama.checkpoint.paths import check_inside
from tpllama.checkpoint.weight_set import read_json
from tpllama.config import UserError

CONFIG_NAME = "adapter_config.json"

# Options that change what is added to a weight, or when, unless they are off.
_MUST_BE_OFF = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "kasa_config"),
)
# Initializations that subtract the fresh adapter from the base: the trained one fits that other base alone.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")


@dataclass(frozen=True)
class LoraScaling:
    """Rank and alpha of an adapter, and of the modules that differ, by PEFT's patterns of names."""

    rank: int
    alpha: float
    is_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, float]:
        """Rank of `module`, and the factor before B @ A.

        The factor is alpha / rank (LoRA, arXiv 2106.09685, section 4.1), or alpha / sqrt(rank) (rsLoRA,
        arXiv 2312.03732). Of several patterns that match the end of the name, the first counts, as in PEFT.
        """
        rank = next((rank for pattern, rank in self.rank_pattern.items() if _matches(pattern, module)), self.rank)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, module)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rslora else rank)


def base_model_of(config: Path) -> str | None:
    """The model that adapter_config.json names as the adapter's base; None where it names none."""
    name = read_json(check_inside(config)).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_scaling(weights: Path, config: Path | None) -> LoraScaling:
    """Rank and scale of the adapter in `weights`.

    They come from adapter_config.json (r, lora_alpha), else from params.json (lora_args, whose scale is the whole
    factor before B @ A) beside the weights or one directory up. Raises UserError: neither is there, an option that
    isn't read, a value that can't be.
    """
    if config is not None:
        return _from_config(config)
    for params in (weights.parent / "params.json", weights.parent.parent / "params.json"):
        args = read_json(check_inside(params)).get("lora_args") if params.is_file() else None
        if isinstance(args, dict):
            rank = _rank(args.get("rank"), "lora_args.rank", params)
            return LoraScaling(rank, rank * _positive(args.get("scale"), "lora_args.scale", params))
    raise UserError(
        f"found no rank and scale for the adapter {weights}, expected them in {CONFIG_NAME}, write the two numbers "
        f'of the training into {weights.parent / CONFIG_NAME}: {{"r": RANK, "lora_alpha": ALPHA}}'
    )


def _from_config(path: Path) -> LoraScaling:
    options = read_json(check_inside(path))
    _refuse_options(options, path)
    is_rslora = options.get("use_rslora") or False
    if not isinstance(is_rslora, bool):
        raise UserError(f"found use_rslora {is_rslora!r} in {path}, expected true or false, correct it")
    return LoraScaling(
        _rank(options.get("r"), "r", path),
        _positive(options.get("lora_alpha"), "lora_alpha", path),
        is_rslora,
        {key: _rank(value, f"rank_pattern {key}", path) for key, value in _pattern(options, "rank_pattern", path)},
        {
            key: _positive(value, f"alpha_pattern {key}", path)
            for key, value in _pattern(options, "alpha_pattern", path)
        },
    )


def _refuse_options(options: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for an option that makes the adapter anything but B @ A added to the base as it is."""
    merge = "merge the adapter with PEFT and save that"
    kind = options.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(f"found peft_type {kind!r} in {path}, expected 'LORA', {merge}")
    bias = options.get("bias", "none")
    if bias != "none":
        raise UserError(f"found bias {bias!r} in {path}, expected 'none', {merge}")
    for name in _MUST_BE_OFF:
        if options.get(name):
            raise UserError(f"found {name} in {path}, expected plain LoRA without it, {merge}")
    start = str(options.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_BASE):
        raise UserError(
            f"found init_lora_weights {start!r} in {path}, expected an adapter of the unchanged base model, save it "
            f"as one with PEFT's path_initial_model_for_weight_conversion"
        )


def _pattern(options: Mapping[str, Any], name: str, path: Path) -> list[tuple[str, Any]]:
    pattern = options.get(name) or {}
    if not isinstance(pattern, dict):
        raise UserError(f"found {name} {pattern!r} in {path}, expected an object of module names, correct it")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise UserError(
                f"found {name} {key!r} in {path}, expected a regular expression ({error}), correct it"
            ) from None
    return list(pattern.items())


def _matches(pattern: str, module: str) -> bool:
    """Whether PEFT applies `pattern` to `module`: it may begin at any component, and must reach the end."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


def _rank(value: Any, name: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"found {name} {value!r} in {path}, expected a positive integer, write the training's rank")
    return value


def _positive(value: Any, name: str, path: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"found {name} {value!r} in {path}, expected a positive number, write the training's")
    return float(value)
