"""The architectures that can be run: names in a config's `architectures`, and the ModelLoader of each. No torch.

Another one is a line here, and a blueprint that knows its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tpllama.config import UserError

# A name, and where its ModelLoader is. The second name is SGLang's of the torch-native Llama.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "tpllama.build:LlamaLoader",
    "TorchNativeLlamaForCausalLM": "tpllama.build:LlamaLoader",
}
_DEFAULT = "LlamaForCausalLM"


def architecture_of(fields: Mapping[str, Any]) -> str:
    """The first name in `architectures` that is known; Llama where a config names none, as Meta's don't.

    Raises UserError where none is known.
    """
    names = fields.get("architectures")
    if names is None or names == []:
        return _DEFAULT
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        for name in names:
            if name in ARCHITECTURES:
                return name
    raise UserError(
        f"found architectures {str(names)[:80]} in the model's config, expected one of {', '.join(ARCHITECTURES)}, use "
        f"such a checkpoint, or name one in --json-model-override-args "
        f'\'{{"architectures": ["{_DEFAULT}"]}}\' if it has the same weights'
    )


def loader_of(fields: Mapping[str, Any]) -> Any:
    """The class that loads the weights of the architecture that a config names (a ModelLoader)."""
    module, _, name = ARCHITECTURES[architecture_of(fields)].partition(":")
    return getattr(import_module(module), name)
