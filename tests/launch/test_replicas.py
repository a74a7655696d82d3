"""launch/replicas.sh: several servers behind nginx, what is lost with one of them, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import ROOT

from .test_many_hosts import Checkout, add

SCRIPT = "launch/replicas.sh"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt install nginx-light)")
CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
QUESTIONS = ("What is the capital of France?", "Name a fruit.", "Count to ten.", "Who was Bach?", "Why?", "Say hello.")
# In the place of tpllama: what it was started with, and that it can't work.
TOLD = 'echo "$@" "cores=$(taskset -cp $$ | sed "s/.*: //")" "gpus=${CUDA_VISIBLE_DEVICES-}" >>"$TOLD"; exit 2'


def body(question: str, **fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user", "content": question}]} | fields


def wait_until(is_so: Callable[[], bool], within_s: float = 90) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_ports(count: int) -> int:
    """The first of so many that follow one another, all free now."""
    for first in range(20000 + os.getpid() % 10000, 60000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def prepared(folder: Path, tpllama: str) -> Checkout:
    """A checkout with an environment for serving, and `tpllama` as the command in it."""
    checkout = Checkout(folder)
    with (checkout.venv / "tpllama.stamp").open("a") as stamp:
        stamp.write("serve\n")
    add(checkout.venv / "bin/tpllama", tpllama)
    return checkout


class Replicas:
    """The script, running. `clients`: of nginx, then of each replica."""

    def __init__(self, checkout: Checkout, count: int, *arguments: str) -> None:
        port = free_ports(count + 1)
        self.ports = range(port + 1, port + 1 + count)
        self.log = checkout.bin / "log"
        env = checkout.env | {"REPLICAS": str(count), "PORT": str(port), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            command = ["bash", str(checkout.root / SCRIPT), *arguments]
            self.process = subprocess.Popen(command, env=env, cwd=checkout.bin, stdout=log, stderr=log)
        urls = [f"http://127.0.0.1:{each}" for each in (port, *self.ports)]
        self.clients = [httpx.Client(base_url=url, timeout=120) for url in urls]
        self.nginx, *self.each = self.clients

    def is_ready(self, client: httpx.Client) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/ready").status_code == 200
        return False

    def leader(self, port: int) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(port) in child.cmdline():
                    return child
        raise AssertionError(self.log.read_text())

    def descendants(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name() != "sleep"]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    checkout = prepared(folder, f'exec {sys.executable} -m tpllama "$@"')
    running = Replicas(checkout, 2, "--model", "smollm2", "--dtype", "float32", "--max-batch-size", "8")
    try:
        wait_until(lambda: all(map(running.is_ready, running.each)))
        yield running
    finally:
        running.process.kill()  # where no test has ended it: pdeathsig ends the others
        running.process.wait()
        for client in running.clients:
            client.close()


def ask(client: httpx.Client, question: str, is_stream: bool = False, **fields: Any) -> str:
    """An answer's text. Raises httpx' errors for one that is none, or not whole."""
    if not is_stream:
        response = client.post("/v1/chat/completions", json=body(question, **fields))
        return str(response.raise_for_status().json()["choices"][0]["message"]["content"])
    with client.stream("POST", "/v1/chat/completions", json=body(question, stream=True, **fields)) as response:
        if response.is_error:
            response.read()  # what it says, for whoever catches the error
        lines = [line for line in response.raise_for_status().iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def metric(client: httpx.Client, name: str) -> float:
    """The sum of a metric's series."""
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)))


@pytest.mark.slow
@needs_nginx
def test_requests_go_to_both_and_get_the_answers_of_one(replicas: Replicas) -> None:
    expected = [ask(replicas.each[0], question) for question in QUESTIONS]
    assert "Paris" in expected[0]
    before = [metric(each, "tpllama_requests_total") for each in replicas.each]
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        is_stream = [True, False] * (len(QUESTIONS) // 2)
        answers = list(threads.map(ask, [replicas.nginx] * len(QUESTIONS), QUESTIONS, is_stream))
    assert answers == expected
    served = [metric(each, "tpllama_requests_total") - b for each, b in zip(replicas.each, before, strict=True)]
    assert sum(served) == len(QUESTIONS)
    assert min(served) >= 2  # 3, but for one that ended before the last was asked


@pytest.mark.slow
@needs_nginx
def test_tokens_come_as_they_are_made_and_a_client_that_goes_is_gone(replicas: Replicas) -> None:
    long = body("Tell me a story.", max_tokens=2000, stream=True)
    with replicas.nginx.stream("POST", "/v1/chat/completions", json=long) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert sum(metric(each, "tpllama_running") for each in replicas.each) == 1
    wait_until(lambda: not any(metric(each, "tpllama_running") for each in replicas.each), within_s=5)


@pytest.mark.slow
@needs_nginx
def test_what_would_reach_one_replica_alone_is_refused(replicas: Replicas) -> None:
    nginx, where = replicas.nginx, " ".join(f"127.0.0.1:{port}" for port in replicas.ports)
    for method, path, status in (
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/smollm2", 405),
        ("POST", "/v1/models/smollm2/unload", 405),
        ("POST", "/v1/x/../models", 405),
        ("GET", "/metrics", 404),
    ):
        response = nginx.request(method, path, json={"model_id": "other"})
        assert response.status_code == status, path
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert where in error["message"]
    assert [model["id"] for model in nginx.get("/v1/models").json()["data"]] == ["smollm2"]
    assert nginx.get("/v1/models/smollm2").json()["id"] == "smollm2"
    # A replica's own errors pass as they are.
    assert nginx.post("/v1/chat/completions", json=body("x", model="y")).json()["error"]["code"] == "model_not_found"
    response = nginx.post("/v1/chat/completions", content=b" " * (9 << 20))
    assert response.status_code == 413
    assert "more bytes than are taken" in response.json()["error"]["message"]


@pytest.mark.slow
@needs_nginx
def test_one_that_dies_loses_its_own_requests_and_comes_back(replicas: Replicas) -> None:
    nginx, (first, second) = replicas.nginx, replicas.each
    questions, is_stream = QUESTIONS[:4], [True, True, False, False]
    expected = [ask(second, question, max_tokens=100) for question in questions]
    before = metric(second, "tpllama_requests_total")

    def try_to_ask(question: str, is_stream: bool) -> str | httpx.HTTPError:
        try:
            return ask(nginx, question, is_stream, max_tokens=100)
        except httpx.HTTPError as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(try_to_ask, questions, is_stream)
        wait_until(lambda: metric(first, "tpllama_running") + metric(second, "tpllama_running") == 4)
        assert metric(first, "tpllama_running") == 2
        leader = replicas.leader(replicas.ports[0])
        leader.kill()
        leader.wait(5)  # what comes before its end may yet be sent to it
        after = [ask(nginx, question, max_tokens=4) for question in QUESTIONS]  # goes on at once
        assert all(after)
        results = list(answers)
    lost = [result for result in results if not isinstance(result, str)]
    assert len(lost) == 2
    for result, text in zip(results, expected, strict=True):
        if isinstance(result, httpx.HTTPStatusError):
            response = result.response
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "replica_lost"
        elif isinstance(result, httpx.HTTPError):
            assert isinstance(result, httpx.RemoteProtocolError)  # a stream that was cut, and looks it
        else:
            assert result == text
    # What the dead one had been sent was sent to nobody else.
    assert metric(second, "tpllama_requests_total") - before <= 2 + len(QUESTIONS)
    wait_until(lambda: replicas.is_ready(first))
    said = f"replica 127.0.0.1:{replicas.ports[0]} ended with exit code 137, starting it again"
    assert replicas.log.read_text().count(said) == 1
    # nginx tries it again with one request, and trusts it from its answer on.
    wait_until(lambda: bool(ask(nginx, "Why?", max_tokens=2)) and metric(first, "tpllama_requests_total") > 0)
    before = metric(first, "tpllama_requests_total")
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(ask, [nginx] * 6, QUESTIONS))
    assert metric(first, "tpllama_requests_total") - before >= 2


@pytest.mark.slow
@needs_nginx
def test_termination_lets_a_request_finish_and_ends_all(replicas: Replicas) -> None:
    processes = replicas.descendants()
    assert len(processes) >= 4  # two replicas, nginx and its worker
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, replicas.nginx, "Name a fruit.", True, max_tokens=60)
        wait_until(lambda: any(metric(each, "tpllama_running") for each in replicas.each))
        replicas.process.send_signal(signal.SIGTERM)
        assert answer.result()
    assert replicas.process.wait(20) == 0
    assert psutil.wait_procs(processes, timeout=1)[1] == []
    with pytest.raises(httpx.ConnectError):
        replicas.nginx.get("/health")


@needs_nginx
def test_each_replica_has_its_own_share(tmp_path: Path) -> None:
    """Of cores, GPUs and ports. One that can't work ends all, with its exit code."""
    checkout, told = prepared(tmp_path, TOLD), tmp_path / "told"
    port = free_ports(3)
    env = {"REPLICAS": "2", "TP": "2", "PORT": str(port), "TOLD": str(told), "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    (checkout.bin / "my run.yaml").touch()
    done = checkout.run("replicas.sh", "--config", "my run.yaml", **env)
    assert done.returncode == 2, done.stderr
    lines = sorted(told.read_text().splitlines())
    assert len(lines) == 2
    own = []
    for line, number, gpus in zip(lines, (1, 2), ("4,5", "6,7"), strict=True):
        start = f"serve --config my run.yaml --tp 2 --host 127.0.0.1 --port {port + number} --state-file "
        assert line.startswith(start)
        assert line.endswith(f" gpus={gpus}")
        own += re.findall(f"/{port + number}.json cores=(.*) ", line)
    assert len(own) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert own[0] != own[1]
    done = checkout.run("replicas.sh", **env | {"TPLLAMA_PIN": "0", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert len(set(re.findall("cores=(.*) ", "".join(told.read_text().splitlines(True)[2:])))) == 1


@needs_nginx
@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (("--port", "1"), {}, "error: found --port, expected"),
        (("--tp=2",), {}, "error: found --tp, expected"),
        (("--config", "no where.yaml"), {}, "error: found no file no where.yaml that can be read, expected"),
        (("--config=no where.yaml",), {}, "error: found no file no where.yaml that can be read, expected"),
        ((), {"REPLICAS": "0"}, "error: found REPLICAS=0 TP=1"),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, "error: found 1 GPUs, expected 2 x 1"),
    ],
)
def test_what_can_not_work_is_one_line(
    arguments: tuple[str, ...], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = prepared(tmp_path, TOLD).run("replicas.sh", *arguments, **env)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@needs_nginx
def test_an_address_that_is_taken_ends_it(tmp_path: Path) -> None:
    checkout = prepared(tmp_path, "exec sleep 100")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = checkout.run("replicas.sh", PORT=str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "error: found that nginx ended" in done.stderr


def test_script_is_sound() -> None:
    subprocess.run(["bash", "-n", ROOT / SCRIPT], check=True)
    assert os.access(ROOT / SCRIPT, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", SCRIPT], check=True, cwd=ROOT)


@pytest.mark.skipif(NGINX is not None, reason="nginx is here")
def test_without_nginx_it_says_what_to_install(tmp_path: Path) -> None:
    done = prepared(tmp_path, TOLD).run("replicas.sh")
    assert done.returncode == 1
    assert "apt install nginx-light" in done.stderr
