"""Generation through the Python API: the same texts whatever the company, and every way a text can end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tpllama import LLM, Output, SamplingParams, UserError

MakeCheckpoint = Callable[..., Path]

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.95, seed=5)
TEXTS = ["The capital of France is", "Hi", "Once upon a time there was a fox who lived in a wood, and every day it"]


def random_prompt(length: int, vocab: int = 211) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [random_prompt(length) for length in (3, 17, 1, 60)]


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def changed(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**(params.__dict__ | changes))


def greedy_by_logits(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens by whole forwards, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(llm.logits(tokens)[0, -1].argmax()))
    return tokens[len(prompt) :]


# The same text alone and in company.


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_batch_gives_what_each_prompt_gives_alone(tiny: LLM, params: SamplingParams) -> None:
    assert ids(tiny.generate(PROMPTS, params)) == [ids(tiny.generate([prompt], params))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_batch_of_texts_gives_what_each_gives_alone(smollm2: LLM, params: SamplingParams) -> None:
    together = smollm2.generate(TEXTS, params)
    alone = [smollm2.generate(text, params)[0] for text in TEXTS]
    assert [output.text for output in together] == [output.text for output in alone]
    assert ids(together) == ids(alone)


def test_each_prompt_keeps_its_own_parameters_in_a_batch(tiny: LLM) -> None:
    each = [GREEDY, RANDOM, changed(GREEDY, max_new_tokens=3), changed(RANDOM, repetition_penalty=1.4, top_k=20)]
    together = tiny.generate(PROMPTS, each)
    alone = [tiny.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, each, strict=True)]
    assert ids(together) == ids(alone)


def test_greedy_tokens_are_the_likeliest_by_whole_forwards(tiny: LLM) -> None:
    assert ids(tiny.generate(PROMPTS, GREEDY)) == [greedy_by_logits(tiny, prompt, 12) for prompt in PROMPTS]


def test_more_sequences_than_fit_a_batch_change_nothing(make_checkpoint: MakeCheckpoint, tiny: LLM) -> None:
    params = changed(RANDOM, n=3)
    with LLM(str(make_checkpoint()), dtype="float32", max_batch_size=2) as llm:
        few = llm.generate(PROMPTS, params)
    assert ids(few) == ids(tiny.generate(PROMPTS, params))
    assert [(output.index, output.sample) for output in few] == [(i, s) for i in range(4) for s in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_texts_do_not_depend_on_their_company_bit_for_bit(
    make_checkpoint: MakeCheckpoint, dtype: str
) -> None:
    params = changed(RANDOM, logprobs=5)
    with LLM(str(make_checkpoint()), dtype=dtype, batch_invariant=True) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
        longer = changed(params, max_new_tokens=40)
        for company in (PROMPTS, PROMPTS[::-1], PROMPTS * 3):
            together = llm.generate([*company, PROMPTS[0]], [*[params] * len(company), longer])
            for prompt, output in zip(company, together, strict=False):
                expected = alone[PROMPTS.index(prompt)]
                assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


def test_batch_invariant_embedded_model(smollm2: LLM) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=1, logprobs=3)
    with LLM(dtype="bfloat16", batch_invariant=True) as llm:
        together = llm.generate(TEXTS, params)
        alone = [llm.generate(text, params)[0] for text in TEXTS]
    assert [(output.token_ids, output.logprobs) for output in together] == [
        (output.token_ids, output.logprobs) for output in alone
    ]


# Samples and seeds.


def test_samples_differ_and_are_reproducible(tiny: LLM) -> None:
    three = ids(tiny.generate([PROMPTS[0]], changed(RANDOM, n=3)))
    assert len({tuple(each) for each in three}) == 3
    assert ids(tiny.generate([PROMPTS[0]], changed(RANDOM, n=3))) == three
    assert ids(tiny.generate([PROMPTS[0]], changed(RANDOM, n=2))) == three[:2]


def test_the_seed_decides_the_text(tiny: LLM) -> None:
    first, again, other = (tiny.generate([PROMPTS[1]], changed(RANDOM, seed=seed)) for seed in (5, 5, 6))
    assert ids(first) == ids(again)
    assert ids(first) != ids(other)


def test_without_a_seed_the_engines_counts(make_checkpoint: MakeCheckpoint, tiny: LLM) -> None:
    unseeded = changed(RANDOM, seed=None)
    with LLM(str(make_checkpoint()), dtype="float32", seed=77) as llm:
        assert ids(llm.generate(PROMPTS, unseeded)) == ids(tiny.generate(PROMPTS, changed(RANDOM, seed=77)))
    assert ids(tiny.generate(PROMPTS, unseeded)) == ids(tiny.generate(PROMPTS, changed(RANDOM, seed=0)))


def test_top_k_1_is_greedy_at_any_temperature(tiny: LLM) -> None:
    assert ids(tiny.generate(PROMPTS, changed(RANDOM, top_k=1, temperature=5.0))) == ids(tiny.generate(PROMPTS, GREEDY))


# How texts end.


@pytest.fixture
def early_eos(make_checkpoint: MakeCheckpoint, tmp_path: Path, tiny: LLM) -> tuple[LLM, list[int]]:
    """A model whose generation config names, among others, the fourth greedy token after PROMPTS[1]."""
    expected = ids(tiny.generate([PROMPTS[1]], GREEDY))[0]
    assert expected[3] not in expected[:3]
    path = tmp_path / "model"
    shutil.copytree(make_checkpoint(), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, expected[3]]}))
    return LLM(str(path), dtype="float32"), expected


def test_any_eos_of_the_generation_config_ends_a_text(early_eos: tuple[LLM, list[int]]) -> None:
    llm, expected = early_eos
    with llm:
        (stopped,) = llm.generate([PROMPTS[1]], changed(GREEDY, ignore_eos=False))
        (ignoring,) = llm.generate([PROMPTS[1]], GREEDY)
    assert (stopped.token_ids, stopped.finish_reason) == (expected[:4], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (expected, "length")


def test_an_ended_text_leaves_the_others_of_its_batch_alone(early_eos: tuple[LLM, list[int]]) -> None:
    llm, expected = early_eos
    with llm:
        outputs = llm.generate(PROMPTS, [GREEDY, changed(GREEDY, ignore_eos=False), GREEDY, GREEDY])
        others = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert outputs[1].token_ids == expected[:4]
    assert ids([outputs[0], *outputs[2:]]) == ids([others[0], *others[2:]])


def test_a_chat_ends_with_the_assistants_turn(smollm2: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (output,) = smollm2.chat(messages, SamplingParams(max_new_tokens=60))
    assert output.finish_reason == "stop"
    assert output.token_ids[-1:] == smollm2.tokenizer.encode("<|im_end|>")
    assert "Paris" in output.text
    assert "<|" not in output.text


@pytest.mark.parametrize("place", [1, 9, 23, 40])
def test_a_stop_string_ends_the_text_before_it(smollm2: LLM, place: int) -> None:
    whole = smollm2.generate(TEXTS[2], changed(GREEDY, max_new_tokens=24))[0].text
    stop = whole[place : place + 5]
    params = changed(GREEDY, max_new_tokens=24, stop=("never there", stop))
    (output,) = smollm2.generate(TEXTS[2], params)
    assert (output.text, output.finish_reason) == (whole[: whole.find(stop)], "stop")
    assert "".join(piece.text for piece in smollm2.stream(TEXTS[2], params)) == output.text


def test_max_seq_len_bounds_prompt_and_text_together(make_checkpoint: MakeCheckpoint, tiny: LLM) -> None:
    with LLM(str(make_checkpoint()), dtype="float32", max_seq_len=20) as llm:
        (output,) = llm.generate([PROMPTS[1]], GREEDY)
        with pytest.raises(UserError, match="20 tokens"):
            llm.generate([random_prompt(20)], GREEDY)
    assert (len(output.token_ids), output.finish_reason) == (3, "length")
    assert output.token_ids == ids(tiny.generate([PROMPTS[1]], GREEDY))[0][:3]


def test_the_context_can_be_filled_to_its_last_token(tiny: LLM) -> None:
    (output,) = tiny.generate([random_prompt(120)], changed(GREEDY, max_new_tokens=50))
    assert (len(output.token_ids), output.finish_reason) == (8, "length")
    assert output.token_ids == greedy_by_logits(tiny, random_prompt(120), 8)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (random_prompt(128), "found a prompt of 128 tokens, expected fewer than the context's 128"),
        ([], "empty prompt"),
        ([5, 211], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ],
    ids=["long", "empty", "large id", "negative id"],
)
def test_a_prompt_that_does_not_fit_is_refused_before_any_work(
    make_checkpoint: MakeCheckpoint, prompt: list[int], reason: str
) -> None:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        for call in (llm.generate, lambda prompts: llm.stream(prompts[1])):
            with pytest.raises(UserError, match=reason):
                call([PROMPTS[0], prompt])
        assert not llm.engine.scheduler.waiting
        assert llm.engine.pool.num_available == llm.engine.pool.size


# Prompts in chunks.

LONG = {"max_position_embeddings": 1024}
TRAINED = {"original_max_position_embeddings": 32}
LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "longrope": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16} | TRAINED
    },
}


def check_first_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    """Token and log-probabilities after each prompt are those of a whole forward."""
    params = SamplingParams(max_new_tokens=1, logprobs=8)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        expected = llm.logits(prompt)[0, -1].log_softmax(-1)
        assert output.token_ids == [int(expected.argmax())]
        assert output.logprobs is not None
        for token, logprob in output.logprobs[0].top:
            assert abs(logprob - float(expected[token])) < 1e-4


def with_steps_of(llm: LLM, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the engine compute everything, in steps of so many tokens."""
    scheduler = llm.engine.scheduler
    policy = replace(scheduler.policy, max_batch_tokens=tokens, prefix_caching=False)
    monkeypatch.setattr(scheduler, "policy", policy)


def test_prompts_longer_than_a_step_give_the_logits_of_a_whole_forward(make_checkpoint: MakeCheckpoint) -> None:
    lengths = [712, 5, 2, 512, 900]
    with LLM(str(make_checkpoint(**LONG)), dtype="float32", max_batch_tokens=512) as llm:
        check_first_tokens(llm, [random_prompt(length) for length in lengths])


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_the_size_of_chunks_changes_nothing(tiny: LLM, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    expected = ids(tiny.generate(PROMPTS, GREEDY)), ids(tiny.generate(PROMPTS, RANDOM))
    with_steps_of(tiny, budget, monkeypatch)
    check_first_tokens(tiny, PROMPTS)
    assert (ids(tiny.generate(PROMPTS, GREEDY)), ids(tiny.generate(PROMPTS, RANDOM))) == expected


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
@pytest.mark.parametrize("budget", [7, 512])
def test_all_chunks_of_a_prompt_have_the_rope_of_its_whole_length(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, rope: str, budget: int
) -> None:
    with LLM(str(make_checkpoint(**LENGTH_DEPENDENT[rope])), dtype="float32") as llm:
        with_steps_of(llm, budget, monkeypatch)
        check_first_tokens(llm, PROMPTS)


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_texts_that_grow_past_the_trained_length_are_transformers(make_checkpoint: MakeCheckpoint, rope: str) -> None:
    path = make_checkpoint(**LENGTH_DEPENDENT[rope])
    prompts = [random_prompt(length) for length in (3, 20, 31, 50)]
    with LLM(str(path), dtype="float32") as llm:
        found = ids(llm.generate(prompts, changed(GREEDY, max_new_tokens=40)))
    for prompt, tokens in zip(prompts, found, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert transformers_greedy(model, prompt, 40) == tokens


def transformers_greedy(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """`count` new tokens, none of which ends the text."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    tokens = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    assert len(tokens) == len(prompt) + count
    return tokens[len(prompt) :]


def test_a_repetition_penalty_is_transformers(make_checkpoint: MakeCheckpoint, tiny: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(), dtype=torch.float32)
    expected = [transformers_greedy(model, prompt, 12, repetition_penalty=1.5) for prompt in PROMPTS]
    assert ids(tiny.generate(PROMPTS, changed(GREEDY, repetition_penalty=1.5))) == expected
    assert ids(tiny.generate(PROMPTS, GREEDY)) != expected


# The API.


def test_streamed_pieces_add_up_to_generates_text(smollm2: LLM) -> None:
    for params in (GREEDY, RANDOM):
        (expected,) = smollm2.generate(TEXTS[0], params)
        pieces = list(smollm2.stream(TEXTS[0], params))
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.token for piece in pieces] == expected.token_ids
        assert [piece.output for piece in pieces] == [None] * 11 + [expected]


def test_a_text_and_its_tokens_are_the_same_prompt(smollm2: LLM) -> None:
    tokens = smollm2.tokenizer.encode(TEXTS[0])
    (by_text,), (by_tokens,) = smollm2.generate(TEXTS[0], GREEDY), smollm2.generate(tokens, GREEDY)
    assert (by_text.text, by_text.token_ids) == (by_tokens.text, by_tokens.token_ids)
    assert (by_text.prompt, by_tokens.prompt) == (TEXTS[0], None)
    assert by_text.prompt_token_ids == by_tokens.prompt_token_ids == tokens
    assert (by_text.prompt_tokens, by_text.completion_tokens) == (len(tokens), 12)


def test_the_text_continues_the_prompt(smollm2: LLM) -> None:
    (output,) = smollm2.generate(TEXTS[0], GREEDY)
    assert TEXTS[0] + output.text == smollm2.tokenizer.decode(output.prompt_token_ids + output.token_ids)


def test_chats_are_their_templates_prompts(smollm2: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("Hi", "Name a colour.")]
    both = smollm2.chat(conversations, GREEDY)
    raw = smollm2.generate([smollm2.tokenizer.encode_chat(each) for each in conversations], GREEDY)
    assert ids(both) == ids(raw)
    assert ids(smollm2.chat(conversations[0], GREEDY)) == ids(both[:1])
    assert "".join(piece.text for piece in smollm2.stream(conversations[1], GREEDY)) == both[1].text


def test_logprobs_are_those_of_a_whole_forward(tiny: LLM) -> None:
    for prompt, output in zip(PROMPTS, tiny.generate(PROMPTS, changed(RANDOM, logprobs=2)), strict=True):
        expected = tiny.logits(prompt + output.token_ids)[0].log_softmax(-1)[len(prompt) - 1 :]
        assert output.logprobs is not None
        assert [each.token_id for each in output.logprobs] == output.token_ids
        for row, each in zip(expected, output.logprobs, strict=False):
            assert abs(each.logprob - float(row[each.token_id])) < 1e-4
            assert [token for token, _ in each.top] == row.topk(2).indices.tolist()


def test_no_prompts_give_no_outputs(tiny: LLM) -> None:
    assert tiny.generate([]) == []


def test_an_empty_conversation_is_refused(smollm2: LLM) -> None:
    with pytest.raises(UserError, match="empty conversation"):
        smollm2.chat([])


def test_parameters_are_one_for_all_or_one_for_each(tiny: LLM) -> None:
    with pytest.raises(UserError, match="found 1 sampling parameters for 2 prompts"):
        tiny.generate(PROMPTS[:2], [GREEDY])


def test_without_a_tokenizer_ids_are_served_and_text_is_refused(tiny: LLM) -> None:
    assert [output.text for output in tiny.generate(PROMPTS, GREEDY)] == [""] * 4
    message = [{"role": "user", "content": "Hi"}]
    for call in (lambda: tiny.generate("Hi"), lambda: tiny.stream("Hi")):
        with pytest.raises(UserError, match="found no tokenizer"):
            call()
    with pytest.raises(UserError, match="found no chat template"):
        tiny.chat(message)
    with pytest.raises(UserError, match="found stop strings"):
        tiny.generate(PROMPTS, changed(GREEDY, stop=("x",)))


def test_a_dropped_stream_leaves_nothing_behind(tiny: LLM) -> None:
    expected = ids(tiny.generate(PROMPTS, GREEDY))
    stream = tiny.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert ids(tiny.generate(PROMPTS, GREEDY)) == expected


def test_generations_that_overlap_share_the_engine(tiny: LLM) -> None:
    expected = ids(tiny.generate(PROMPTS, GREEDY))
    stream = tiny.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    assert ids(tiny.generate(PROMPTS, GREEDY)) == expected
    assert [first.token, *(piece.token for piece in stream)] == expected[0]


def test_threads_share_the_engine(tiny: LLM) -> None:
    expected = ids(tiny.generate(PROMPTS, RANDOM))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: ids(tiny.generate([prompt], RANDOM))[0], PROMPTS * 3))
    assert found == expected * 3


def test_closing_twice_is_fine_and_a_closed_llm_says_so(make_checkpoint: MakeCheckpoint) -> None:
    with LLM(str(make_checkpoint()), dtype="float32") as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        llm.close()
        llm.close()
        for call in (lambda: llm.generate([PROMPTS[0]]), lambda: llm.logits(PROMPTS[0]), llm.peak_memory_bytes):
            with pytest.raises(RuntimeError, match="this LLM is closed"):
                call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("logprobs", 101),
        ("stop", ("a", "")),
    ],
)
def test_impossible_sampling_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"found {name} "):
        SamplingParams(**{name: value})
