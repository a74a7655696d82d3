"""The README's commands, run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tpllama.server.checking import Checker
from tpllama.server.locate import Roots
from tpllama.server.models import Models
from tpllama.server.registry import Registry
from tpllama.server.run_config import read_run_config

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line]
SNIPPETS = [block for kind, block in BLOCKS if kind == "python"]


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, one after the other: what one writes, the next may read."""
    return tmp_path_factory.mktemp("readme")


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ['launch/generate.sh "What is the capital of France?"', "launch/test.sh"]
    assert README.index("```bash") < 20


ENDING = [each for each in COMMANDS if each.startswith((".venv", "echo")) and " -m tpllama serve" not in each]


@pytest.mark.parametrize("command", ENDING)
def test_commands(command: str, folder: Path) -> None:
    tools = {"tpllama": f"{sys.executable} -m tpllama", "torchrun": f"{sys.executable} -m torch.distributed.run"}
    here = re.sub(r"\.venv/bin/(\w+)", lambda found: tools[found[1]], command)
    result = run(["bash", "-c", here], folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() or "tpllama: wrote " in result.stderr


def test_generate_script() -> None:
    if not shutil.which("bash") or Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("needs the environment that launch/ makes")
    result = run(["bash", "-c", COMMANDS[0]])
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippets(snippet: str) -> None:
    result = run([sys.executable, "-c", snippet])
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 3, 49152])" in result.stdout


def test_the_servers_file_can_be(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = read_run_config(file)
    assert [each.engine_options["torchao_config"] for each in config.models] == ["int8wo", "int8dq"]
    checker = Checker(Roots(tuple(config.model_roots)), config.engine)
    assert Models(Registry(), checker).restore(config.models) == "smollm2"


def test_the_tree_it_describes_is_there() -> None:
    layout = README.split("## Layout of the tree")[1].split("```")[1]
    names = re.findall(r"[a-z_]+\.py|[a-z_]+/", layout)
    for name in names:
        places = [ROOT / name, ROOT / "tpllama" / name]
        assert any(place.exists() for place in places), name


def test_symbols_it_names_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tpllama").rglob("*.py"))
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", README):
        assert re.search(rf"class {owner}\b", sources), owner
        assert re.search(rf"def {member}\b", sources), member
