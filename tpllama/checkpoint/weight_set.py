"""The files that hold a directory's weights, by their names: which form they have, and whether all are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpllama.checkpoint import names
from tpllama.checkpoint.paths import check_inside, file_named_in
from tpllama.checkpoint.weight_files import open_weight_file
from tpllama.config import UserError

Form = Literal["huggingface", "meta"]

# A whole file, numbered shards, an index of shards: of each kind, in order of preference. ft- is torchtune's 0.5.
_HF_KINDS = {
    "safetensors": (
        "model.safetensors",
        ("model-*-of-*.safetensors", "ft-model-*-of-*.safetensors"),
        "model.safetensors.index.json",
    ),
    "bin": ("pytorch_model.bin", ("pytorch_model-*-of-*.bin",), "pytorch_model.bin.index.json"),
}
# torchtune's before it wrote folders per epoch: hf_model_SHARD_EPOCH.pt and meta_model_EPOCH.pt.
_OLD_HF = re.compile(r"hf_model_(?P<shard>\d+)_(?P<epoch>\d+)\.(pt|safetensors)")
_OLD_META = re.compile(r"meta_model_(?P<epoch>\d+)\.pt")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(?P<suffix>\w+)")
_CONSOLIDATED = re.compile(r"consolidated\.(?P<number>\d+)\.pth")


@dataclass(frozen=True)
class WeightSet:
    """The files of one model's weights, in order.

    weight_map: the file of each tensor, where an index says it. Without one, files are read for all they hold.
    """

    form: Form
    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None = None
    notes: tuple[str, ...] = ()


def find_weights(path: Path) -> WeightSet | None:
    """The weights in a directory, None where there are none.

    Raises UserError for shards that are missing, and where it isn't clear which files are meant.
    """
    if not path.is_dir():
        return None
    present = sorted(entry.name for entry in path.iterdir())
    sets: list[WeightSet] = []
    for kind in _HF_KINDS:
        try:
            sets += [found] if (found := _huggingface(path, kind)) else []
        except UserError:
            if not sets:  # What isn't read needn't be whole: an index without its .bin files is common.
                raise
    first_hf = sets[:1]
    indexed = {file.name for found in sets for file in found.files}
    present = [name for name in present if name not in indexed]
    others = [found for find in (_consolidated, _either, _old) if (found := find(path, present))]
    if len(first_hf) + len(others) > 1:
        held = " and ".join(found.files[0].name for found in (*first_hf, *others))
        raise _several_forms(path, held)
    if len(sets) > 1:
        note = f"{sets[0].files[0].name} is read, {sets[1].files[0].name} beside it is not"
        return replace(sets[0], notes=(*sets[0].notes, note))
    return next(iter((*first_hf, *others)), None)


def _huggingface(path: Path, kind: str) -> WeightSet | None:
    whole, patterns, index = _HF_KINDS[kind]
    shards = sorted(shard for pattern in patterns for shard in path.glob(pattern))
    has_whole, has_index = (path / whole).is_file(), (path / index).is_file()
    if has_index:
        found = _indexed(path / index)
        if has_whole and path / whole not in found.files:
            raise UserError(
                f"found both {whole} and {index}, which names other files, in {path}, expected one, remove the other"
            )
        stale = [shard.name for shard in shards if shard not in found.files]
        note = f"{', '.join(stale[:3])}{', ...' * (len(stale) > 3)}, not named by {index} in {path}: not read"
        return replace(found, notes=(note,)) if stale else found
    if has_whole and shards:
        raise UserError(f"found both {whole} and {shards[0].name} in {path}, expected one, remove the other")
    if has_whole:
        return WeightSet("huggingface", (path / whole,))
    return WeightSet("huggingface", _all_shards(shards)) if shards else None


def _indexed(index: Path) -> WeightSet:
    weight_map = read_json(check_inside(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise UserError(
            f"found {index} without a weight_map, expected tensor names with their files, download it again"
        )
    if odd := next((name for name in weight_map if not name.isprintable()), None):
        raise UserError(f"found tensor name {odd[:80]!r} in {index}, expected printable ones, download it again")
    shards = {shard: file_named_in(index, shard) for shard in sorted(set(weight_map.values()))}
    if all(shard.endswith(".bin") for shard in shards) and index.name == "model.safetensors.index.json":
        raise UserError(f"found {index} naming .bin files, expected .safetensors, download it again")
    return WeightSet("huggingface", tuple(shards.values()), {name: shards[shard] for name, shard in weight_map.items()})


def _all_shards(shards: list[Path]) -> tuple[Path, ...]:
    """Numbered shards, all of them. Raises UserError for one that is missing, and for those of two saves."""
    matches = [match for shard in shards if (match := _SHARD.fullmatch(shard.name))]
    counts = {int(match["count"]) for match in matches}
    if len(counts) != 1 or len(matches) != len(shards):
        raise UserError(
            f"found {', '.join(shard.name for shard in shards)} in {shards[0].parent}, expected the shards of one "
            f"save, remove the others"
        )
    _check_numbers(shards, [int(match["number"]) for match in matches], range(1, counts.pop() + 1))
    return tuple(shards)


def _check_numbers(files: list[Path], numbers: list[int], expected: range) -> None:
    present, count = set(numbers), expected.stop - expected.start
    # The first alone: a name may say any count.
    missing = next((number for number in expected if number not in present), None)
    if missing is not None:
        raise UserError(
            f"found {len(files)} of {count} weight files in {files[0].parent}, number {missing} is missing, "
            f"expected all, download it"
        )
    if len(numbers) != count:
        raise UserError(
            f"found {', '.join(file.name for file in files)} in {files[0].parent}, expected the numbers "
            f"{expected.start} to {expected.stop - 1} once each, remove the others"
        )


def _consolidated(path: Path, present: list[str]) -> WeightSet | None:
    """Meta's own shards."""
    matches = [match for name in present if (match := _CONSOLIDATED.fullmatch(name))]
    # Of parts of a tensor the order counts, and 10 comes after 9.
    matches.sort(key=lambda match: int(match["number"]))
    files = [path / match.string for match in matches]
    single = [path / name for name in ("consolidated.pth", "consolidated.safetensors") if name in present]
    if len(single) + bool(files) > 1:
        raise UserError(
            f"found {', '.join(file.name for file in single + files)} in {path}, expected the files of one model, "
            f"move the others to a folder of their own"
        )
    if single:
        return WeightSet("meta", (single[0],))
    if not files:
        return None
    numbers = [int(match["number"]) for match in matches]
    _check_numbers(files, numbers, range(max(numbers) + 1))
    return WeightSet("meta", tuple(files))


def _either(path: Path, present: list[str]) -> WeightSet | None:
    """torchtune's .bin files, which have one name in both forms: the tensors in them tell."""
    shards = [path / name for name in present if name.startswith(("model-", "ft-model-")) and name.endswith(".bin")]
    if not shards:
        return None
    files = _all_shards(shards)
    held = open_weight_file(files[0], floats_only=False)
    is_meta = any(names.from_meta(name) for name in held.shapes)
    return WeightSet("meta" if is_meta else "huggingface", files)


def _old(path: Path, present: list[str]) -> WeightSet | None:
    """torchtune's files of all epochs in one folder: the newest epoch's."""
    forms: dict[Form, re.Pattern[str]] = {"meta": _OLD_META, "huggingface": _OLD_HF}
    matches = {form: [m for name in present if (m := pattern.fullmatch(name))] for form, pattern in forms.items()}
    if all(matches.values()):
        held = " and ".join(found[0].string for found in matches.values())
        raise _several_forms(path, held)
    for form, found in matches.items():
        if found:
            epochs = {int(match["epoch"]) for match in found}
            newest = [match for match in found if int(match["epoch"]) == max(epochs)]
            files = [path / match.string for match in newest]
            shards = [int(match.groupdict().get("shard", 1)) for match in newest]
            _check_numbers(files, shards, range(1, max(shards) + 1))
            note = f"of {len(epochs)} epochs in {path}, {max(epochs)} is the newest: {', '.join(f.name for f in files)}"
            return WeightSet(form, tuple(files), notes=(note,) if len(epochs) > 1 else ())
    return None


def _several_forms(path: Path, held: str) -> UserError:
    return UserError(
        f"found weights in more than one form in {path}: {held}, expected one, move the others to a folder of their own"
    )


def check_once(tensors: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """The file of each tensor. Raises UserError for a tensor that two files hold."""
    found: dict[str, Path] = {}
    for name, path in tensors:
        if name in found:
            raise UserError(
                f"found tensor {name} in {found[name].name} and in {path.name}, expected it in one file of "
                f"{path.parent}, remove the duplicate"
            )
        found[name] = path
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"found {path} unreadable ({error.strerror}), expected a JSON file, check it") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"found invalid JSON in {path} ({error}), expected an object, download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"found a {type(value).__name__} in {path}, expected a JSON object, download it again")
    return value
