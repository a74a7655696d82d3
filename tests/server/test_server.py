"""The application over models without weights: turns, limits, failures, disconnects; no slot and no block is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tpllama.config import UserError
from tpllama.server.app import make_app
from tpllama.server.checking import Checker
from tpllama.server.errors import ApiError
from tpllama.server.gate import Gate
from tpllama.server.locate import Roots
from tpllama.server.metrics import Metrics
from tpllama.server.models import Models
from tpllama.server.registration import Registration
from tpllama.server.registry import Entry, Registry
from tpllama.server.reply import JsonResponse
from tpllama.server.seat import Seat
from tpllama.server.serve import _listen, _server
from tpllama.server.service import Service, ServiceLimits
from tpllama.server.switch import Switch

from .fake_model import CONTEXT, FakeRanks

PROMPT = [3, 1, 4, 1, 5]


class AnyModel(Checker):
    """Finds every model but one."""

    def options(self, registration: Registration, registered: Any) -> dict[str, Any]:
        if registration.location == "nowhere":
            raise ApiError(404, "found no checkpoint")
        return {"model": registration.location}


class TestServer:
    """The parts of one server, and a client that calls the application itself."""

    __test__ = False

    def __init__(self, **limits: Any) -> None:
        self.ranks, self.metrics, self.lines = FakeRanks(), Metrics(), list[str]()
        self.given_up = list[str]()
        registry = Registry()
        self.models = Models(registry, AnyModel(Roots(())))
        self.seat = Seat(self.ranks, self.metrics, self.lines.append, self.given_up.append)
        self.switch = self.models.switch = Switch(registry, self.seat, self.models.check)
        self.metrics.watch(self.switch)
        given = {"max_requests": 8, "max_texts": 16, "request_timeout_s": 30.0} | limits
        api_key = given.pop("api_key", None)
        self.service = Service(self.switch, self.metrics, ServiceLimits(**given))
        self.reported: list[Exception] = []
        app = make_app(self.service, self.models, self.switch, self.metrics, self.reported.append)
        self.app = Gate(app, api_key, max_request_bytes=10_000)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20)

    async def register(self, *names: str, **metadata: Any) -> None:
        for name in names:
            body = {"model_id": name, "metadata": metadata}
            assert (await self.client.post("/v1/models", json=body)).status_code == 200

    async def complete(self, model: str = "a", **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 20, "seed": 7} | more
        return await self.client.post("/v1/completions", json=body)

    def start(self, model: str = "a", **more: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.complete(model, **more))

    async def begun(self, count: int = 1) -> None:
        """Until so many texts are in the engine's steps."""
        await until(lambda: len(self.engine.scheduler.running) == count)

    @property
    def engine(self) -> Any:
        return self.ranks.llms[-1].engine

    def check_idle(self) -> None:
        """Nothing runs, waits or holds a block."""
        self.engine.scheduler.check()
        assert self.engine.pool.num_available == self.engine.pool.size
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting
        assert self.switch.num_waiting == 0
        assert self.service.num_in_flight == 0

    async def close(self) -> None:
        await self.client.aclose()
        await self.switch.close(within_s=1)


async def until(condition: Callable[[], bool], within_s: float = 5) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def server(**limits: Any) -> AsyncIterator[TestServer]:
    made = TestServer(**limits)
    try:
        yield made
    finally:
        await made.close()


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine, with a time limit."""

    def run() -> None:
        async def limited() -> None:
            async with asyncio.timeout(30):
                await test()

        asyncio.run(limited())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def error(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


@on_loop
async def test_a_request_loads_the_model_that_it_asks_for() -> None:
    async with server() as s:
        await s.register("a", "b", skip_load=True)
        assert s.ranks.loads == []
        assert (await s.client.get("/ready")).status_code == 503
        first = (await s.complete("a")).json()
        assert len(first["choices"][0]["token_ids"]) == 20
        assert (await s.client.get("/ready")).json()["model"] == "a"
        await s.complete("b")
        assert (await s.complete("a")).json()["choices"] == first["choices"]
        assert s.ranks.loads == ["a", "b", "a"]
        s.check_idle()
        assert {len(llm.threads) for llm in s.ranks.llms} == {1}
        assert len(set.union(*(llm.threads for llm in s.ranks.llms))) == 1  # one thread computes


@on_loop
async def test_switching_waits_for_requests_and_keeps_their_order() -> None:
    async with server(max_requests=100) as s:
        await s.register("a", "b", "c", skip_load=True)
        alone = (await s.complete("a", max_tokens=150)).json()["choices"]
        long = [s.start("a", max_tokens=150) for _ in range(4)]
        await s.begun(4)
        others = [s.start(name) for name in ("b", "a", "c", "b", "a")]
        await until(lambda: s.switch.num_waiting == 5)
        await until(lambda: next(entry.state for entry in s.switch.registry.entries()) == "draining")
        for response in await asyncio.gather(*long):
            assert response.json()["choices"] == alone
        assert {response.status_code for response in await asyncio.gather(*others)} == {200}
        # All that wait for a model have it at once.
        assert s.ranks.loads == ["a", "b", "a", "c"]
        s.check_idle()


@on_loop
async def test_a_load_that_fails_leaves_the_model_before_it() -> None:
    async with server() as s:
        await s.register("a")
        before = (await s.complete("a")).json()["choices"]
        s.ranks.failing["b"] = RuntimeError("rank 1 failed: out of memory")
        running = s.start("a", max_tokens=100)
        await s.begun()
        response = await s.client.post("/v1/models", json={"model_id": "b"})
        assert response.status_code == 503
        assert "out of memory" in error(response)["message"]
        assert (await running).status_code == 200
        assert [each["id"] for each in s.models.listed()] == ["a"]
        assert (await s.complete("a")).json()["choices"] == before
        assert s.ranks.loads == ["a", "b", "a"]
        s.ranks.failing["c"] = UserError("found a damaged weight")
        assert (await s.client.post("/v1/models", json={"model_id": "c"})).status_code == 400
        response = await s.client.post("/v1/models", json={"model_id": "d", "provider_model_id": "nowhere"})
        assert response.status_code == 404
        assert s.seat.loaded is not None
        assert (await s.client.get("/health")).status_code == 200
        s.check_idle()


@on_loop
async def test_a_model_that_can_not_be_loaded_says_so_to_each_request() -> None:
    async with server() as s:
        await s.register("a", skip_load=True)
        s.ranks.failing["a"] = RuntimeError("a disk is broken")
        responses = await asyncio.gather(*(s.complete("a") for _ in range(3)))
        assert {response.status_code for response in responses} == {503}
        listed = s.models.get("a")["custom_metadata"]
        assert (listed["status"], listed["reason"]) == ("failed", "a disk is broken")
        s.ranks.failing.clear()
        assert (await s.complete("a")).status_code == 200  # it is tried again
        assert "reason" not in s.models.get("a")["custom_metadata"]


@on_loop
async def test_a_step_that_fails_ends_its_requests_and_the_model_is_loaded_anew() -> None:
    async with server() as s:
        await s.register("a")
        before = (await s.complete("a")).json()["choices"]
        running = [s.start("a", max_tokens=150) for _ in range(3)]
        await s.begun(3)
        s.ranks.llms[-1].executor.failure = RuntimeError("rank 1 was ended by SIGKILL")
        for response in await asyncio.gather(*running):
            assert response.status_code == 503
            assert error(response)["code"] == "model_failed"
            assert "SIGKILL" in error(response)["message"]
        assert (await s.complete("a")).json()["choices"] == before
        assert s.ranks.loads == ["a", "a"]
        assert (await s.client.get("/health")).status_code == 200
        s.check_idle()


@on_loop
async def test_the_thread_that_computes_may_end() -> None:
    async with server() as s:
        await s.register("a")
        running = s.start("a", max_tokens=150)
        await s.begun()
        s.seat.thread._jobs.put(sys.exit)
        assert error(await running)["code"] == "model_failed"
        assert (await s.complete("a")).status_code == 200
        assert s.ranks.loads == ["a", "a"]
        s.check_idle()


@on_loop
async def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    async with server() as s:
        await s.register("a")
        s.ranks.failing["a"] = RuntimeError("no more")
        assert s.ranks.on_death is not None
        await asyncio.to_thread(s.ranks.on_death, SimpleNamespace(describe=lambda: "rank 1 ended"))
        await until(lambda: s.models.get("a")["custom_metadata"].get("reason") == "no more")
        response = await s.client.get("/health")
        assert (response.status_code, response.json()["reason"]) == (503, "rank 1 ended")
        s.ranks.failing.clear()
        assert (await s.complete("a")).status_code == 200
        assert (await s.client.get("/health")).status_code == 200


@on_loop
async def test_a_request_whose_text_fails_fails_alone() -> None:
    async with server() as s:
        await s.register("a")
        running = s.start("a", max_tokens=100)
        await s.begun()
        text = next(iter(s.engine._texts.values()))
        failing = s.start("a", max_tokens=100)
        await s.begun(2)
        other = next(each for each in s.engine._texts.values() if each is not text)
        other._stream.push = lambda *_: (_ for _ in ()).throw(KeyError("a secret prompt"))
        response = await failing
        assert response.status_code == 500
        assert "secret" not in response.text
        assert [type(each) for each in s.reported] == [KeyError]
        assert (await running).status_code == 200
        assert s.ranks.loads == ["a"]
        s.check_idle()


@on_loop
async def test_unregistering_waits_or_cancels() -> None:
    async with server() as s:
        await s.register("a", "b")
        running = s.start("b", max_tokens=100)
        await s.begun()
        assert (await s.client.delete("/v1/models/b")).status_code == 204
        assert running.done()
        assert (await running).status_code == 200
        assert s.ranks.llms[-1].is_closed
        assert (await s.complete("b")).status_code == 404
        assert (await s.client.delete("/v1/models/b")).status_code == 404
        running = s.start("a", max_tokens=150)
        await until(lambda: s.seat.loaded is not None and bool(s.engine.scheduler.running))
        assert (await s.client.delete("/v1/models/a", params={"force": "true"})).status_code == 204
        assert error(await running)["code"] == "model_unloaded"
        assert s.seat.loaded is None
        assert s.models.listed() == []


@on_loop
async def test_registering_again() -> None:
    async with server() as s:
        await s.register("a")
        await s.register("a")
        assert s.ranks.loads == ["a"]
        response = await s.client.post("/v1/models", json={"model_id": "a", "provider_model_id": "elsewhere"})
        assert response.status_code == 409
        await s.register("b", skip_initialize=True)
        await s.register("b", skip_initialize=True)
        assert s.ranks.loads == ["a"]
        await s.register("b")  # now with loading it
        assert s.ranks.loads == ["a", "b"]
        both = await asyncio.gather(*(s.client.post("/v1/models", json={"model_id": name}) for name in "cd"))
        assert {response.status_code for response in both} == {200}
        assert s.ranks.loads == ["a", "b", "c", "d"]


@on_loop
async def test_models_loaded_and_unloaded_by_order() -> None:
    async with server(on_demand=False) as s:
        await s.register("a", "b", skip_load=True)
        response = await s.complete("a")
        assert response.status_code == 409
        assert "/v1/models/a/load" in error(response)["message"]
        assert (await s.client.post("/v1/models/a/load")).json()["custom_metadata"]["status"] == "loaded"
        assert (await s.complete("a")).status_code == 200
        assert (await s.complete("b")).status_code == 409
        assert (await s.client.post("/v1/models/a/unload")).json()["custom_metadata"]["status"] == "registered"
        assert s.ranks.llms[-1].is_closed
        assert (await s.client.post("/v1/models/nobody/load")).status_code == 404


@on_loop
async def test_too_many_requests_and_too_large_ones() -> None:
    async with server(max_requests=3) as s:
        await s.register("a")
        running = [s.start("a", max_tokens=100) for _ in range(3)]
        await s.begun(3)
        response = await s.complete("a")
        assert response.status_code == 429
        assert response.headers["retry-after"]
        await asyncio.gather(*running)
        assert (await s.complete("a")).status_code == 200
        assert (await s.complete("a", n=17)).status_code == 400
        response = await s.complete("a", prompt=[1] * CONTEXT)
        assert response.status_code == 400
        assert str(CONTEXT) in error(response)["message"]
        assert (await s.complete("a", prompt=[1] * 9000)).status_code == 413
        s.check_idle()


@on_loop
async def test_a_request_has_a_time_limit() -> None:
    async with server(request_timeout_s=0.1) as s:
        await s.register("a")
        s.ranks.llms[-1].executor.step_s = 0.02
        response = await s.complete("a", max_tokens=150)
        assert response.status_code == 504
        await until(lambda: not s.engine.scheduler.running)
        s.check_idle()


@on_loop
async def test_clients_that_go_away_free_their_place() -> None:
    async with server() as s:
        await s.register("a", "b", skip_load=True)
        await s.complete("a")
        for stream in (True, False):
            gone = asyncio.Event()
            asked = asyncio.create_task(call(s, {"stream": stream, "max_tokens": 180}, gone))
            await s.begun()
            gone.set()
            await asked
            await until(lambda: not s.engine.scheduler.running)
            s.check_idle()
        # One that waits for another model, too.
        running = s.start("a", max_tokens=150)
        await s.begun()
        gone = asyncio.Event()
        asked = asyncio.create_task(call(s, {"model": "b"}, gone))
        await until(lambda: s.switch.num_waiting == 1)
        gone.set()
        await asked
        assert (await running).status_code == 200
        assert (await s.complete("a")).status_code == 200
        s.check_idle()
        assert 'outcome="cancelled"' in (await s.client.get("/metrics")).text


async def call(s: TestServer, more: dict[str, Any], gone: asyncio.Event) -> list[dict[str, Any]]:
    """What the application sends to a client that goes away at `gone`."""
    body = json.dumps({"model": "a", "prompt": PROMPT, "max_tokens": 20} | more).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "server": ("server", 80), "client": ("client", 1),
    }  # fmt: skip
    messages, sent = [{"type": "http.request", "body": body, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await s.app(scope, receive, send)
    return sent


@on_loop
async def test_a_stream_that_fails_ends_with_the_error() -> None:
    async with server() as s:
        await s.register("a")
        asked = asyncio.create_task(call(s, {"stream": True, "max_tokens": 150}, asyncio.Event()))
        await s.begun()
        await asyncio.sleep(0.05)
        s.ranks.llms[-1].executor.failure = RuntimeError("broken")
        sent = await asked
        assert sent[0]["status"] == 200
        body = b"".join(message.get("body", b"") for message in sent)
        *_, last, done, _ = body.split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "model_failed"
        assert done == b"data: [DONE]"
        assert not sent[-1]["more_body"]


@on_loop
async def test_errors_have_the_form_of_their_clients() -> None:
    async with server() as s:
        for path in ("/v1/nothing", "/v1/openai/v1/nothing"):
            response = await s.client.get(path)
            assert response.status_code == 404
            assert ("detail" in error(response)) == ("openai/v1" in path)
        assert (await s.client.get("/v1/completions")).status_code == 405
        response = await s.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert error(response)["message"].startswith("found a body that is no JSON (")
        response = await s.complete("a", unheard_of=1)
        assert response.status_code == 400
        assert error(response)["param"] == "unheard_of"
        response = await s.client.post(
            "/v1/completions",
            headers={"content-type": "application/json"},
            content=b'{"model": "\\ud800", "prompt": "a"}',  # what has no bytes in UTF-8
        )
        assert response.status_code == 400
        response = await s.complete("nobody")
        assert response.status_code == 404
        assert error(response)["code"] == "model_not_found"


@on_loop
async def test_the_key_is_asked_for_everywhere_but_at_health() -> None:
    async with server(api_key="secret") as s:
        assert (await s.client.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/ready", "/openapi.json", "/docs", "/"):
            response = await s.client.get(path)
            assert response.status_code == 401, path
            assert error(response)["code"] == "invalid_api_key"
        for key in ("Bearer wrong", "secret", "Bearer", "Basic secret", "Bearer secret\xff"):
            headers = {"authorization": key.encode("latin-1")}
            assert (await s.client.get("/v1/models", headers=headers)).status_code == 401
        for key in ("Bearer secret", "bearer secret"):
            assert (await s.client.get("/v1/models", headers={"authorization": key})).status_code == 200


@on_loop
async def test_closing_lets_requests_finish_and_refuses_new_ones() -> None:
    s = TestServer()
    await s.register("a")
    running = s.start("a", max_tokens=60)
    await s.begun()
    s.service.is_closing = True
    closing = asyncio.create_task(s.switch.close(within_s=10))
    assert (await s.complete("a")).status_code == 503
    assert (await running).status_code == 200
    await closing
    assert s.ranks.has_ended
    assert s.ranks.llms[-1].is_closed


@on_loop
async def test_closing_ends_requests_at_its_deadline() -> None:
    s = TestServer()
    await s.register("a")
    s.ranks.llms[-1].executor.step_s = 0.05
    running = s.start("a", max_tokens=150)
    await s.begun()
    await s.switch.close(within_s=0.2)
    assert error(await running)["code"] == "shutting_down"
    assert s.ranks.llms[-1].is_closed


@on_loop
async def test_requests_without_a_seed_differ() -> None:
    async with server() as s:
        await s.register("a")
        sampled = [(await s.complete("a", seed=None)).json()["choices"][0]["token_ids"] for _ in range(2)]
        seeded = [(await s.complete("a", seed=5)).json()["choices"][0]["token_ids"] for _ in range(2)]
        assert sampled[0] != sampled[1]
        assert seeded[0] == seeded[1]


@on_loop
async def test_metrics_and_routes_say_what_there_is() -> None:
    async with server() as s:
        await s.register("a")
        await s.complete("a")
        await s.complete("nobody\nknows")
        text = (await s.client.get("/metrics")).text
        for line in (
            'tpllama_requests_total{model="a",outcome="length"} 1.0',
            'tpllama_requests_total{model="unknown",outcome="refused"} 1.0',
            'tpllama_prompt_tokens_total{model="a"} 5.0',
            'tpllama_generated_tokens_total{model="a"} 20.0',
            'tpllama_time_to_first_token_seconds_count{model="a"} 1.0',
            'tpllama_inter_token_seconds_count{model="a"} 19.0',
            'tpllama_queue_seconds_count{model="a"} 1.0',
            'tpllama_load_seconds{model="a"} 0.25',
            'tpllama_cache_used_blocks{model="a"} 0.0',
            'tpllama_running{model="a"} 0.0',
        ):
            assert line in text
        assert "nobody" not in text
        paths = (await s.client.get("/openapi.json")).json()["paths"]
        assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/inference/chat-completion"} <= set(paths)


def test_connections_that_ask_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpllama.server.connections._HEAD_WITHIN_S", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.5)  # longer than heads may take
        await JsonResponse({})(scope, receive, send)

    async def ask() -> None:
        listener = _listen("127.0.0.1", 0)
        uvicorn = _server(app)  # type: ignore[arg-type]
        serving = asyncio.create_task(uvicorn.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        async with asyncio.timeout(5):
            for head in (b"", b"GET / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                assert (b"200 OK" in await reader.read()) == head.endswith(b"\r\n\r\n")
                writer.close()
            uvicorn.should_exit = True
            await serving

    asyncio.run(ask())


@pytest.mark.parametrize("size", [0, 3])
def test_a_body_that_does_not_end_is_refused_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpllama.server.gate._BODY_WITHIN_S", 0.05)
    sent: list[Any] = []

    async def ask() -> None:
        parts = [{"type": "http.request", "body": b"x" * size, "more_body": True}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/completions", "headers": [], "method": "POST"}
        await Gate(None, None, 100)(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert sent[0]["status"] == 408


def test_an_entry_lists_what_both_generations_of_clients_read(tmp_path: Path) -> None:
    metadata = {"llama_model": "base", "torchao_config": "int8wo", "note": "mine"}
    registration = Registration(model_id="m", provider_model_id="runs/epoch_2", metadata=metadata)
    listed = Entry(registration, {"model": "/x", "torchao_config": "int8wo"}).as_listed()
    assert (listed["id"], listed["object"], listed["owned_by"]) == ("m", "model", "tpllama")
    assert (listed["identifier"], listed["type"], listed["model_type"]) == ("m", "model", "llm")
    assert listed["provider_resource_id"] == "runs/epoch_2"
    assert listed["metadata"] == metadata
    custom = listed["custom_metadata"]
    assert (custom["llama_model"], custom["torchao_config"], custom["status"]) == ("base", "int8wo", "registered")
