"""The rules of the architecture, read from the source: who may import whom, and what files may not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tpllama"
FILES = sorted(PACKAGE.rglob("*.py"))
SIBLINGS = ("checkpoint", "parallel", "quantization", "kernels", "model")
COMPOSITION_ROOT = {"blueprint.py", "build.py", "start.py"}
NO_TORCH = ("engine/request.py", "engine/batch.py", "engine/scheduler.py", "engine/blocks.py", "config.py")
NO_TORCH += ("parallel/place.py", "parallel/split.py", "parallel/launch.py", "quantization/recipes.py", "terminal.py")


def imports(path: Path, at_run_time_only: bool = False) -> Iterator[str]:
    """Modules that a file imports, inside functions too; without those for type checking alone if asked."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if at_run_time_only and node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_imports(path: Path) -> set[str]:
    """Modules imported when a file is, not inside functions or for type checking."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_the_axes_never_import_one_another() -> None:
    crossings = [
        (relative(path), module)
        for path in FILES
        for sibling in SIBLINGS
        if relative(path).startswith(f"{sibling}/")
        for module in imports(path)
        for other in SIBLINGS
        if other != sibling and is_of(module, f"tpllama.{other}")
    ]
    assert not crossings


def test_only_the_composition_root_names_recipes_plans_and_kernels_together() -> None:
    packages = ("quantization", "kernels")
    for path in FILES:
        named = {p for p in packages for module in imports(path) if is_of(module, f"tpllama.{p}")}
        if len(named) == 2:
            assert path.name in COMPOSITION_ROOT, relative(path)


def test_config_imports_nothing_of_ours() -> None:
    assert not [module for module in imports(PACKAGE / "config.py") if is_of(module, "tpllama")]


@pytest.mark.parametrize("name", [name for name in NO_TORCH if (PACKAGE / name).exists()])
def test_files_that_must_not_import_torch_with_themselves(name: str) -> None:
    assert not {module for module in top_level_imports(PACKAGE / name) if is_of(module, "torch")}


def test_torchao_is_known_to_quantization_and_kernels_only() -> None:
    users = {relative(path).split("/")[0] for path in FILES if any(is_of(m, "torchao") for m in imports(path))}
    assert users <= {"quantization", "kernels"}


def test_torch_distributed_is_known_to_parallel_and_lockstep_only() -> None:
    users = {
        relative(p) for p in FILES if any(is_of(m, "torch.distributed") for m in imports(p, at_run_time_only=True))
    }
    assert {user for user in users if not user.startswith("parallel/")} <= {"engine/lockstep.py"}


def test_the_model_file_knows_no_runtime() -> None:
    forbidden = re.compile("dist|mesh|rank|shard|quant|torchao|dtensor", re.IGNORECASE)
    lines = (PACKAGE / "model" / "llama.py").read_text().splitlines()
    assert not [line for line in lines if forbidden.search(line)]


def test_only_the_terminal_and_the_command_line_write_to_the_terminal() -> None:
    writers = {relative(path) for path in FILES if re.search(r"\bprint\(|sys\.std(out|err)\.write", path.read_text())}
    assert writers <= {"cli.py", "terminal.py", "commands.py"}


def test_no_module_holds_mutable_state() -> None:
    """Module-level names are bound once, to constants, classes and functions."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Global), relative(path)


def test_files_and_functions_stay_readable() -> None:
    lengths: list[int] = []
    for path in FILES:
        source = path.read_text()
        limit = 340 if relative(path) == "config.py" else 260
        assert source.count("\n") <= limit, f"{relative(path)} is two things"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lengths.append(node.end_lineno - node.lineno + 1)  # type: ignore[operator]
                assert lengths[-1] <= 60, f"{relative(path)}: {node.name}"
    lengths.sort()
    assert lengths[len(lengths) * 9 // 10] <= 25


def test_every_module_says_what_it_owns() -> None:
    assert not [
        relative(p) for p in FILES if p.name != "__init__.py" and not ast.get_docstring(ast.parse(p.read_text()))
    ]
