"""Two network namespaces of this machine as two hosts, with torchrun on each: texts, files, and a network that is cut.

Needs root, iproute2 and util-linux; no other machine and no outer network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Run

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT_S = 5
PROMPT = "What is the capital of France?"


class Node:
    """torchrun on one host: its process, what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def errors(self) -> list[str]:
        """The lines that tpllama itself complained in."""
        return [line for line in self.log.splitlines() if line.startswith("tpllama: error: ")]

    @property
    def log(self) -> str:
        return (self._folder / "err").read_text()


class Network:
    """Two namespaces, joined by a cable. `start` is a context manager: no process outlives it."""

    def __init__(self) -> None:
        self.names = [f"tpllama-{os.getpid()}-{index}" for index in (0, 1)]
        ends = [f"tp{os.getpid()}a", f"tp{os.getpid()}b"]
        self._cable = ("-n", self.names[1], "link", "set", ends[1])
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def cut(self) -> None:
        ip(*self._cable, "down")

    def mend(self) -> None:
        ip(*self._cable, "up")

    def start(self, folder: Path, index: int, ranks: int, *arguments: str, cwd: Path = ROOT) -> Node:
        """`tpllama ARGUMENTS` by torchrun on host `index`, node-0 or node-1, with so many ranks."""
        folder = folder / f"node-{index}"
        folder.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
        torchrun += ["--nproc-per-node", str(ranks), "--master-addr", ADDRESSES[0], "--master-port", "29501"]
        with_name = [
            "unshare",
            "--uts",
            "bash",
            "-c",
            f'echo node-{index} >/proc/sys/kernel/hostname && exec "$@"',
            "-",
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "TPLLAMA_HOST_TIMEOUT_S": str(TIMEOUT_S)}
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[index], *with_name, *torchrun, "-m", "tpllama", *arguments],
                stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=cwd, env=env, process_group=0,
            )  # fmt: skip
        return Node(process, folder)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("making network namespaces needs root, iproute2 and util-linux")
    try:
        network = Network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield network
    network.close()


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    """`start(ranks, *arguments, cwds=...)`: torchrun on both hosts, ended with the test."""
    nodes: list[Node] = []

    def start(ranks: int, *arguments: str, cwds: tuple[Path, Path] = (ROOT, ROOT)) -> list[Node]:
        nodes.extend(network.start(tmp_path, index, ranks, *arguments, cwd=cwds[index]) for index in (0, 1))
        return nodes

    network.mend()
    yield start
    for node in nodes:
        assert node.process.stdin is not None
        node.process.stdin.close()
        node.process.terminate()  # torchrun ends its ranks
    for node in nodes:
        try:
            node.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(node.process.pid, 9)
            node.process.wait()


def until(condition: Callable[[], object], within_s: float, nodes: list[Node]) -> float:
    """Seconds until a condition is true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "\n".join(node.log for node in nodes)
        time.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.slow, id="a rank on each"), pytest.param(2, id="two ranks on each")],
)
def test_two_hosts_generate_what_one_does(start: Callable[..., list[Node]], tpllama: Run, ranks: int) -> None:
    # In float32, where the order in which ranks are added doesn't show in the text.
    asked = ["generate", PROMPT, "--max-new-tokens", "12", "--json", "--dtype", "float32"]
    nodes = start(ranks, *asked)
    for node in nodes:
        node.process.wait(120)
    assert [node.process.returncode for node in nodes] == [0, 0], nodes[0].log + nodes[1].log
    assert nodes[1].out == ""
    alone = tpllama(*asked, "--tp", "1")
    assert json.loads(nodes[0].out)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    assert "Paris" in nodes[0].out


def test_a_cut_network_ends_both_sides_with_an_error(start: Callable[..., list[Node]], network: Network) -> None:
    nodes = start(1, "generate", "Tell me a very long story.", "--max-new-tokens", "4000", "--ignore-eos")
    until(lambda: nodes[0].out, 60, nodes)
    network.cut()
    seconds = until(lambda: all(node.errors for node in nodes), 60, nodes)
    assert seconds < TIMEOUT_S + 5
    for node, other in zip(nodes, reversed(ADDRESSES), strict=True):
        assert len(node.errors) == 1
        assert "lost another rank: " in node.errors[0]
        assert other in node.errors[0]
        assert "Traceback" not in node.log.split("tpllama: error: ")[0]


@pytest.mark.slow
def test_idle_followers_notice_too(start: Callable[..., list[Node]], network: Network) -> None:
    """Nobody asks for anything: the leader waits for its user, the others for the leader."""
    nodes = start(2, "chat", "--max-new-tokens", "8")
    user = nodes[0].process.stdin
    assert user is not None
    user.write(b"Hello!\n")
    user.flush()
    until(lambda: nodes[0].out.endswith("\n"), 90, nodes)
    time.sleep(2 * TIMEOUT_S)
    assert nodes[1].errors == []  # nothing to say is not the same as gone
    network.cut()
    assert until(lambda: nodes[1].errors, 60, nodes) < TIMEOUT_S + 5
    user.write(b"Are you there?\n")
    user.flush()
    assert until(lambda: nodes[0].errors, 60, nodes) < TIMEOUT_S + 5
    assert [len(node.errors) for node in nodes] == [1, 1]  # on each host once, not on each rank


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_host_without_the_files_is_named(
    start: Callable[..., list[Node]], make_checkpoint: Callable[..., Path], tmp_path: Path, lacking: int
) -> None:
    cwds = (tmp_path / "a", tmp_path / "b")
    for index, cwd in enumerate(cwds):
        cwd.mkdir()
        if index != lacking:
            shutil.copytree(make_checkpoint(), cwd / "models/tiny")
    nodes = start(1, "generate", "--model", "models/tiny", PROMPT, cwds=cwds)
    until(lambda: all("exitcode  : 2" in node.log for node in nodes), 60, nodes)
    assert [len(node.errors) for node in nodes] == [1, 0]
    assert f"found that host node-{lacking} (rank {lacking}) can't run models/tiny" in nodes[0].errors[0]
    assert "expected all hosts to: found no model" in nodes[0].errors[0]


def test_a_host_with_another_model_is_named(
    start: Callable[..., list[Node]], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    cwds = (tmp_path / "a", tmp_path / "b")
    for cwd, changes in zip(cwds, ({}, {"rms_norm_eps": 1e-4}), strict=True):
        cwd.mkdir()
        shutil.copytree(make_checkpoint(**changes), cwd / "tiny")
    nodes = start(1, "generate", "--model", "./tiny", PROMPT, cwds=cwds)
    until(lambda: all("exitcode  : 2" in node.log for node in nodes), 60, nodes)
    assert [len(node.errors) for node in nodes] == [1, 0]
    assert nodes[0].errors[0] == (
        "tpllama: error: found that host node-1 (rank 1) has another config than that of ./tiny on host node-0 "
        "(rank 0), expected the same files on every host, copy them there"
    )
