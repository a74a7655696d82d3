"""Which models are registered, in order, and the state of each. Kept in a file, so that it survives a restart."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tpllama.config import UserError
from tpllama.server.errors import ApiError
from tpllama.server.registration import PROVIDER, Registration

State = Literal["registered", "loading", "loaded", "draining", "failed"]


@dataclass(eq=False)
class Entry:
    """One model. `options` are what an LLM is made of; `reason` says why its last load failed.

    is_kept: it was registered over HTTP, and belongs in the state file.
    """

    registration: Registration
    options: dict[str, Any]
    is_kept: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    state: State = "registered"
    reason: str | None = None

    @property
    def model_id(self) -> str:
        return self.registration.model_id

    def fail(self, error: Exception) -> str:
        """Takes note of why it could not be loaded, or failed: one line, which is returned."""
        self.state, self.reason = "failed", " ".join(str(error).split()) or type(error).__name__
        return self.reason

    def as_listed(self) -> dict[str, Any]:
        """The fields of both generations of clients."""
        registration = self.registration
        resource, provider = registration.location, registration.provider_id or PROVIDER
        status = {"status": self.state} | ({"reason": self.reason} if self.reason else {})
        return {
            "id": self.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": provider,
            "custom_metadata": {
                **registration.notes,
                "model_type": "llm",
                "provider_id": provider,
                "provider_resource_id": resource,
                "llama_model": registration.base,
                "torchao_config": self.options.get("torchao_config", "none"),
                **status,
            },
            "identifier": self.model_id,
            "provider_resource_id": resource,
            "provider_id": provider,
            "type": "model",
            "metadata": dict(registration.notes),
            "model_type": "llm",
        }


class Registry:
    """The models by name. `last_loaded`: the one to load first after a restart."""

    def __init__(self, state_file: Path | None = None) -> None:
        self._state_file = state_file
        self._entries: dict[str, Entry] = {}
        self.last_loaded: str | None = None

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._entries

    def entries(self) -> list[Entry]:
        """In the order of their registration."""
        return list(self._entries.values())

    def get(self, model_id: str) -> Entry:
        """Raises ApiError 404 for a name that nobody registered."""
        if model_id not in self._entries:
            known = ", ".join(list(self._entries)[:20]) or "none"
            raise ApiError(
                404,
                f"found no model {model_id!r}, expected one that is registered ({known}), "
                f"register it by POST /v1/models",
                param="model",
                code="model_not_found",
            )
        return self._entries[model_id]

    def same(self, registration: Registration) -> Entry | None:
        """The entry of a registration that says the same. Raises ApiError 409 for one that says something else."""
        entry = self._entries.get(registration.model_id)
        if entry is not None and not entry.registration.is_same(registration):
            raise ApiError(
                409,
                f"found model {registration.model_id!r} registered with another location or metadata, expected the "
                f"same, unregister it first (DELETE /v1/models/{registration.model_id})",
                param="model_id",
            )
        return entry

    def add(self, entry: Entry) -> None:
        self._entries[entry.model_id] = entry
        self._keep()

    def restore(self, entries: list[Entry], last_loaded: str | None) -> None:
        """Takes in what was registered before, all at once: the state file has all of it at any time."""
        self._entries |= {entry.model_id: entry for entry in entries}
        self.last_loaded = last_loaded

    def remove(self, model_id: str) -> None:
        self._entries.pop(model_id, None)
        if self.last_loaded == model_id:
            self.last_loaded = None
        self._keep()

    def note_loaded(self, model_id: str | None) -> None:
        """Takes note of the model that is loaded now; a restart begins with it."""
        self.last_loaded = model_id
        self._keep()

    def _keep(self) -> None:
        """Writes the state file, whole or not at all."""
        if self._state_file is None:
            return
        kept = [entry.registration.model_dump(exclude_none=True) for entry in self.entries() if entry.is_kept]
        content = json.dumps({"models": kept, "last_loaded": self.last_loaded}, indent=2) + "\n"
        folder = self._state_file.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".registry", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self._state_file)
            except BaseException:
                os.unlink(file.name)
                raise

    def kept(self) -> tuple[list[Registration], str | None]:
        """The state file's registrations, and the model to begin with. Raises UserError for what is no such file."""
        if self._state_file is None or not self._state_file.exists():
            return [], None
        try:
            content = json.loads(self._state_file.read_text(encoding="utf-8"))
            return [Registration.model_validate(each) for each in content["models"]], content.get("last_loaded")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise UserError(
                f"found {self._state_file} unreadable ({' '.join(str(error).split())[:200]}), expected the server's "
                f"registrations, remove it or give another state_file"
            ) from None
