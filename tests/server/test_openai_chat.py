"""Chat in OpenAI's form, read by the openai package's own types: what is asked, what is answered, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from exchanging import EOM, EOS, ids_of, llama_like, model_of, outputs_of, played, run, streamed
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tpllama import LLM, SamplingParams, UserError
from tpllama.server.errors import ApiError, as_api_error, validation_error
from tpllama.server.openai_chat import ChatExchange, ChatRequest

openai_types = pytest.importorskip("openai.types.chat")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TIME = {"type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"],
        "$defs": {"zone": {"enum": ["CET", "UTC"]}}}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]


def chat(**fields: Any) -> ChatExchange:
    return ChatExchange(ChatRequest.model_validate({"model": "m", "messages": QUESTION, "temperature": 0} | fields))


def completion(body: dict[str, Any]) -> Any:
    json.dumps(body, allow_nan=False)
    return openai_types.ChatCompletion.model_validate(body, strict=True)


def joined(events: list[dict[str, Any]]) -> Any:
    """What the openai package makes of a stream."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state: Any = ChatCompletionStreamState()
    for event in events:
        json.dumps(event, allow_nan=False)
        state.handle_chunk(openai_types.ChatCompletionChunk.model_validate(event, strict=True))
    return state.current_completion_snapshot


def said(completion: Any) -> list[tuple[Any, ...]]:
    """What counts of the choices; ids of calls are new each time."""
    return [
        (
            choice.index,
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in sorted(completion.choices, key=lambda choice: choice.index)
    ]


# With the embedded model.


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 6},
        {"max_completion_tokens": 20, "stop": [" of", "zzz"]},
        {"max_tokens": 8, "n": 3, "temperature": 1.5, "seed": 7, "top_p": 0.9, "logit_bias": {"42": -100}},
        {"max_tokens": 5, "logprobs": True, "top_logprobs": 3},
        {"max_tokens": 24, "tools": TOOLS, "tool_choice": "required"},
        {"max_tokens": 12, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        {"max_tokens": 12, "response_format": {"type": "json_object"}},
    ],
    ids=["length", "stop", "n", "logprobs", "required", "named", "json"],
)
def test_a_stream_adds_up_to_the_answer(quick: LLM, fields: dict[str, Any]) -> None:
    whole = completion(run(chat(**fields), quick))
    events = run(chat(**fields, stream=True, stream_options={"include_usage": True}), quick)
    stream = joined(events)
    assert said(stream) == said(whole)
    assert stream.usage == whole.usage
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert {event["id"] for event in events} == {events[0]["id"]}
    for ours, theirs in zip(stream.choices, whole.choices, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs:
            assert [each.token for each in ours.logprobs.content] == [each.token for each in theirs.logprobs.content]
            assert [each.logprob for each in ours.logprobs.content] == pytest.approx(
                [each.logprob for each in theirs.logprobs.content], abs=1e-4
            )


def test_counts_and_reasons_are_the_engines(smollm2: LLM) -> None:
    prompt = smollm2.tokenizer.encode_chat(QUESTION)
    [output] = smollm2.generate([prompt], SamplingParams(max_new_tokens=64))
    assert output.finish_reason == "stop"
    answer = completion(run(chat(), smollm2))
    assert answer.choices[0].message.content == output.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(output.token_ids)
    assert answer.usage.total_tokens == len(prompt) + len(output.token_ids)
    several = completion(run(chat(n=2, max_tokens=3), smollm2))
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (len(prompt), 6)
    assert [choice.finish_reason for choice in several.choices] == ["length", "length"]


def test_log_probabilities_are_of_the_tokens_that_were_drawn(quick: LLM) -> None:
    params = SamplingParams(max_new_tokens=5, logprobs=2)
    [output] = quick.chat(QUESTION, params)
    answer = completion(run(chat(max_tokens=5, logprobs=True, top_logprobs=2), quick))
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in content).decode() == output.text
    assert "".join(each.token for each in content) == output.text
    for told, entry in zip(content, output.logprobs or [], strict=True):
        assert told.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert [each.logprob for each in told.top_logprobs] == pytest.approx([each for _, each in entry.top], abs=1e-4)


def test_what_must_be_called_is(quick: LLM) -> None:
    fields = {"tools": TOOLS, "temperature": 1.2, "seed": 1, "max_tokens": 60}
    answer = completion(run(chat(**fields, tool_choice="required"), quick))
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    [call] = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments.keys() == {"city"}
        assert isinstance(arguments["city"], str)
    else:
        assert arguments in ({"zone": "CET"}, {"zone": "UTC"})
    named = {"type": "function", "function": {"name": "get_time"}}
    answer = completion(run(chat(**fields, tool_choice=named), quick))
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"


def test_a_schema_is_followed(quick: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = completion(run(chat(response_format=form, temperature=1, seed=3), quick))
    assert json.loads(answer.choices[0].message.content).keys() == {"city"}
    with_tools = completion(run(chat(response_format=form, tools=TOOLS, temperature=1, seed=3), quick))
    message = with_tools.choices[0].message
    assert message.tool_calls or json.loads(message.content).keys() == {"city"}
    assert completion(run(chat(guided_regex="[ab]{3}"), quick)).choices[0].message.content.strip("ab") == ""


def test_a_message_can_be_gone_on_with(smollm2: LLM) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    answer = completion(run(chat(messages=messages, continue_final_message=True, max_tokens=2), smollm2))
    assert answer.choices[0].message.content.startswith(" Paris")


def test_requests_without_a_seed_differ(quick: LLM) -> None:
    texts = {run(chat(temperature=2, max_tokens=8), quick)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) > 1


def test_limits_are_told_without_an_answer(quick: LLM) -> None:
    def limits(**fields: Any) -> dict[str, Any]:
        exchange = chat(**fields)
        exchange.prepare(quick)
        return exchange.limits()

    told = limits(max_tokens=5)
    assert told["prompt_tokens"] == len(quick.tokenizer.encode_chat(QUESTION))
    assert told["max_new_tokens"] == 5
    assert told["context_length"] == quick.engine.limits.context_length
    free = limits()
    assert free["max_new_tokens"] == free["context_length"] - free["prompt_tokens"]


# With tokens that are chosen here.


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(llama_like())


CALL = '{"name": "get_weather", "parameters": {"city": "Zürich 😀"}}'


def both(llama: Any, text: str, **fields: Any) -> tuple[Any, Any]:
    """A text's whole and streamed answer."""
    whole, stream = chat(**fields), chat(**fields, stream=True)
    tokens = ids_of(llama.tokenizer, text)
    answer = completion(whole.answer(outputs_of(played(whole, llama, [tokens]))))
    snapshot = joined(streamed(stream, played(stream, llama, [tokens])))
    assert said(snapshot) == said(answer)
    return answer, snapshot


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (CALL + EOS, "get_weather", '{"city": "Zürich 😀"}'),
        ("<|python_tag|>" + CALL + EOM, "get_weather", '{"city": "Zürich 😀"}'),
        ('<|python_tag|>brave_search.call(query="é😀")' + EOM, "brave_search", '{"query": "é😀"}'),
        ('<function=get_time>{"zone": "UTC"}</function>' + EOS, "get_time", '{"zone": "UTC"}'),
        ('<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>' + EOS, "get_time",
         '{"zone": "UTC"}'),
    ],
)  # fmt: skip
def test_calls_in_all_forms(llama: Any, text: str, name: str, arguments: str) -> None:
    search = {"type": "function", "function": {"name": "brave_search", "parameters": None}}
    answer, _ = both(llama, text, tools=[*TOOLS, search])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == (name, arguments)
    assert choice.message.content is None


@pytest.mark.parametrize(
    ("text", "fields", "reason", "num_calls"),
    [
        (CALL[:-8] + EOS, {"tools": TOOLS}, "stop", 1),
        (CALL[:-8], {"tools": TOOLS}, "length", 1),
        (CALL, {"tools": TOOLS}, "length", 1),
        (CALL + EOS, {"tools": TOOLS, "tool_choice": "none"}, "stop", 0),
        (CALL + EOS, {}, "stop", 0),
        (CALL + "; " + CALL + EOS, {"tools": TOOLS}, "tool_calls", 2),
        (CALL + "; " + CALL + EOS, {"tools": TOOLS, "parallel_tool_calls": False}, "tool_calls", 1),
        ("No." + EOS, {"tools": TOOLS}, "stop", 0),
    ],
)
def test_reasons_to_end_are_exact(llama: Any, text: str, fields: Any, reason: str, num_calls: int) -> None:
    answer, _ = both(llama, text, **fields)
    assert answer.choices[0].finish_reason == reason
    assert len(answer.choices[0].message.tool_calls or ()) == num_calls


@given(
    parts=st.lists(
        st.sampled_from(
            ["é", "😀", "👩‍👩‍👧", "中", "a", " ", "<tool_call>", "<tool", CALL, "{", "END", "EN", "<|python_tag|>"]
        ),
        max_size=8,
    ),
    stop=st.sampled_from([None, "END", ["END", "😀a", "}"]]),
    tools=st.sampled_from([None, TOOLS]),
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_whole_and_nothing_of_a_stop_string(
    llama: Any, parts: list[str], stop: Any, tools: Any
) -> None:  # fmt: skip
    text = "".join(parts)
    fields = {key: value for key, value in {"stop": stop, "tools": tools}.items() if value}
    answer, _ = both(llama, text + EOS, **fields)
    exchange = chat(**fields, stream=True)
    events = streamed(exchange, played(exchange, llama, [ids_of(llama.tokenizer, text + EOS)]))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).strip() == (answer.choices[0].message.content or "").strip()
    stops = [stop] if isinstance(stop, str) else stop or []
    if tools is None:
        shown = text.replace("<|python_tag|>", "")
        ends = [shown.find(each) for each in stops if each in shown]
        assert "".join(pieces) == (shown[: min(ends)] if ends else shown)
    assert not any(each in "".join(pieces) for each in stops)


def test_several_answers_are_kept_apart(llama: Any) -> None:
    tokens = [ids_of(llama.tokenizer, text) for text in ("Yes." + EOS, CALL + EOS, "Perhaps. And more")]
    fields = {"n": 3, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    whole, stream = chat(**fields), chat(**fields, stream=True)
    answer = completion(whole.answer(outputs_of(played(whole, llama, tokens))))
    snapshot = joined(streamed(stream, played(stream, llama, tokens)))
    assert said(snapshot) == said(answer)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "tool_calls", "length"]
    for choice, each in zip(sorted(snapshot.choices, key=lambda choice: choice.index), tokens, strict=True):
        assert len(choice.logprobs.content) == len(each)


# What the model is told.


def prompt_of(llama: Any, **fields: Any) -> str:
    [prompt], _ = chat(**fields).prepare(llama)
    return llama.tokenizer.backend().decode(prompt.token_ids)


def test_the_template_is_told_of_tools_where_it_knows_them(llama: Any, quick: LLM) -> None:
    assert 'Tools:{"type": "function", "function": {"name": "get_weather"' in prompt_of(llama, tools=TOOLS)
    assert "get_weather" not in prompt_of(llama, tools=TOOLS, tool_choice="none")
    system = {"role": "developer", "content": "Be brief."}
    told = prompt_of(quick, tools=TOOLS, messages=[system, *QUESTION])
    assert told.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '"name": "get_weather"' in told


def test_calls_in_the_history(llama: Any, quick: LLM) -> None:
    made = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": '{"city": "Rome"}'}} for name in "ab"
    ]
    answered = [
        {"role": "tool", "tool_call_id": name, "content": [{"type": "text", "text": f"of {name}"}]} for name in "ab"
    ]
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": made, "refusal": None}, *answered]
    # This template takes one call to a message.
    assert prompt_of(llama, messages=history).split("<|im_start|>")[2:6] == [
        'assistant\n{"name": "a", "parameters": {"city": "Rome"}}<|im_end|>\n',
        "ipython\nof a<|im_end|>\n",
        'assistant\n{"name": "b", "parameters": {"city": "Rome"}}<|im_end|>\n',
        "ipython\nof b<|im_end|>\n",
    ]
    call = '{{"name": "{}", "parameters": {{"city": "Rome"}}}}'
    assert f"assistant\n{call.format('a')}; {call.format('b')}<|im_end|>" in prompt_of(quick, messages=history)


# What is refused.


def refusal(make: Callable[[], Any]) -> ApiError:
    with pytest.raises((ApiError, ValidationError, UserError)) as caught:
        make()
    return as_api_error(caught.value)


USER = {"role": "user"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency": 1}, "frequency"),
    ({"functions": []}, "functions"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"max_tokens": 2048}, "messages"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"50000": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}}, None),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "("}, None),
    ({"guided_regex": "a", "tools": TOOLS}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
    ({"messages": [USER]}, "messages[0].content"),
    ({"messages": [USER | {"content": "a", "mood": "b"}]}, "messages[0].mood"),
    ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [USER | {"content": "\ud800"}]}, None),
    ({"model": "\ud800"}, "model"),
    ({"\ud800": 1}, None),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "code"}]}, "tools[0].type"),
    ({"continue_final_message": True}, "continue_final_message"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(fields)[:50] for fields, _ in REFUSED])
def test_what_cannot_be_is_a_400_that_names_it(llama: Any, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": "m", "messages": QUESTION} | fields

    def make() -> None:
        try:
            request = ChatRequest.model_validate(body)
        except ValidationError as error:
            raise validation_error(error.errors(), body) from None
        ChatExchange(request).prepare(llama)

    error = refusal(make)
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert error.param == param
    assert error.message.startswith("found ")


def test_schemas_that_are_nested_too_deep_are_refused(llama: Any, quick: LLM) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(20_000):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    for model in (llama, quick):
        assert refusal(lambda model=model: chat(tools=tools).prepare(model)).status == 400
        assert refusal(lambda model=model: chat(tools=tools, tool_choice="required").prepare(model)).status == 400
    assert refusal(lambda: chat(guided_json=deep).prepare(llama)).status == 400


def test_too_long_a_conversation_says_both_numbers(llama: Any) -> None:
    error = refusal(lambda: chat(messages=[USER | {"content": "a " * 3000}]).prepare(llama))
    assert error.code == "context_length_exceeded"
    assert "2048" in error.message
    error = refusal(lambda: chat(max_tokens=2040).prepare(llama))
    assert "2040" in error.message
    assert "2048" in error.message


def test_what_has_no_meaning_is_taken(llama: Any) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
                "modalities": ["text"], "safety_identifier": "s", "prompt_cache_key": "k", "stop": None,
                "tools": None, "top_k": -1}  # fmt: skip
    chat(**harmless).prepare(llama)


def test_errors_inside_a_stream_have_the_clients_form() -> None:
    assert chat().error(ApiError(503, "found no ranks")) == {
        "error": {"message": "found no ranks", "type": "server_error", "param": None, "code": None}
    }
