"""The clients that people have, from PyPI, against a real server."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .serving import ServerProcess, write_run_config

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    text = "api_key: secret\nmodel_roots: [.]\nstate_file: state.json\nmodels: [{model_id: smollm2}]\n"
    with ServerProcess("--config", write_run_config(folder, text)) as process:
        process.line("loaded smollm2")
        yield process


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content is not None
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert last.usage == answer.usage


def test_openai_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    assert "Paris" in text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == text
    assert client.models.list().data[0].id == "smollm2"
    assert client.models.retrieve("smollm2").owned_by


def test_openai_tools_and_schemas(client: openai.OpenAI) -> None:
    forced: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=[WEATHER], tool_choice=forced, temperature=0, max_tokens=64
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")
    assert calls[0].function.name == "get_weather"  # type: ignore[union-attr]
    assert "city" in json.loads(calls[0].function.arguments)  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answered: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, response_format=answered, temperature=0)
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Paris", "Rome")


def test_openai_errors(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="nobody") as missing:
        create(model="nobody", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="smollm2", messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="8192"):
        create(model="smollm2", messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def stack_client(server: ServerProcess, version: str) -> Any:
    """The client of llama-stack, where the environment has one of that version."""
    pytest.importorskip("llama_stack_client")
    found = importlib.metadata.version("llama-stack-client")
    if not found.startswith(version):
        pytest.skip(f"found llama-stack-client {found}, which is another generation")
    from llama_stack_client import LlamaStackClient

    return LlamaStackClient(base_url=server.url, api_key="secret", max_retries=0)


def test_llama_stack_client_0_2(server: ServerProcess) -> None:
    client = stack_client(server, "0.2.")
    registered = client.models.register(
        model_id="alias", provider_model_id="smollm2", metadata={"llama_model": "smollm2", "skip_initialize": True}
    )
    assert (registered.identifier, registered.provider_resource_id) == ("alias", "smollm2")
    assert registered.metadata == {"llama_model": "smollm2", "skip_initialize": True}
    assert [model.identifier for model in client.models.list()] == ["smollm2", "alias"]
    assert client.models.retrieve("alias").model_type == "llm"
    options: Any = {"model_id": "alias", "messages": QUESTION, "sampling_params": {"strategy": {"type": "greedy"}}}
    answer = client.inference.chat_completion(**options)
    assert "Paris" in answer.completion_message.content
    pieces = [chunk.event for chunk in client.inference.chat_completion(**options, stream=True)]
    assert [pieces[0].event_type, pieces[-1].event_type] == ["start", "complete"]
    assert "".join(piece.delta.text for piece in pieces) == answer.completion_message.content
    text = client.inference.completion(
        model_id="alias", content="The capital of France is", sampling_params={"max_tokens": 8}
    )
    assert text.content
    client.models.unregister("alias")
    assert [model.identifier for model in client.models.list()] == ["smollm2"]
    import llama_stack_client

    with pytest.raises(llama_stack_client.NotFoundError):
        client.models.retrieve("alias")


def test_llama_stack_client_0_7(server: ServerProcess) -> None:
    client = stack_client(server, "0.7.")
    assert "smollm2" in [model.id for model in client.models.list()]
    assert client.models.retrieve("smollm2")
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    stream = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_the_schema_can_be_read(server: ServerProcess, tmp_path: Path) -> None:
    with server.client(headers={"authorization": "Bearer secret"}) as client:
        schema = client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        assert all("summary" in each for each in methods.values()), path
    request = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][request["$ref"].rpartition("/")[2]]
    assert fields["additionalProperties"] is False
    assert {"messages", "tools", "top_k", "min_p", "ignore_eos"} <= set(fields["properties"])
