"""Paths that files of a checkpoint name: what may be opened, and what would lead out of its directory."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tpllama.config import UserError

# Of a file on all usual file systems.
_LONGEST_NAME = 256


def check_inside(path: Path) -> Path:
    """`path`, which must lie in its own directory once links are followed, or be the hub cache's link to its blobs.

    Raises UserError otherwise: a checkpoint from elsewhere must not make a server read other files.
    """
    try:
        directory, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle.
        raise UserError(f"found {path}, which leads nowhere, expected a file, copy it there") from error
    if target.parent == directory or target.is_relative_to(directory) or _is_hub_blob(directory, target):
        return path
    raise UserError(
        f"found {path} linked to {target}, expected a file inside its directory, copy the file there or give the "
        f"directory where it lies"
    )


def _is_hub_blob(directory: Path, target: Path) -> bool:
    """Whether `target` is among the blobs of the very repository whose snapshot `directory` is.

    The cache's layout: models--ORG--NAME/snapshots/REVISION/FILE, a link to models--ORG--NAME/blobs/HASH.
    """
    for snapshots in directory.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return target.parent == repository / "blobs"
    return False


def file_named_in(index: Path, name: str) -> Path:
    """The file that `index` calls `name`, which must be there, in the index's directory or below.

    Raises UserError for a missing file, and for a name that leads elsewhere.
    """
    relative = PurePosixPath(name)
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or "\\" in name
        or not name.isprintable()
        or not 0 < len(name) < _LONGEST_NAME
    ):
        raise UserError(f"found the path {name[:80]!r} in {index}, expected a file inside the directory, correct it")
    path = index.parent / relative
    try:
        is_there = path.is_file()
    except OSError:  # a name that no file can have
        is_there = False
    if not is_there:
        raise UserError(f"found no file {path}, expected it by {index.name}, download the missing shard")
    if not path.parent.resolve().is_relative_to(index.parent.resolve()):
        raise UserError(f"found the path {name!r} in {index} leading to {path.resolve()}, expected one inside, copy it")
    return check_inside(path)
