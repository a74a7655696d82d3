"""A model as it is registered: its name, where it lies, and how it is to be loaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PROVIDER = "tpllama"
# llama-stack's documentation has one name, its code the other.
_SKIPS = ("skip_initialize", "skip_load")
# EngineConfig's fields that a model may have of its own.
ENGINE_KEYS = (
    "torchao_config", "dtype", "max_seq_len", "quantize_lm_head", "kv_cache_memory", "kv_cache_dtype",
    "batch_invariant", "json_model_override_args", "strict",
)  # fmt: skip
_KNOWN_KEYS = ("llama_model", *_SKIPS, *ENGINE_KEYS)
_MOST_CHARACTERS = 512


def is_note(name: str) -> bool:
    """Whether the last part of a key's name is one that has a meaning in a model's metadata."""
    return name.rpartition(".")[2] in _KNOWN_KEYS


class Registration(BaseModel):
    """The body of POST /v1/models.

    metadata: `llama_model`, the base that the checkpoint was made from; `skip_initialize` or `skip_load`, not to load
    it now; torchao_config, dtype, max_seq_len and the like, where this model's differ from the server's; and any notes.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_id: str = Field(min_length=1, max_length=_MOST_CHARACTERS)
    provider_model_id: str | None = Field(default=None, min_length=1, max_length=_MOST_CHARACTERS)
    provider_id: str | None = Field(default=None, max_length=_MOST_CHARACTERS)
    metadata: dict[str, Any] | None = None
    model_type: Literal["llm"] | None = None

    @field_validator("model_id", "provider_model_id", mode="after")
    @classmethod
    def _printable(cls, name: str | None) -> str | None:
        if name is not None and not name.isprintable():
            raise ValueError("a name of printable characters is expected")
        return name

    @field_validator("metadata", mode="after")
    @classmethod
    def _no_slips(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        """Keys are free, but for those that look like a known one misspelt: they would go unnoticed."""
        for key in metadata or {}:
            near = difflib.get_close_matches(key, _KNOWN_KEYS, n=1, cutoff=0.85)
            if near and near[0] != key:
                raise ValueError(f"key {key!r} looks like {near[0]!r}, which is expected")
        for key in _SKIPS:
            if not isinstance((metadata or {}).get(key, False), bool):
                raise ValueError(f"{key} has to be true or false")
        base = (metadata or {}).get("llama_model")
        if base is not None and not isinstance(base, str):
            raise ValueError("llama_model has to be a model's name")
        return metadata

    @property
    def notes(self) -> Mapping[str, Any]:
        return self.metadata or {}

    @property
    def location(self) -> str:
        """Where it is said to lie."""
        return self.provider_model_id or self.model_id

    @property
    def base(self) -> str | None:
        return self.notes.get("llama_model")

    @property
    def is_loaded_at_once(self) -> bool:
        return not any(self.notes.get(key) for key in _SKIPS)

    @property
    def engine_options(self) -> dict[str, Any]:
        """What of EngineConfig is this model's own."""
        return {key: self.notes[key] for key in ENGINE_KEYS if key in self.notes}

    def is_same(self, other: Registration) -> bool:
        """Whether both say the same of the same model, but for whether to load it."""
        return self._identity() == other._identity()

    def _identity(self) -> dict[str, Any]:
        notes = {key: value for key, value in self.notes.items() if key not in _SKIPS}
        return {"model_id": self.model_id, "location": self.location, "notes": notes}
