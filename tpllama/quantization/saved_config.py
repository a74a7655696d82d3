"""The `quantization_config` of a saved checkpoint's config.json, as transformers' TorchAoConfig writes and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpllama.quantization.recipes import Recipe

# transformers' default leaves the output head out; what is named here alone stays plain.
_NEVER = "model.embed_tokens"


def quantization_config(recipes: Mapping[str, Recipe | None]) -> dict[str, Any]:
    """For the recipe of every linear module, None where it stays plain."""
    from torchao.core.config import config_to_dict
    from torchao.quantization import FqnToConfig

    quantized = {module: recipe for module, recipe in recipes.items() if recipe is not None}
    distinct = list(dict.fromkeys(quantized.values()))
    if len(distinct) == 1:
        config = distinct[0].saved_config()
    else:
        config = FqnToConfig({module: recipe.saved_config() for module, recipe in quantized.items()})
    return {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(config)},
        "modules_to_not_convert": [_NEVER, *(module for module in recipes if module not in quantized)],
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
