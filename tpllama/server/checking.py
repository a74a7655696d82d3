"""What of a registration can be known before any weight is read: files, base model, architecture, plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpllama.config import EngineConfig, UserError
from tpllama.server.errors import ApiError
from tpllama.server.locate import EMBEDDED, Roots
from tpllama.server.registration import Registration

# Of a base model and what was made from it; a fine-tuning may add tokens and change the rest.
_OF_THE_BASE = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Checker:
    """Checks registrations. `engine`: EngineConfig's fields that all models share. Used in threads: nothing changes.

    trusted: places of models that the operator named on the command line, wherever they are.
    """

    roots: Roots
    engine: Mapping[str, Any] = field(default_factory=dict)
    trusted: frozenset[str] = frozenset()

    def options(self, registration: Registration, registered: Mapping[str, str]) -> dict[str, Any]:
        """What an LLM of the model is made of. registered: where each model that is known lies, by its name.

        Raises ApiError for a checkpoint that isn't there, a base that is unknown, and a plan that is impossible.
        """
        if str(registration.engine_options.get("torchao_config", "")).startswith("@"):
            raise ApiError(
                400,
                "found a torchao_config that is a file, expected a recipe's name, give one of those",
                param="metadata.torchao_config",
            )
        base = self._base(registration, registered)
        path = (
            registration.location if registration.location in self.trusted else self.roots.find(registration.location)
        )
        options = {**self.engine, **registration.engine_options, "model": path}
        # A GGUF file is a whole model, which takes nothing from a base.
        if base is not None and path != EMBEDDED and not path.endswith(".gguf"):
            options["llama_model"] = base
        try:
            self._check(options, base)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return options

    def _base(self, registration: Registration, registered: Mapping[str, str]) -> str | None:
        """Where the base model lies."""
        name = registration.base
        if name is None:
            return None
        if name in registered:
            return registered[name]
        try:
            return self.roots.find(name)
        except ApiError:
            known = ", ".join(sorted({*registered, *self.roots.names()})[:20]) or "none"
            raise ApiError(
                400,
                f"found unknown base model {name!r}, expected one that is registered or lies under a model root "
                f"({known}), correct llama_model",
                param="metadata.llama_model",
            ) from None

    def _check(self, options: dict[str, Any], base: str | None) -> None:
        from tpllama.checkpoint.open import open_checkpoint, open_for
        from tpllama.llama_config import LlamaConfig
        from tpllama.start import draw_blueprint

        engine = engine_config(options)
        checkpoint = open_for(engine)
        if not self._is_trusted(options["model"]):
            self._check_places(checkpoint.path, checkpoint.base_path if base is None else None)
        if base is not None:
            own = LlamaConfig.from_hf(checkpoint.fields)
            its = LlamaConfig.from_hf(open_checkpoint(base, weights=False).fields)
            for name in _OF_THE_BASE:
                if getattr(own, name) != getattr(its, name):
                    raise UserError(
                        f"found {name} {getattr(own, name)} in the checkpoint, expected its base model's "
                        f"{getattr(its, name)}, correct llama_model"
                    )
        draw_blueprint(engine, checkpoint)

    def _is_trusted(self, model: str) -> bool:
        return model == EMBEDDED or model in self.trusted or self.roots.allow_hub

    def _check_places(self, *paths: Path | None) -> None:
        """Raises ApiError where an adapter's config led out of the roots."""
        for path in paths:
            if path is not None and not self.roots.has(path):
                raise ApiError(
                    403,
                    f"found a checkpoint that needs {path}, expected all of it under the model roots, put it there",
                    param="provider_model_id",
                )


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Raises UserError for what can't be."""
    try:
        return EngineConfig(**options)
    except TypeError as error:
        raise UserError(f"found options of a model that can't be ({error}), expected EngineConfig's fields") from None
