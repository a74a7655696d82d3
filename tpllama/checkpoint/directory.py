"""Which form a directory's model has: Hugging Face's, Meta's, a LoRA adapter's, or a folder of such per epoch.

Owns the names that training programs give to folders, what to do where there are several, and what a base model
lends. Which files of a form are its weights is weight_set.py's concern, what is in them that of each form's reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tpllama.checkpoint.adapted import AdaptedCheckpoint
from tpllama.checkpoint.adapter import AdapterFiles, base_model, find_adapter, open_adapter
from tpllama.checkpoint.assembled import Assembled
from tpllama.checkpoint.huggingface import HuggingFaceCheckpoint, has_tokenizer, read_tokenizer
from tpllama.checkpoint.meta import MetaCheckpoint
from tpllama.checkpoint.open import Checkpoint, open_checkpoint
from tpllama.checkpoint.paths import check_inside
from tpllama.checkpoint.weight_set import WeightSet, find_weights
from tpllama.config import UserError

# Folders of one training run, each a whole model: torchtune's, the Hugging Face trainer's, llama-stack's.
_EPOCH = re.compile(r"(?P<run>epoch_|step_|checkpoint-|.+-sft-)(?P<number>\d+)")
# Of the files that are no weights: configs, tokenizers, indexes, templates.
_SMALL_FILES = (".json", ".jinja", ".txt", ".model")


def open_directory(path: Path, weights: bool = True, base: str | None = None) -> Checkpoint:
    """Opens the model in a directory; what it lacks comes from the model `base`.

    Raises UserError where there is none, or more than one.
    """
    try:
        for form in (_open_own, _open_original, _open_newest):
            if (found := form(path, weights, base)) is not None:
                return found
        if base is not None and not weights:
            return open_checkpoint(base, weights=False)
        raise UserError(f"found no model in {path} ({_content(path)}), expected {_what_instead(path)}")
    except OSError as error:
        raise UserError(
            f"found {error.filename or path} unreadable ({error.strerror}), expected the files of a model, check its "
            f"permissions"
        ) from error


def _open_own(path: Path, weights: bool, base: str | None) -> Checkpoint | None:
    """The model that lies in `path` itself, None where there is none."""
    _check_links(path)
    if not weights:
        return _open_config(path, base)
    found, adapter = find_weights(path), find_adapter(path)
    if adapter is not None and adapter.weights.parent != path:
        check_inside(adapter.weights.parent)
    if found is None:
        return _adapted(path, adapter, True, base) if adapter else None
    notes = found.notes
    if adapter is not None:
        notes += (f"the adapter in {path} is not applied: the whole model beside it has it merged",)
    if found.form == "meta":
        return _meta(path, found, base, notes=notes)
    return _huggingface(path, found, base, notes)


def _open_config(path: Path, base: str | None) -> Checkpoint | None:
    """The config and tokenizer alone."""
    if (path / "config.json").is_file():
        return _huggingface(path, None, base)
    if (path / "params.json").is_file():
        return _meta(path, None, base)
    adapter = find_adapter(path)
    return _adapted(path, adapter, False, base) if adapter else None


def _open_original(path: Path, weights: bool, base: str | None) -> Checkpoint | None:
    """Meta's form as the hub has it, in a subfolder of Hugging Face's form."""
    original = path / "original"
    if not (original / "params.json").is_file():
        return None
    _check_links(check_inside(original))
    # Fine-tuning outputs have an `original` without weights, the config in which is not theirs where a base is given.
    must_hold = weights or base is not None
    found = find_weights(original) if must_hold else None
    if must_hold and found is None:
        return None
    return _meta(original, found if weights else None, base, [path])


def _check_links(path: Path) -> None:
    """Raises UserError for a small file that is a link out of the directory, whoever reads it later."""
    for entry in path.iterdir():
        if entry.suffix in _SMALL_FILES and entry.is_symlink():
            check_inside(entry)


def _huggingface(path: Path, found: WeightSet | None, base: str | None, notes: tuple[str, ...] = ()) -> Checkpoint:
    lender, unneeded = _lender(path, "config.json", base, has_tokenizer(path))
    fields = lender.fields if lender and not (path / "config.json").is_file() else None
    whole = HuggingFaceCheckpoint(path, found, fields)
    return Assembled(whole, lender, [whole.tokenizer], (*notes, *unneeded))


def _meta(
    path: Path, found: WeightSet | None, base: str | None, folders: Sequence[Path] = (), notes: tuple[str, ...] = ()
) -> Checkpoint:
    """Meta's form. `folders` may hold Hugging Face's tokenizer, as may `path` itself."""
    folders = [folder for folder in (*folders, path) if (folder / "tokenizer.json").is_file()]
    has_own = bool(folders) or (path / "tokenizer.model").is_file()
    lender, unneeded = _lender(path, "params.json", base, has_own)
    fields = lender.fields if lender and not (path / "params.json").is_file() else None
    whole = MetaCheckpoint(path, found.files if found else (), fields)
    tokenizers = [partial(read_tokenizer, folder) for folder in folders]
    return Assembled(whole, lender, [*tokenizers, whole.tokenizer], (*notes, *unneeded))


def _lender(path: Path, config: str, base: str | None, has_tokenizer: bool) -> tuple[Checkpoint | None, list[str]]:
    """The base model, opened for its config and tokenizer where either lacks, and a note where none does."""
    has_config = (path / config).is_file()
    if base is not None and not (has_config and has_tokenizer):
        return open_checkpoint(base, weights=False), []
    if has_config:
        return None, [f"{path} has config and tokenizer: --llama-model {base} is not read"] if base else []
    raise UserError(
        f"found weights but no {config} in {path}, expected it beside them, give the model that was fine-tuned: "
        f"--llama-model BASE"
    )


def _adapted(path: Path, adapter: AdapterFiles, weights: bool, base: str | None) -> Checkpoint:
    whole = _base_of(path, adapter, weights, base)
    merged = AdaptedCheckpoint(whole, open_adapter(adapter)) if weights else whole
    return Assembled(merged, whole, [lambda: read_tokenizer(path)])


def _base_of(path: Path, adapter: AdapterFiles, weights: bool, base: str | None) -> Checkpoint:
    """The adapter's base model."""
    name = base or base_model(adapter)
    if name is None:
        raise UserError(
            f"found only a LoRA adapter in {path}, and no base_model_name_or_path in its config, expected the model "
            f"that was fine-tuned, give it: --llama-model BASE"
        )
    if base is None and Path(name).is_dir() and not _is_whole(Path(name), weights):
        raise UserError(
            f"found the adapter {path} of the base model {name!r}, which is no whole model, expected one, give it: "
            f"--llama-model BASE"
        )
    try:
        return open_checkpoint(name, weights)
    except UserError as error:
        if base is not None:
            raise
        raise UserError(
            f"found the adapter {path} of the base model {name!r}, which can't be opened ({error}), expected it here "
            f"or on the hub, give it: --llama-model BASE"
        ) from error


def _is_whole(path: Path, weights: bool) -> bool:
    """Whether a directory has weights (or a config) of its own: an adapter's base can't lead on to another base."""
    folders = (path, path / "original")
    if weights:
        return any(find_weights(folder) for folder in folders)
    return any((folder / name).is_file() for folder in folders for name in ("config.json", "params.json"))


def _epochs(path: Path) -> list[Path]:
    """Folders of one training run, the newest first. Raises UserError where there are those of several."""
    named = [(match, folder) for folder in path.iterdir() if (match := _EPOCH.fullmatch(folder.name))]
    named = [(match, folder) for match, folder in named if folder.is_dir()]
    runs = sorted({match["run"] for match, _ in named})
    if len(runs) > 1:
        raise UserError(
            f"found folders of several runs in {path} ({', '.join(f'{run}N' for run in runs)}), expected one, "
            f"give the folder of the model you mean"
        )
    return [folder for _, folder in sorted(named, key=lambda each: int(each[0]["number"]), reverse=True)]


def _open_newest(path: Path, weights: bool, base: str | None) -> Checkpoint | None:
    """The newest epoch that is complete. Raises UserError where there are epochs and none is.

    None where there are no epochs, and where all lack nothing but the config that the base lends.
    """
    epochs, skipped, failed = _epochs(path), list[str](), False
    if not epochs:
        return None
    for epoch in epochs:
        try:
            checkpoint = _open_own(check_inside(epoch), weights, base)
        except (UserError, OSError) as error:
            skipped.append(f"skipped {epoch.name}: {error}")
            failed = True
            continue
        if checkpoint is not None:
            notes = (*skipped, f"of {len(epochs)} epochs in {path}, {epoch.name} is the newest complete one")
            return Assembled(checkpoint, None, [checkpoint.tokenizer], notes)
        skipped.append(f"skipped {epoch.name}: no model in it ({_content(epoch)})")
    if base is not None and not weights and not failed:
        return None  # Epochs of weights alone: the base's config is theirs.
    raise UserError(
        f"found {len(epochs)} epochs in {path} and no complete one ({'; '.join(skipped)}), expected one with config "
        f"and weights, give a base model (--llama-model) if these lack theirs"
    )


def _content(path: Path) -> str:
    """What a directory holds, for an error."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    names = [name if name.isprintable() else repr(name) for name in names]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"it holds {', '.join(names[:8])}{more}" if names else "it is empty"


def _what_instead(path: Path) -> str:
    """What was expected, and what to do about a directory without it."""
    if files := sorted(path.glob("*.gguf")):
        return f"Hugging Face's or Meta's form, pass the GGUF file itself: {files[0]}"
    if (path / "config.json").is_file() or (path / "params.json").is_file():
        return (
            "weights beside the config: model.safetensors, pytorch_model.bin or their shards, "
            "consolidated.NN.pth, or an adapter, download them"
        )
    return (
        "config.json with model*.safetensors, params.json with consolidated.NN.pth (also in original/), "
        "an adapter, or epoch_N/ with one of these, check the path"
    )
