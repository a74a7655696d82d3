"""The scripts and the manifest for several hosts: sound, of one mind about names and numbers, and run on one node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from tpllama.cli import build_parser

SCRIPTS = ("multinode.sh", "slurm.sbatch")


class Checkout:
    """A checkout whose environment is up to date: the python and torchrun that run this test, or a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.root, self.venv, self.bin = folder / "the checkout", folder / "venv", folder / "bin"
        (self.venv / "bin").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env |= {
            "TPLLAMA_VENV": str(self.venv),
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        add(self.venv / "bin/python", f'exec {sys.executable} "$@"')
        self.torchrun(f'exec {sys.executable} -m torch.distributed.run "$@"')
        describe = 'source "$1/launch/environment.sh"; describe'
        stamp = subprocess.run(
            ["bash", "-c", describe, "-", self.root], env=self.env, capture_output=True, text=True, check=True
        )
        (self.venv / "tpllama.stamp").write_text(stamp.stdout)

    def torchrun(self, script: str) -> None:
        add(self.venv / "bin/torchrun", script)

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.root / "launch" / script), *arguments]
        env = self.env | env
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=self.bin, check=False)


def add(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_sound(script: str) -> None:
    path = ROOT / "launch" / script
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", path], check=True, cwd=ROOT)


def test_multinode_runs_on_one_node(checkout: Checkout) -> None:
    arguments = ("generate", "What is the capital of France?", "--max-new-tokens", "8")
    del checkout.env["OMP_NUM_THREADS"]  # the tests' own
    done = checkout.run("multinode.sh", *arguments, NPROC_PER_NODE="2", MASTER_PORT="29517")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "OMP_NUM_THREADS" not in done.stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [({"NPROC_PER_NODE": "2"}, "1"), ({"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "3"}, "3"), ({}, ""),
     ({"NPROC_PER_NODE": "gpu"}, "")],
)  # fmt: skip
def test_threads_are_those_that_torchrun_would_set(checkout: Checkout, env: dict[str, str], expected: str) -> None:
    del checkout.env["OMP_NUM_THREADS"]  # the tests' own
    checkout.torchrun('echo "${OMP_NUM_THREADS:-}"')
    assert checkout.run("multinode.sh", "plan", **env).stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "--nnodes 1 --node-rank 0 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29500"),
        (
            {"SLURM_NODEID": "3"},
            "--nnodes 1 --node-rank 3 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29500",
        ),
        (
            {"NNODES": "4", "NODE_RANK": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "host0", "MASTER_PORT": "1234"},
            "--nnodes 4 --node-rank 2 --nproc-per-node 8 --master-addr host0 --master-port 1234",
        ),
    ],
)
def test_multinode_gives_torchrun_what_the_environment_says(
    checkout: Checkout, env: dict[str, str], expected: str
) -> None:
    checkout.torchrun('echo "$*"')
    assert checkout.run("multinode.sh", "plan", "--json", **env).stdout == f"{expected} -m tpllama plan --json\n"


def test_slurm_has_each_node_run_its_part(checkout: Checkout) -> None:
    """On stand-ins for SLURM's own: srun runs its command once for each node."""
    checkout.torchrun('echo "$*"')
    add(checkout.bin / "scontrol", '[[ $* == "show hostnames gpu[07-08]" ]] && printf "gpu07\\ngpu08\\n"')
    add(checkout.bin / "srun", 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done')
    job = {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(checkout.root)}
    done = checkout.run("slurm.sbatch", "generate", "two words", **job)
    common = "--nproc-per-node 8 --master-addr gpu07 --master-port 30067 -m tpllama generate two words"
    assert done.stdout.splitlines() == [f"--nnodes 2 --node-rank {node} {common}" for node in (0, 1)], done.stderr


def option(arguments: list[str], name: str) -> str:
    (value,) = (argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}="))
    return value


def test_the_kubernetes_manifest_agrees_with_itself() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    assert [(each["apiVersion"], each["kind"]) for each in (service, job)] == [("v1", "Service"), ("batch/v1", "Job")]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    arguments: list[str] = container["args"]
    assert spec["completions"] == spec["parallelism"] == int(option(arguments, "nnodes"))
    assert option(arguments, "node-rank") == "$(JOB_COMPLETION_INDEX)"
    assert int(option(arguments, "nproc-per-node")) == container["resources"]["limits"]["nvidia.com/gpu"]
    # An indexed job's pods are named JOB-INDEX, and SUBDOMAIN is the service that gives them names.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert option(arguments, "master-addr") == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert int(option(arguments, "master-port")) == ports["torchrun"]
    check_command(arguments, ports, container)
    claims = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims
    assert pod["restartPolicy"] in ("OnFailure", "Never")


def check_command(arguments: list[str], ports: dict[str, int], container: dict[str, Any]) -> None:
    """What torchrun runs is a command of ours that knows these flags, and listens where the manifest says."""
    start = arguments.index("-m")
    assert arguments[start + 1] == "tpllama"
    parsed = build_parser().parse_args(arguments[start + 2 :])
    assert parsed.command == "serve"
    assert (parsed.port or 8321) == ports["http"] == container["ports"][0]["containerPort"]
    assert parsed.model.startswith(next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "models"))
