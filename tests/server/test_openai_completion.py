"""Completions in OpenAI's form: prompts of all kinds, echo, log-probabilities, streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchanging import EOS, ids_of, llama_like, model_of, outputs_of, played, run, streamed
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tpllama import LLM, SamplingParams, UserError
from tpllama.server.errors import ApiError, as_api_error, validation_error
from tpllama.server.openai_completion import CompletionExchange, CompletionRequest

Completion = pytest.importorskip("openai.types").Completion

FRANCE, HI = "The capital of France is", "Hi"


def complete(prompt: Any, **fields: Any) -> CompletionExchange:
    return CompletionExchange(
        CompletionRequest.model_validate({"model": "m", "prompt": prompt, "temperature": 0} | fields)
    )


def completion(body: dict[str, Any]) -> Any:
    """The package's type, which knows no null where streams have no reason yet, and first tokens no probability."""
    json.dumps(body, allow_nan=False)
    choices = [dict(choice) for choice in body["choices"]]
    for choice in choices:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"]:
            told = {"token_logprobs": 0.0, "top_logprobs": {}}
            filled = {name: [each or empty for each in choice["logprobs"][name]] for name, empty in told.items()}
            choice["logprobs"] = choice["logprobs"] | filled
    return Completion.model_validate(body | {"choices": choices}, strict=True)


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """A stream's choices, by number."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        completion(event)
        for choice in event["choices"]:
            so_far = choices.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {}, "ids": []})
            assert so_far["finish_reason"] is None
            so_far["text"] += choice["text"]
            so_far["finish_reason"] = choice["finish_reason"]
            so_far["ids"] += choice.get("token_ids", [])
            for name, values in (choice["logprobs"] or {}).items():
                so_far["logprobs"].setdefault(name, []).extend(values)
    return choices


def test_every_kind_of_prompt(quick: LLM) -> None:
    ids = [quick.tokenizer.encode(text) for text in (FRANCE, HI)]
    expected = [output.text for output in quick.generate([FRANCE, HI], SamplingParams(max_new_tokens=4))]
    for prompt, texts in ((FRANCE, expected[:1]), (ids[0], expected[:1]), ([FRANCE, HI], expected), (ids, expected)):
        answer = completion(run(complete(prompt, max_tokens=4), quick))
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(texts)]))
        assert answer.usage.completion_tokens == 4 * len(texts)
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert run(complete(FRANCE), quick)["usage"]["completion_tokens"] == 16


def test_samples_are_numbered_within_their_prompts(quick: LLM) -> None:
    fields = {"n": 2, "best_of": 2, "max_tokens": 3, "temperature": 1.5, "seed": 4}
    answer = completion(run(complete([FRANCE, HI], **fields), quick))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    params = SamplingParams(n=2, max_new_tokens=3, temperature=1.5, seed=4)
    assert [choice.text for choice in answer.choices] == [
        output.text for output in quick.generate([FRANCE, HI], params)
    ]
    assert answer.usage.prompt_tokens == 6


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"max_tokens": 0, "echo": True}], ids=["new", "echo", "none"])
def test_log_probabilities(quick: LLM, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 4, "logprobs": 2, "return_token_ids": True} | fields
    body = run(complete([FRANCE, HI], **fields), quick)
    answer = completion(body)
    outputs = quick.generate([FRANCE, HI], SamplingParams(max_new_tokens=4, logprobs=2, prompt_logprobs=2))
    for choice, output, prompt in zip(body["choices"], outputs, (FRANCE, HI), strict=True):
        told = SimpleNamespace(**choice["logprobs"])
        new = output.logprobs or []
        entries = [*([None, *(output.prompt_logprobs or [])] if "echo" in fields else []), *new[: fields["max_tokens"]]]
        assert choice["text"] == (prompt if "echo" in fields else "") + (output.text if fields["max_tokens"] else "")
        assert "".join(told.tokens) == choice["text"]
        ends = [*told.text_offset[1:], len(choice["text"])]
        assert [choice["text"][a:b] for a, b in zip(told.text_offset, ends, strict=True)] == told.tokens
        assert len(told.token_logprobs) == len(told.tokens) == len(told.top_logprobs) == len(entries)
        for token, logprob, top, entry in zip(
            told.tokens, told.token_logprobs, told.top_logprobs, entries, strict=True
        ):
            if entry is None:
                assert (logprob, top) == (None, None)
                continue
            assert logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert top[token] == logprob
            assert 2 <= len(top) <= 3
            assert max(top.values()) == pytest.approx(entry.top[0][1], abs=1e-4)
    assert answer.usage.completion_tokens == 2 * fields["max_tokens"]
    stream = joined(run(complete([FRANCE, HI], **fields, stream=True), quick))
    for choice in body["choices"]:
        ours = stream[choice["index"]]
        assert (ours["text"], ours["finish_reason"]) == (choice["text"], choice["finish_reason"])
        assert ours["ids"] == choice["token_ids"]
        for name in ("tokens", "text_offset"):
            assert ours["logprobs"][name] == choice["logprobs"][name]
        assert ours["logprobs"]["token_logprobs"][1:] == pytest.approx(
            choice["logprobs"]["token_logprobs"][1:], abs=1e-4
        )


def test_usage_comes_last_where_asked_for(quick: LLM) -> None:
    events = run(complete([FRANCE, HI], max_tokens=2, stream=True, stream_options={"include_usage": True}), quick)
    assert events[-1]["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])
    assert not any("usage" in event for event in run(complete(HI, max_tokens=2, stream=True), quick))


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of(llama_like())


@given(
    text=st.text(st.sampled_from("aé 中😀👩‍\n"), max_size=12),
    stop=st.sampled_from([None, "a", "é中", ["😀 ", "aa"]]),
    echo=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_stream_adds_up_and_offsets_are_places_in_the_text(llama: Any, text: str, stop: Any, echo: bool) -> None:
    fields = {"stop": stop, "echo": echo, "logprobs": 1, "max_tokens": 100}
    tokens = ids_of(llama.tokenizer, text + EOS)
    exchange = complete("é", **fields)
    [choice] = exchange.answer(outputs_of(played(exchange, llama, [tokens])))["choices"]
    exchange = complete("é", **fields, stream=True)
    events = streamed(exchange, played(exchange, llama, [tokens]))
    assert not any("\ufffd" in event["choices"][0]["text"] for event in events)
    [ours] = joined(events).values()
    assert {name: ours[name] for name in ("text", "finish_reason", "logprobs")} == {
        name: choice[name] for name in ("text", "finish_reason", "logprobs")
    }
    whole, told = ("é" if echo else "") + text, choice["logprobs"]
    assert whole.startswith(choice["text"])
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert whole[offset : offset + len(token)] == token
    assert not any(
        each in choice["text"][len(whole) - len(text) :] for each in ([stop] if isinstance(stop, str) else stop or [])
    )


def test_tokens_that_are_parts_of_characters_have_names(llama: Any) -> None:
    exchange = complete("a", logprobs=0, max_tokens=50)
    tokens = ids_of(llama.tokenizer, "😀" + EOS)
    [choice] = exchange.answer(outputs_of(played(exchange, llama, [tokens])))["choices"]
    names = choice["logprobs"]["tokens"]
    assert len(names) > 2
    assert (
        bytes.fromhex("".join(name.removeprefix("bytes:").replace("\\x", "") for name in names[:-1])).decode() == "😀"
    )
    assert names[-1] == EOS
    assert choice["logprobs"]["top_logprobs"] == [{name: -0.5} for name in names]


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        yield llm


def test_without_a_tokenizer_token_ids_are_served(tiny: LLM) -> None:
    [output] = tiny.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=1))
    fields = {"max_tokens": 3, "ignore_eos": True, "logprobs": 1}
    [choice] = run(complete([5, 6, 7], **fields), tiny)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", output.token_ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in output.token_ids]
    assert joined(run(complete([5, 6, 7], **fields, stream=True), tiny))[0]["ids"] == output.token_ids
    for prompt, more in (("text", {}), ([1], {"stop": "a"}), ([1], {"guided_regex": "a"})):
        with pytest.raises((UserError, ApiError)) as caught:
            complete(prompt, **more).prepare(tiny)
        assert "tokenizer" in str(caught.value)


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 3000}, "prompt"),
    ({"prompt": ""}, None),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [49152]}, None),
    ({"prompt": None}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 101}, "logprobs"),
    ({"tools": []}, "tools"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(fields)[:50] for fields, _ in REFUSED])
def test_what_cannot_be_is_a_400_that_names_it(llama: Any, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": "m", "prompt": "a"} | fields
    with pytest.raises((ApiError, ValidationError, UserError)) as caught:
        CompletionExchange(CompletionRequest.model_validate(body)).prepare(llama)
    error = caught.value
    told = validation_error(error.errors(), body) if isinstance(error, ValidationError) else as_api_error(error)
    assert (told.status, told.param) == (400, param)
    assert told.message.startswith("found ")
