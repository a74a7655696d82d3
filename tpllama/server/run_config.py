"""run.yaml: what the server is, as its operator wrote it down. Unknown keys are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tpllama.config import EngineConfig, UserError
from tpllama.server.registration import Registration, is_note

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8321
_HOME = "~/.tpllama"
# ${env.NAME}, ${env.NAME:=default}, and llama-stack's older ${env.NAME:default}.
_FROM_ENVIRONMENT = re.compile(r"\$\{env\.(?P<name>\w+)(?::=?(?P<default>[^}]*))?\}")
_SAYS_WHICH_MODEL = ("model", "llama_model")
# What pydantic's errors expect, for whoever writes YAML.
_SHAPES = {
    "model_type": "keys and values",
    "dict_type": "keys and values",
    "list_type": "a list",
    "string_type": "a text",
}


class RunConfig(BaseModel):
    """The server's settings. Times are in seconds; `engine` has EngineConfig's fields, for all models.

    max_waiting: requests beyond those that the engine can have in one step. max_texts: of one request, its prompts
    times its samples. allow_hub: models registered over HTTP may be fetched from the hub.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    host: str = DEFAULT_HOST
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    api_key: str | None = None
    model_roots: list[Path] = [Path(f"{_HOME}/checkpoints")]
    state_file: Path | None = None
    on_demand: bool = True
    allow_hub: bool = False
    models: list[Registration] = []
    engine: dict[str, Any] = {}
    max_waiting: int = Field(default=256, ge=0)
    max_texts: int = Field(default=128, ge=1)
    max_request_bytes: int = Field(default=8 << 20, ge=1024)
    request_timeout_s: float = Field(default=600, gt=0)
    shutdown_timeout_s: float = Field(default=30, ge=0)

    def in_home(self) -> RunConfig:
        """The same with the home directory in place of ~."""
        roots = [root.expanduser() for root in self.model_roots]
        state_file = None if self.state_file is None else self.state_file.expanduser()
        return self.model_copy(update={"model_roots": roots, "state_file": state_file})

    @field_validator("api_key", mode="after")
    @classmethod
    def _no_empty_key(cls, key: str | None) -> str | None:
        """An empty one is none: what `${env.NAME:=}` gives where the variable isn't set."""
        return key or None

    @field_validator("engine", mode="after")
    @classmethod
    def _engine_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        known = {field.name for field in fields(EngineConfig)} - set(_SAYS_WHICH_MODEL)
        if unknown := sorted(set(options) - known):
            raise ValueError(f"unknown options {', '.join(unknown)}, of {', '.join(sorted(known))}")
        return options


def default_state_file() -> Path:
    """Where registrations are kept where nothing else is said."""
    return Path(f"{_HOME}/registry.json").expanduser()


def read_run_config(path: Path, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """The settings in a file, whose relative paths are relative to it. Raises UserError for what can't be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"found {path} unreadable ({error}), expected a YAML file, check --config") from None
    except yaml.YAMLError as error:
        raise UserError(
            f"found {path} that is no YAML ({' '.join(str(error).split())}), expected it, correct it"
        ) from None
    if content is not None and not isinstance(content, dict):
        raise UserError(f"found {path} that holds no keys and values, expected them, correct it")
    config = checked(_resolved(content or {}, environ, path), str(path)).in_home()
    roots = [path.parent / root for root in config.model_roots]
    state_file = path.parent / (config.state_file or default_state_file())
    return config.model_copy(update={"model_roots": roots, "state_file": state_file})


def checked(content: Mapping[str, Any], source: str) -> RunConfig:
    """Raises UserError for the first setting that can't be."""
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise _user_error(error.errors(include_url=False)[0], source) from None


def _user_error(error: ErrorDetails, source: str) -> UserError:
    """What is wrong with one setting, in the words of a YAML file."""
    name, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        known = RunConfig.model_fields if len(error["loc"]) == 1 else Registration.model_fields
        hint = "put it under metadata" if known is not RunConfig.model_fields and is_note(name) else "correct it"
        return UserError(f"found unknown key {name} in {source}, expected one of {', '.join(known)}, {hint}")
    if error["type"] == "missing":
        return UserError(f"found no {name} in {source}, expected it, add it")
    if expected := _SHAPES.get(error["type"]):
        return UserError(f"found {_kind(value)} at {name} in {source}, expected {expected}, correct it")
    reason = error["msg"].removeprefix("Value error, ")
    if reason != (expected := reason.removeprefix("Input should be ")):
        return UserError(f"found {name} {str(value)[:40]!r} in {source}, expected {expected}, correct it")
    return UserError(f"found {name} in {source} that can't be ({reason}), expected another value")


def _kind(value: object) -> str:
    kinds: tuple[tuple[type, str], ...] = ((str, "a text"), (dict, "keys and values"), (list, "a list"))
    kinds += ((bool, "true or false"), (type(None), "nothing"), (int, "a number"), (float, "a number"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "another value")


def _resolved(value: Any, environ: Mapping[str, str], path: Path) -> Any:
    """`value` with the environment's variables in it; a text that is one reference is read as YAML reads it."""
    if isinstance(value, dict):
        return {key: _resolved(each, environ, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, environ, path) for each in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if not environ.get(name) and default is None:
            raise UserError(f"found no {name} in the environment, expected it by {path}, set it or give a default")
        return environ.get(name) or default or ""

    text = _FROM_ENVIRONMENT.sub(replaced, value)
    if _FROM_ENVIRONMENT.fullmatch(value) and text in ("true", "false"):
        return text == "true"
    return text
