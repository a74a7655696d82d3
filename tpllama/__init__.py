"""tpllama: a plain nn.Linear Llama, sharded with DTensor, quantized with torchao.

Names are resolved when used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpllama.config import EngineConfig, UserError
    from tpllama.engine.llm import LLM
    from tpllama.engine.request import Output, SamplingParams

__all__ = ["LLM", "EngineConfig", "Output", "SamplingParams", "UserError"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "tpllama.engine.llm",
    "Output": "tpllama.engine.request",
    "SamplingParams": "tpllama.engine.request",
    "EngineConfig": "tpllama.config",
    "UserError": "tpllama.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpllama' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
