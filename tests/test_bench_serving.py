"""bench/serving.py counts what a server did, by the client's clock, and says in one line what can't be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpllama.config import UserError

from .server.serving import ServerProcess

ROOT = Path(__file__).parents[1]
TIMES = ("ttft_ms", "ttft_from_sending_ms", "e2el_ms", "e2el_from_sending_ms", "tpot_ms", "itl_ms", "send_delay_ms")
FIRST_S, NEXT_S, LAST_S = 0.03, 0.01, 0.02  # of the pretended server's answers


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        import serving
        import serving_client

        yield SimpleNamespace(serving=serving, client=serving_client)


def run(url: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/serving.py"), "--base-url", url, *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def measured(url: str, *arguments: str | Path) -> dict[str, Any]:
    """The record, which is the last line."""
    done = run(url, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "requests/s" in done.stdout
    return record


def check_sums(record: dict[str, Any]) -> None:
    """What must be so on any server."""
    assert record["completed"] + record["failed"] == record["num_requests"]
    assert sum(record["errors"].values()) == record["failed"]
    tokens = (record["prompt_tokens"], record["completion_tokens"])
    for name, number in zip(("input", "output", "total"), (*tokens, sum(tokens)), strict=True):
        assert record[f"{name}_tokens_per_s"] == pytest.approx(number / record["seconds"], rel=2e-3, abs=1e-3)
    assert record["requests_per_s"] == pytest.approx(record["completed"] / record["seconds"], rel=2e-3, abs=1e-3)
    for name in TIMES:
        times = record[name]
        assert 0 <= times["p50"] <= times["p90"] <= times["p99"]
        assert times["p99"] <= 1e3 * record["seconds"] + 0.1  # of rounding
    for name in ("mean", "p50", "p90", "p99"):
        assert record["ttft_ms"][name] <= record["e2el_ms"][name]
        assert record["ttft_from_sending_ms"][name] <= record["ttft_ms"][name]
        assert record["e2el_from_sending_ms"][name] <= record["e2el_ms"][name]
    for name in ("ttft", "e2el"):
        waited = record[f"{name}_ms"]["mean"] - record[f"{name}_from_sending_ms"]["mean"]
        if not record["failed"]:
            assert waited == pytest.approx(record["send_delay_ms"]["mean"], abs=0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ServerProcess("--model", "smollm2", "--max-batch-size", "4") as process:
        process.wait_until_ready()
        yield process.url


def test_a_real_server(server: str, tmp_path: Path) -> None:
    result = tmp_path / "results.jsonl"
    sizes = ("--num-requests", "6", "--input-len", "20", "--output-len", "5", "--ignore-eos")
    limits = ("--goodput", "ttft:60000", "e2el:60000")
    told = ("--extra-body", '{"return_token_ids": true}', "--run-name", "six", "--result-filename", result)
    record = measured(f"{server}/v1/", *sizes, "--request-rate", "40", *limits, *told)
    assert json.loads(result.read_text()) == record
    check_sums(record)
    assert {"date", "cpu", "cores", "versions", "seed", "route", "burstiness"} <= set(record)
    assert (record["bench"], record["run_name"], record["model"]) == ("serving", "six", "smollm2")
    assert (record["completed"], record["errors"]) == (6, {})
    assert (record["prompt_tokens"], record["completion_tokens"]) == (6 * 20, 6 * 5)
    assert record["arrivals_per_s"] > 0
    assert (record["goodput"], record["good_requests_per_s"]) == (1.0, record["requests_per_s"])
    # Every token is an event of its own, so that the gaps are what follows the first token.
    assert record["itl_ms"]["mean"] == pytest.approx(record["tpot_ms"]["mean"], abs=0.01)
    assert record["e2el_ms"]["mean"] >= record["ttft_ms"]["mean"] + 4 * record["tpot_ms"]["mean"] - 0.01


def test_a_real_chat(server: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("What is the capital of France?\n\nName a colour.\n")
    sizes = ("--num-requests", "3", "--output-len", "4", "--max-concurrency", "1")
    record = measured(server, *sizes, "--prompts-file", prompts, "--goodput", "e2el:0.001")
    check_sums(record)
    assert (record["route"], record["input_len"], record["prompts_file"]) == ("/v1/chat/completions", None, "prompts")
    assert (record["completed"], record["most_in_flight"], record["request_rate"]) == (3, 1, "inf")
    assert 3 <= record["completion_tokens"] <= 12
    assert (record["goodput"], record["arrivals_per_s"]) == (0.0, None)
    # One after another: the last has waited for the others.
    assert record["send_delay_ms"]["p99"] > record["e2el_from_sending_ms"]["p50"]


def test_what_the_server_refuses_is_one_line(server: str) -> None:
    for arguments, words in (
        (("--input-len", "20000"), "HTTP 400 for the warm-up"),
        (("--model", "other"), "found other at"),
    ):
        done = run(server, *arguments)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
        assert words in done.stderr


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'


@contextmanager
def pretended(answers: list[Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers, one to each request in order: a status, or (seconds, bytes) to send.

    Gives its URL and the requests' bodies.
    """
    left, bodies, lock = list(answers), [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(200, b'{"data": [{"id": "one"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                bodies.append(body | {"_authorization": self.headers["Authorization"]})
                answer = left.pop(0)
            if isinstance(answer, int):
                self.reply(answer, b'{"error": {"message": "too\\nmany"}}')
                return
            self.send_response(200)
            self.end_headers()
            for seconds, sent in answer:
                time.sleep(seconds)
                self.wfile.write(sent)
                self.wfile.flush()

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", bodies
        finally:
            http.shutdown()
            thread.join()


# A line separator inside a text, a line in two parts, and a role, which is no text.
WHOLE = [
    (0.0, b": hello\n\n" + event(delta={"role": "assistant", "content": ""})),
    (FIRST_S, 'data: {"choices": [{"text": "a\u2028'.encode()), (0.0, b'b"}]}\r\n\r\n'), (NEXT_S, event(text="c")),
    (NEXT_S, event(text="d", finish_reason="length") + USAGE), (LAST_S, b"data: [DONE]\n\n"),
]  # fmt: skip


def test_known_times_are_found() -> None:
    with pretended([WHOLE] * 5) as (url, bodies):
        arguments = ("--num-warmups", "0", "--num-requests", "5", "--max-concurrency", "1", "--output-len", "3")
        record = measured(url, *arguments, "--api-key", "k", "--goodput", f"tpot:{NEXT_S * 900}")
    check_sums(record)
    # Never sooner than the server sent them; that it is not much later is only sure of the fastest.
    for name, expected in (
        ("ttft_from_sending_ms", FIRST_S), ("e2el_from_sending_ms", FIRST_S + 2 * NEXT_S + LAST_S), ("tpot_ms", NEXT_S),
        ("itl_ms", NEXT_S),
    ):  # fmt: skip
        assert 1e3 * expected * 0.9 <= record[name]["p50"] <= 1e3 * (expected + 0.1), (name, record[name])
    assert (record["prompt_tokens"], record["completion_tokens"], record["goodput"]) == (35, 15, 0.0)
    assert len({json.dumps(body["prompt"]) for body in bodies}) == 5
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["stream"]) == ("one", 3, True)
        assert (body["stream_options"], body["_authorization"]) == ({"include_usage": True}, "Bearer k")
        assert len(body["prompt"]) == 128
        assert "ignore_eos" not in body


def test_failures_are_counted_by_kind() -> None:
    broken = [
        429, 429, [(0.0, event(text="a"))], [(0.0, event(text="a", finish_reason="stop"))],
        [(0.0, b'data: {"error": {"message": "gone", "code": "shutting_down"}}\n\n')], [(0.0, b"data: {\n\n")],
        [(0.6, WHOLE[0][1])],
    ]  # fmt: skip
    arguments = ("--num-warmups", "0", "--max-concurrency", "1", "--timeout-s", "0.4", "--goodput", "e2el:60000")
    with pretended([*broken, WHOLE]) as (url, _):
        record = measured(url, *arguments, "--num-requests", "8", "--seed", "5")
    check_sums(record)
    assert record["errors"] == {
        "HTTP 429": 2, "cut short": 1, "no usage": 1, "in the stream: shutting_down": 1, "not OpenAI's": 1,
        "timeout": 1,
    }  # fmt: skip
    assert (record["completed"], record["goodput"], record["completion_tokens"]) == (1, 1 / 8, 3)
    with pretended([429]) as (url, _):
        done = run(url, "--num-warmups", "0", "--num-requests", "1")
    assert (done.returncode, done.stderr) == (
        1, "serving: error: none of 1 requests was answered: HTTP 429: too many\n",
    )  # fmt: skip


def test_runs_differ_and_a_seed_repeats_one() -> None:
    asked, seeds = [], []
    same: tuple[str, ...] = ()
    for _ in range(3):
        with pretended([WHOLE] * 2) as (url, bodies):
            record = measured(url, "--num-warmups", "0", "--num-requests", "2", *same)
        asked.append(sorted(body["prompt"] for body in bodies))
        seeds.append(record["seed"])
        same = ("--seed", str(seeds[0])) if len(seeds) == 2 else ()
    assert asked[0] == asked[2] != asked[1]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize(
    ("arguments", "words"), [((), "no server at http://127.0.0.1:9"), (("--result-filename", "/no/f"), "unwritable")]
)
def test_what_can_not_work_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = run("http://127.0.0.1:9", *arguments)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith("serving: error: found ")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-url", "nowhere"), "no server at nowhere"),
        (("--base-url", "http://h:x"), "--base-url"),
        (("--request-rate", "0"), "above 0"),
        (("--request-rate", "nan"), "above 0"),
        (("--goodput", "itl:3"), "ttft:MS"),
        (("--num-requests", "0"), "--num-requests"),
        (("--num-warmups", "-1"), "--num-warmups"),
        (("--extra-body", "[]"), "a JSON object"),
        (("--prompts-file", "/nowhere"), "/nowhere unreadable"),
    ],
)
def test_what_is_refused(bench: SimpleNamespace, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=r"^found .*expected ") as refused:
        bench.serving.work(bench.serving.parser().parse_args(list(arguments)))
    assert words in str(refused.value)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60))
@settings(deadline=None)
def test_percentiles(bench: SimpleNamespace, seconds: list[float]) -> None:
    found = bench.serving.summary(seconds)
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(float(np.percentile(seconds, percent)) * 1e3, rel=1e-9, abs=1e-3)
    assert found["mean"] == pytest.approx(float(np.mean(seconds)) * 1e3, rel=1e-9, abs=1e-3)
    assert min(seconds) * 1e3 - 1e-3 <= found["p50"] <= found["p99"] <= max(seconds) * 1e3 + 1e-3


def test_there_are_no_percentiles_of_nothing(bench: SimpleNamespace) -> None:
    assert bench.serving.summary([]) is None


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread(bench: SimpleNamespace, burstiness: float) -> None:
    arrivals: Callable[..., list[float]] = bench.client.arrivals
    gaps = np.diff(arrivals(40000, 5.0, burstiness, "0"))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)  # 1: exponential, so Poisson
    assert arrivals(3, 5.0, 1.0, "0") != arrivals(3, 5.0, 1.0, "1")
    assert arrivals(3, float("inf"), 1.0, "0") == [0.0, 0.0, 0.0]


@given(st.data())
@settings(deadline=None)
def test_figures_add_up(bench: SimpleNamespace, data: st.DataObject) -> None:
    """Of any answers whose times follow each other."""
    step = st.floats(0, 5)
    answers = []
    for number in range(data.draw(st.integers(1, 6))):
        times = list(np.cumsum([number, *data.draw(st.lists(step, min_size=3, max_size=9))]).tolist())
        arrival, sent, *tokens, ended = times
        answer = bench.client.Answer(arrival, sent, tokens, tokens[-1], ended, 3, len(tokens))
        answer.error = data.draw(st.sampled_from([None, None, "HTTP 429"]))
        answers.append(answer)
    answers[0].ended += 0.1
    limits = data.draw(st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), st.floats(1, 2e4), min_size=1))
    found = bench.serving.figures(answers, limits)
    done = [answer for answer in answers if answer.error is None]
    assert (found["completed"], found["failed"]) == (len(done), len(answers) - len(done))
    assert found["seconds"] == round(max(answer.ended for answer in answers), 4)
    good = [
        answer for answer in done
        if (answer.token_times[0] - answer.arrival) * 1e3 <= limits.get("ttft", 1e9)
        and (answer.ended - answer.arrival) * 1e3 <= limits.get("e2el", 1e9)
        and (answer.tpot or 0) * 1e3 <= limits.get("tpot", 1e9)
    ]  # fmt: skip
    assert found["goodput"] == pytest.approx(len(good) / len(answers), abs=1e-4)
    if done:
        # The gaps of a request are what lies between its first token and its last.
        spans = sum(answer.token_times[-1] - answer.token_times[0] for answer in done)
        gaps = sum(len(answer.gaps) for answer in done)
        assert (found["itl_ms"]["mean"] * gaps if gaps else 0) == pytest.approx(spans * 1e3, abs=0.1)
        check_sums({**found, "num_requests": len(answers), "tpot_ms": found["tpot_ms"] or found["e2el_ms"],
                    "itl_ms": found["itl_ms"] or found["e2el_ms"]})  # fmt: skip
