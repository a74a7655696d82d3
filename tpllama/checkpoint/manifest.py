"""The manifest beside a checkpoint that `tpllama quantize` wrote: recipe of each layer, source, sizes and hashes.

Reading it costs the headers alone: weights are compared by size and by the hash of their header. The hash of the whole
file is there for who wants to compare more (sha256sum).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tpllama.checkpoint.paths import file_named_in
from tpllama.checkpoint.weight_set import read_json
from tpllama.config import UserError

MANIFEST = "tpllama_manifest.json"
VERSION = 1
_BLOCK_BYTES = 1 << 22


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Writes `facts`, and what identifies each of `files` in `folder`."""
    entries = {file.name: identity(file) for file in files}
    content = {"version": VERSION, **facts, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def source_identity(file: Path) -> dict[str, Any]:
    """A file's size in bytes, and the SHA-256 of its first bytes: of a source, which may be too large to read twice."""
    with file.open("rb") as stream:
        start = stream.read(_BLOCK_BYTES)
    return {"bytes": file.stat().st_size, "sha256_of_first_4_mib": hashlib.sha256(start).hexdigest()}


def identity(file: Path) -> dict[str, Any]:
    """A file's size in bytes, its SHA-256, and for safetensors that of the header alone."""
    whole = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            whole.update(block)
    entry = {"bytes": file.stat().st_size, "sha256": whole.hexdigest()}
    if file.suffix == ".safetensors":
        entry["header_sha256"] = _header_sha256(file)
    return entry


def check_manifest(folder: Path, read: Iterable[Path]) -> None:
    """Raises UserError where a file isn't the one that the folder's manifest describes. No manifest, no check.

    read: the weight files that will be read, each of which the manifest has to name.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    content = read_json(path)
    if content.get("version") != VERSION:
        raise UserError(
            f"found version {content.get('version')!r} of {path}, expected {VERSION}, quantize the model again"
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise UserError(f"found {path} without its list of files, expected one, quantize the model again")
    unnamed = [file.name for file in read if file.name not in files]
    if unnamed:
        raise UserError(
            f"found {unnamed[0]}, which {path} doesn't name, expected the files that were written with it, remove "
            f"what doesn't belong there"
        )
    for name, entry in files.items():
        file = file_named_in(path, name)
        size = file.stat().st_size
        if size != entry.get("bytes"):
            raise UserError(
                f"found {file} with {size} bytes, expected {entry.get('bytes')} by {MANIFEST}, copy or "
                f"quantize it again"
            )
        stated = entry.get("header_sha256")
        if stated != (_header_sha256(file) if file.suffix == ".safetensors" else None):
            raise UserError(
                f"found {file} with another header than was written, expected the one that {MANIFEST} states, copy or "
                f"quantize it again"
            )


def _header_sha256(file: Path) -> str:
    """Of the length and the header: all that isn't weights (https://github.com/huggingface/safetensors#format)."""
    with file.open("rb") as stream:
        length = stream.read(8)
        # A header of a damaged length is read no further than the file goes, and never kept whole.
        left, digest = int.from_bytes(length, "little"), hashlib.sha256(length)
        while left > 0 and (block := stream.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
