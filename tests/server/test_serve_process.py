"""`tpllama serve` as a process: what it says, how it ends, and clients that misbehave on real sockets."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import Run

from .serving import ServerProcess, events, write_run_config

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The embedded model, in a home directory of its own."""
    home = tmp_path_factory.mktemp("home")
    with ServerProcess("--model", "smollm2", "--max-batch-size", "4", env={"HOME": str(home)}) as process:
        process.wait_until_ready()
        yield process
        assert not [entry for entry in home.iterdir() if "tpllama" in entry.name]


def running(client: httpx.Client) -> float:
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith("tpllama_running{"))
    return float(line.split()[-1])


def wait_until_idle(client: httpx.Client, within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while running(client):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert 'tpllama_cache_used_blocks{model="smollm2"} 0.0' in client.get("/metrics").text


def test_it_answers_and_streams(server: ServerProcess) -> None:
    with server.client() as client:
        assert server.lines[0] == f"tpllama: serving on {server.url}"
        answer = client.post("/v1/chat/completions", json=CHAT | {"temperature": 0}).json()
        content = answer["choices"][0]["message"]["content"]
        assert "Paris" in content
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"temperature": 0, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events(response)]
        assert "".join(pieces) == content
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            client.get("/health")
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 0.03  # no answer is held back for more of it, which would be 0.04


def test_clients_that_go_away_or_never_finish_take_no_place(server: ServerProcess) -> None:
    url = httpx.URL(server.url)
    long = CHAT | {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    body = httpx.Request("POST", url, json=long).content
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with server.client() as client, contextlib.ExitStack() as sockets:

        def connect(sent: bytes) -> socket.socket:
            connection = sockets.enter_context(socket.create_connection((url.host, url.port), timeout=10))
            connection.sendall(sent)
            return connection

        for _ in range(20):
            connect(head[:30])  # slow with its head
            connect(head + body[:-1])  # slow with its body
        gone, half = connect(head + body), connect(head + body)
        for connection in (gone, half):
            assert b"200 OK" in connection.recv(1 << 16)
        assert running(client) == 2
        gone.close()
        half.shutdown(socket.SHUT_WR)
        wait_until_idle(client)
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200


def test_more_streams_than_fit_in_a_step_all_end(server: ServerProcess) -> None:
    with server.client() as client, contextlib.ExitStack() as streams:
        body = CHAT | {"max_tokens": 20, "stream": True}
        responses = [streams.enter_context(client.stream("POST", "/v1/chat/completions", json=body)) for _ in range(10)]
        assert all(list(events(response)) for response in responses)
        wait_until_idle(client)


def test_what_can_not_work_is_one_line_and_exit_code_2(tpllama: Run, server: ServerProcess, tmp_path: Path) -> None:
    port = str(httpx.URL(server.url).port)
    config = write_run_config(tmp_path, "hots: x")
    for arguments, said in (
        (("--port", port), "can't be listened on"),
        (("--config", config), "unknown key hots"),
        (("--model", "nowhere"), "no model"),
        (("--tp", "1000"), "expected"),
        (("--port", "70000"), "port"),
        (("--torchao-config", "int3"), "int3"),
    ):
        result = tpllama("serve", *arguments, timeout_s=60)
        assert result.returncode == 2, (arguments, result.stderr)
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_termination_lets_requests_finish_until_the_deadline(tmp_path: Path) -> None:
    config = write_run_config(tmp_path, "shutdown_timeout_s: 6\nmodels: [{model_id: smollm2}]\nstate_file: s.json\n")
    with ServerProcess("--config", config, "--tp", "2") as server, server.client() as client:
        server.wait_until_ready()
        children = server.children()
        short, long = CHAT | {"max_tokens": 4}, CHAT | {"max_tokens": 4000, "ignore_eos": True}
        with (
            client.stream("POST", "/v1/chat/completions", json=long | {"stream": True}) as endless,
            client.stream("POST", "/v1/chat/completions", json=short | {"stream": True}) as ending,
        ):
            endless_events = events(endless)
            next(endless_events)
            server.process.send_signal(signal.SIGTERM)
            assert list(events(ending))[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            *_, last = endless_events
            assert last["error"]["code"] == "shutting_down"
        assert server.process.wait(20) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]
        assert not [line for line in server.lines if "error" in line]
