"""The rules of the architecture, read from the source: who may import whom, and what files may not know."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tpllama"
FILES = sorted(PACKAGE.rglob("*.py"))
SIBLINGS = ("checkpoint", "parallel", "quantization", "kernels", "model")
COMPOSITION_ROOT = {"prepare.py", "follow.py", "start.py", "blueprint.py", "stored_weights.py", "build.py", "export.py"}
# Modules that must come without torch: what they serve is on the way to a quick answer, or is plain logic.
NO_TORCH = (
    "config",
    "llama_config",
    "cli",
    "terminal",
    "quiet",
    "commands",
    "prepare",
    "quantization.recipes",
    "quantization.report",
)
NO_TORCH += ("parallel.place", "parallel.split", "parallel.launch", "checkpoint.open")
NO_TORCH += ("engine.request", "engine.batch", "engine.blocks", "engine.chunks", "engine.scheduler", "engine.llm")
NO_TORCH += ("engine.policy", "engine.text", "engine.turns", "engine.memory", "engine.executor", "engine.engine")


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


def test_only_the_composition_root_names_the_axes_together() -> None:
    axes = ("checkpoint", "parallel", "quantization", "kernels")
    for path in FILES:
        named = {axis for axis in axes for module in imports(path) if is_of(module, f"tpllama.{axis}")}
        # Commands name a place among the ranks, and the report's lines; the rest of the engine, its ranks only.
        if len(named) > 1 and relative(path) != "commands.py":
            assert relative(path) in COMPOSITION_ROOT, (relative(path), named)


def test_config_imports_nothing_of_ours() -> None:
    assert not [module for module in imports(PACKAGE / "config.py") if is_of(module, "tpllama")]


def test_modules_that_come_without_torch() -> None:
    names = [f"tpllama.{name}" for name in NO_TORCH]
    script = f"import sys, importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
    script += "    assert 'torch' not in sys.modules, name\n"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert result.returncode == 0, result.stderr


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
    """Module-level names are bound once: no `global`, and no store into or mutation of a module's container."""
    mutators = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove"}
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                 if isinstance(target, ast.Name)}  # fmt: skip
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), relative(path)
            stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and node.value
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in mutators
            owner = stored or (called and node.func.value)  # type: ignore[attr-defined]
            assert not (isinstance(owner, ast.Name) and owner.id in names), f"{relative(path)}: {owner.id}"


def test_files_and_functions_stay_readable() -> None:
    lengths: list[int] = []
    for path in FILES:
        source = path.read_text()
        limit = 290 if relative(path) == "llama_config.py" else 260
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


def test_every_error_says_what_was_found_and_what_is_expected() -> None:
    """Of texts written where they are raised; the values in them are left out."""
    texts: dict[str, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError" and node.args:
                place, text = f"{relative(path)}:{node.lineno}", node.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                literals = [part.value for part in parts if isinstance(part, ast.Constant)]
                if literals:
                    texts[place] = "".join(map(str, literals))
    assert len(texts) > 100
    assert not {place: text for place, text in texts.items() if not re.match("found .*expected ", text)}
