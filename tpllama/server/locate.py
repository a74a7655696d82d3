"""Where a registered model's files are: under the model roots, and nowhere else whatever links and dots say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpllama.server.errors import ApiError

EMBEDDED = "smollm2"


@dataclass(frozen=True)
class Roots:
    """The folders that models may lie in. allow_hub: names of the form org/name may be those of the hub."""

    folders: tuple[Path, ...]
    allow_hub: bool = False

    def find(self, name: str) -> str:
        """What to open for a model that is said to lie at `name`: a folder or file under a root, or a name as it is.

        Raises ApiError: 404 with the places where nothing was, 403 for a path that leads out of the roots.
        """
        if name == EMBEDDED:
            return name
        looked: list[Path] = []
        for path in self._candidates(name):
            if not self.has(path):
                raise ApiError(
                    403,
                    f"found model path {name!r}, which leads out of the model roots, expected one under "
                    f"{_listed(self.folders)}",
                    param="provider_model_id",
                )
            if path.is_dir() or path.is_file():
                return str(path)
            looked.append(path)
        if self.allow_hub and _is_hub_name(name):
            return name
        raise ApiError(
            404,
            f"found no checkpoint {name!r}, looked at {_listed(looked) or 'no place, for there are no model roots'}, "
            f"expected a folder or file of a model there",
            param="provider_model_id",
        )

    def _candidates(self, name: str) -> Iterable[Path]:
        path = Path(name)
        if path.is_absolute():
            return [path]
        if name.startswith("~"):
            return [_expanded(path)]
        return [root / path for root in self.folders]

    def has(self, path: Path) -> bool:
        """Whether a path lies under a root once its links and dots are followed."""
        try:
            real = path.resolve()
            return any(real.is_relative_to(root.resolve()) and real != root.resolve() for root in self.folders)
        except (OSError, RuntimeError, ValueError):  # links in a circle, a name that no file can have
            return False

    def names(self) -> list[str]:
        """Names of what lies directly in the roots, for an error that says what there is."""
        return sorted({entry.name for root in self.folders if root.is_dir() for entry in root.iterdir()})


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # of a user that there is not
        return path


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and ".." not in name


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
