"""llama-stack 0.2's inference API, read by its client's own types where they are installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from exchanging import EOM, EOS, ids_of, llama_like, model_of, outputs_of, played, run, streamed
from pydantic import BaseModel, ValidationError

from tpllama import LLM, SamplingParams, UserError
from tpllama.server.errors import ApiError, as_api_error, validation_error
from tpllama.server.llama_stack_chat import StackChatExchange
from tpllama.server.llama_stack_completion import StackCompletionExchange
from tpllama.server.llama_stack_forms import (
    StackBatchChatRequest,
    StackBatchCompletionRequest,
    StackChatRequest,
    StackCompletionRequest,
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FRANCE = "The capital of France is"
TOOL = {"tool_name": "get_weather", "description": "The weather",
        "parameters": {"city": {"param_type": "str"}, "days": {"param_type": "int", "required": False}}}  # fmt: skip
CALL = '{"name": "get_weather", "parameters": {"city": "Zürich"}}'


def chat(**fields: Any) -> StackChatExchange:
    return StackChatExchange(StackChatRequest.model_validate({"model_id": "m", "messages": QUESTION} | fields))


def complete(content: Any, **fields: Any) -> StackCompletionExchange:
    return StackCompletionExchange(
        StackCompletionRequest.model_validate({"model_id": "m", "content": content} | fields)
    )


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": {"strategy": {"type": "greedy"}} | fields}


def as_client(name: str, body: dict[str, Any]) -> None:
    """Checks a body by a type of the client's, 0.2.12, where it is installed."""
    json.dumps(body, allow_nan=False)
    try:
        import llama_stack_client.types as types
    except ImportError:
        return
    kind: type[BaseModel] = getattr(types, name)
    kind.model_validate(body, strict=True)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["event"]["delta"].get("text", "") for event in events)


def counts(metrics: list[dict[str, Any]]) -> dict[str, int]:
    return {each["metric"]: each["value"] for each in metrics}


def test_a_chats_stream_adds_up_to_its_answer(quick: LLM) -> None:
    [expected] = quick.chat(QUESTION, SamplingParams(max_new_tokens=5, logprobs=1))
    fields = sampling(max_tokens=5) | {"logprobs": {"top_k": 1}}
    body = run(chat(**fields), quick)
    as_client("ChatCompletionResponse", body)
    message = body["completion_message"]
    assert (message["role"], message["content"], message["tool_calls"]) == ("assistant", expected.text, [])
    assert message["stop_reason"] == "out_of_tokens"
    assert counts(body["metrics"]) == {
        "prompt_tokens": expected.prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": expected.prompt_tokens + 5,
    }
    events = run(chat(**fields, stream=True), quick)
    for event in events:
        as_client("ChatCompletionResponseStreamChunk", event)
    kinds = [event["event"]["event_type"] for event in events]
    assert kinds == ["start", *["progress"] * (len(events) - 2), "complete"]
    assert text_of(events) == expected.text
    assert [event["event"]["stop_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["event"]["stop_reason"] == "out_of_tokens"
    assert events[-1]["metrics"] == body["metrics"]
    told = [each for event in events for each in event["event"]["logprobs"] or []]
    assert len(told) == len(body["logprobs"]) == 5
    for ours, theirs, entry in zip(told, body["logprobs"], expected.logprobs or [], strict=True):
        assert ours["logprobs_by_token"] == pytest.approx(theirs["logprobs_by_token"], abs=1e-4)
        assert list(ours["logprobs_by_token"].values()) == pytest.approx([entry.logprob], abs=1e-4)


def test_completions(quick: LLM) -> None:
    [free] = quick.generate(FRANCE, SamplingParams(max_new_tokens=20))
    stop = free.text[len(free.text) // 2 :][:3]
    [expected] = quick.generate(FRANCE, SamplingParams(max_new_tokens=20, stop=(stop,)))
    assert expected.finish_reason == "stop"
    fields = sampling(max_tokens=20, stop=[stop])
    body = run(complete(FRANCE, **fields), quick)
    as_client("CompletionResponse", body)
    assert (body["content"], body["stop_reason"]) == (expected.text, "end_of_turn")
    events = run(complete([{"type": "text", "text": FRANCE}], **fields, stream=True), quick)
    assert "".join(event["delta"] for event in events) == expected.text
    assert [event["stop_reason"] for event in events] == [None] * (len(events) - 1) + ["end_of_turn"]


def test_batches_are_what_each_would_be(quick: LLM) -> None:
    fields = {"model_id": "m"} | sampling(max_tokens=4)
    request = StackBatchCompletionRequest.model_validate(fields | {"content_batch": [FRANCE, "Hi"]})
    body = run(StackCompletionExchange(request), quick)
    assert [each["content"] for each in body["batch"]] == [
        run(complete(text, **sampling(max_tokens=4)), quick)["content"] for text in (FRANCE, "Hi")
    ]
    hello = [{"role": "user", "content": "Hello"}]
    chats = StackBatchChatRequest.model_validate(fields | {"messages_batch": [QUESTION, hello]})
    body = run(StackChatExchange(chats), quick)
    as_client("InferenceBatchChatCompletionResponse", body)
    assert [each["completion_message"]["content"] for each in body["batch"]] == [
        run(chat(messages=messages, **sampling(max_tokens=4)), quick)["completion_message"]["content"]
        for messages in (QUESTION, hello)
    ]


def test_texts_follow_what_is_asked(quick: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    body = run(chat(response_format={"type": "json_schema", "json_schema": schema}), quick)
    assert json.loads(body["completion_message"]["content"]) in ({"n": 1}, {"n": 2})
    rules = {"answer": ['"yes"', '"no" more'], "more": '"!"'}
    body = run(complete(FRANCE, response_format={"type": "grammar", "bnf": rules}), quick)
    assert body["content"] in ("yes", "no!")


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(llama_like())


@pytest.mark.parametrize(
    ("text", "reason"), [(CALL + EOS, "end_of_turn"), ("<|python_tag|>" + CALL + EOM, "end_of_message")]
)
def test_calls(llama: Any, text: str, reason: str) -> None:
    tokens = ids_of(llama.tokenizer, text)
    whole = chat(tools=[TOOL])
    body = whole.answer(outputs_of(played(whole, llama, [tokens])))
    as_client("ChatCompletionResponse", body)
    message = body["completion_message"]
    assert message["stop_reason"] == reason
    [call] = message["tool_calls"]
    assert (call["tool_name"], call["arguments"]) == ("get_weather", {"city": "Zürich"})
    stream = chat(tools=[TOOL], stream=True)
    events = streamed(stream, played(stream, llama, [tokens]))
    deltas = [event["event"]["delta"] for event in events]
    assert text_of(events) == ""
    statuses = [delta["parse_status"] for delta in deltas if delta["type"] == "tool_call"]
    assert statuses == ["started", *["in_progress"] * (len(statuses) - 2), "succeeded"]
    pieces = [delta["tool_call"] for delta in deltas if delta.get("parse_status") == "in_progress"]
    assert "".join(pieces) == '{"city": "Zürich"}'
    [last] = [delta["tool_call"] for delta in deltas if delta.get("parse_status") == "succeeded"]
    assert {key: last[key] for key in ("tool_name", "arguments", "arguments_json")} == {
        key: call[key] for key in ("tool_name", "arguments", "arguments_json")
    }


def test_a_call_that_is_cut_off_has_failed(llama: Any) -> None:
    tokens = ids_of(llama.tokenizer, CALL[:-6])
    stream = chat(tools=[TOOL], stream=True)
    deltas = [event["event"]["delta"] for event in streamed(stream, played(stream, llama, [tokens]))]
    assert [delta["parse_status"] for delta in deltas if delta["type"] == "tool_call"][-1] == "failed"
    whole = chat(tools=[TOOL])
    [call] = whole.answer(outputs_of(played(whole, llama, [tokens])))["completion_message"]["tool_calls"]
    assert call["arguments"] == call["arguments_json"]


def prompt_of(llama: Any, **fields: Any) -> str:
    [prompt], _ = chat(**fields).prepare(llama)
    return llama.tokenizer.backend().decode(prompt.token_ids)


def test_what_the_model_is_told(llama: Any) -> None:
    told = prompt_of(llama, tools=[TOOL, {"tool_name": "brave_search"}])
    assert '"city": {"type": "string"}' in told
    assert '"required": ["city"]' in told
    assert "Built in: brave_search" in told
    system = {"role": "system", "content": "Use {{function_definitions}} well."}
    replaced = prompt_of(
        llama, messages=[system, *QUESTION], tools=[TOOL], tool_config={"system_message_behavior": "replace"}
    )
    assert replaced.startswith('<|im_start|>system\nUse {"name": "get_weather"')
    assert "<function=name>" in prompt_of(llama, tools=[TOOL], tool_prompt_format="function_tag")
    history = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "Q", "context": "C"},
        {"role": "assistant", "content": "", "stop_reason": "end_of_turn",
         "tool_calls": [{"call_id": "1", "tool_name": "get_weather", "arguments": {"city": "Rome"}}]},
        {"role": "tool", "call_id": "1", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "system", "content": "B"},
    ]  # fmt: skip
    assert prompt_of(llama, messages=history) == (
        "<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>user\nQ\nC<|im_end|>\n<|im_start|>assistant\n"
        '{"name": "get_weather", "parameters": {"city": "Rome"}}<|im_end|>\n<|im_start|>ipython\nRain<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_sampling(llama: Any) -> None:
    def params(**fields: Any) -> SamplingParams:
        return chat(**fields).prepare(llama)[1][0]

    assert params().temperature == 0
    assert params(sampling_params={"max_tokens": 0}).max_new_tokens > 1000
    top_p = params(sampling_params={"strategy": {"type": "top_p", "temperature": 0.5}, "repetition_penalty": 1.1})
    assert (top_p.temperature, top_p.top_p, top_p.repetition_penalty) == (0.5, 0.95, 1.1)
    top_k = params(sampling_params={"strategy": {"type": "top_k", "top_k": 3}})
    assert (top_k.temperature, top_k.top_k) == (1, 3)
    assert params(logprobs={}).logprobs == 0
    required = params(tools=[TOOL], tool_config={"tool_choice": "required"})
    assert required.grammar
    assert params(tools=[TOOL], tool_config={"tool_choice": "get_weather"}).grammar == required.grammar


IMAGE = {"type": "image", "image": {"url": {"uri": "x"}}}
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"speed": 1}, "speed"),
    ({"sampling_params": {"strategy": {"type": "beam"}}}, "sampling_params.strategy"),
    ({"sampling_params": {"strategy": {"type": "top_k", "top_k": 0}}}, "sampling_params.strategy.top_k"),
    ({"sampling_params": {"temperature": 1}}, "sampling_params.temperature"),
    ({"sampling_params": {"max_tokens": 4000}}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, None),
    ({"response_format": {"type": "grammar", "bnf": {"root": "("}}}, None),
    ({"tools": [TOOL], "tool_choice": "auto", "tool_config": {"tool_choice": "required"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_config": {"tool_choice": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_config": {"system_message_behavior": "replace"}}, "tool_config"),
    ({"tools": [TOOL | {"parameters": {"a": {"param_type": "matrix"}}}]}, "tools"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(fields)[:50] for fields, _ in REFUSED])
def test_what_cannot_be_is_a_400(llama: Any, fields: dict[str, Any], param: str | None) -> None:
    body = {"model_id": "m", "messages": QUESTION} | fields
    with pytest.raises((ApiError, ValidationError, UserError)) as caught:
        StackChatExchange(StackChatRequest.model_validate(body)).prepare(llama)
    error = caught.value
    told = validation_error(error.errors(), body) if isinstance(error, ValidationError) else as_api_error(error)
    assert told.status == 400
    assert param is None or told.param == param
    assert chat().error(told)["error"]["detail"] == told.message
