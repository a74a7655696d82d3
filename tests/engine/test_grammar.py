"""Constrained texts: whatever the masks let through fits, and texts end only where they may."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from tpllama.config import UserError
from tpllama.engine.batch import Draw
from tpllama.engine.grammar import Grammars
from tpllama.engine.request import Constraint, SamplingParams
from tpllama.engine.sampler import Sampler
from tpllama.engine.tokenizer import Tokenizer
from tpllama.parallel.collectives import OneRank

VOCAB = 49152
EOS = (0, 2)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["a", "b", "c d"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, EOS)


def constraint(grammars: Grammars, **asked: Any) -> Constraint:
    found = grammars.constraint(SamplingParams(**asked))
    assert found is not None
    return found


def ids(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(text: Constraint, seed: int, see: Callable[[list[int], list[int]], None] | None = None) -> list[int]:
    """Random tokens that the masks allow, up to one that ends texts. `see` gets the tokens so far and the allowed."""
    choose, tokens = random.Random(seed), list[int]()
    while len(tokens) < 2000:
        allowed = ids(text.allowed())
        if see:
            see(tokens, allowed)
        token = choose.choice(allowed)
        text.accept(token)
        if token in EOS:
            return tokens
        tokens.append(token)
    raise AssertionError("a random text doesn't end")


def fits_person(text: str) -> bool:
    found = json.loads(text)
    tags = found.get("tags", ["x"])
    return (
        {"name", "age", "kind"} <= found.keys() <= PERSON["properties"].keys()  # type: ignore[attr-defined]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and 1 <= len(tags) <= 3
        and all(isinstance(tag, str) and len(tag) <= 5 for tag in tags)
        and found["kind"] in {"a", "b", "c d"}
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,3}( \+ [0-9]{1,3}){0,4}", text) is not None


SUM = 'start: number (" + " number){0,4}\nnumber: /[0-9]{1,3}/'


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"json_schema": PERSON}, fits_person),
        ({"json_schema": json.dumps(PERSON)}, fits_person),
        ({"json_schema": {"type": "boolean"}}, lambda text: isinstance(json.loads(text), bool)),
        ({"regex": r"(yes|no|é日){1,3}!?"}, lambda text: re.fullmatch(r"(yes|no|é日){1,3}!?", text)),
        ({"grammar": SUM}, is_sum),
    ],
    ids=["schema", "schema as text", "boolean", "regex", "grammar"],
)
def test_random_texts_fit(grammars: Grammars, tokenizer: Tokenizer, asked: Any, fits: Callable[[str], Any]) -> None:
    texts = [tokenizer.decode(walk(constraint(grammars, **asked), seed)) for seed in range(20)]
    assert [text for text in texts if not fits(text)] == []
    assert len(set(texts)) > 1


def test_a_text_may_end_where_it_is_complete_and_only_there(grammars: Grammars, tokenizer: Tokenizer) -> None:
    def see(tokens: list[int], allowed: list[int]) -> None:
        may_end = [token for token in EOS if token in allowed]
        assert may_end == (list(EOS) if re.fullmatch("(ab){1,4}", tokenizer.decode(tokens)) else [])

    for seed in range(20):
        walk(constraint(grammars, regex="(ab){1,4}"), seed, see)


def test_only_an_end_follows_a_text_that_is_over(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = constraint(grammars, regex="ab")
    for token in tokenizer.encode("ab"):
        text.accept(token)
    assert ids(text.allowed()) == list(EOS)
    text.accept(EOS[0])
    assert ids(text.allowed()) == list(EOS)


@pytest.mark.parametrize("token", [300, VOCAB + 5], ids=["not allowed", "no token"])
def test_a_matcher_that_failed_lets_the_text_end(grammars: Grammars, token: int) -> None:
    text = constraint(grammars, regex="[0-9]{5}")
    text.accept(token)
    assert ids(text.allowed()) == list(EOS)
    text.accept(token)
    assert ids(text.allowed()) == list(EOS)


def test_texts_of_one_grammar_share_no_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first, second = (constraint(grammars, regex="[ab]{3}") for _ in range(2))
    at_start = second.allowed()
    first.accept(tokenizer.encode("a")[0])
    assert first.allowed() != at_start
    assert second.allowed() == at_start
    assert constraint(grammars, regex="[ab]{3}").allowed() == at_start
    first.accept(300)  # which ends the first
    assert second.allowed() == at_start


def test_many_grammars_one_after_the_other(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """More than are kept."""
    first = constraint(grammars, regex="x{0}y")
    for count in range(100):
        assert tokenizer.decode(walk(constraint(grammars, regex=f"x{{{count}}}y"), 0)) == "x" * count + "y"
    assert tokenizer.decode(walk(first, 0)) == "y"


def test_parameters_without_a_form_have_no_constraint(tokenizer: Tokenizer) -> None:
    assert Grammars(Tokenizer(None), 100, ()).constraint(SamplingParams()) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"json_schema": '{"type":'}, "Expecting value"),
        ({"json_schema": "[1]"}, "list"),
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"json_schema": {"minLength": float("nan")}}, "JSON"),
        ({"json_schema": {"type": {1, 2}}}, "set"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"$ref": "http://example.org/schema"}}, "example.org"),
        ({"json_schema": {"$ref": "#"}}, "followed"),
        ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "recursion"),
        ({"json_schema": False}, "false"),
        ({"regex": "(a|b"}, "unclosed"),
        ({"regex": "(" * 3000 + "a" + ")" * 3000}, "regex"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "no grammar at all"}, "followed"),
    ],
)
def test_a_form_that_is_none_is_the_users_error(grammars: Grammars, asked: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"^found .*{reason}.*, expected ") as error:
        grammars.constraint(SamplingParams(**asked))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


@pytest.mark.parametrize(
    ("tokenizer_of", "eos", "reason"),
    [
        (lambda _: Tokenizer(None), EOS, "no tokenizer"),
        (lambda _: Tokenizer(ByT5Tokenizer()), EOS, "fast"),
        (lambda tokenizer: tokenizer, (), "no token that ends texts"),
    ],
)
def test_a_model_that_cant_be_constrained_is_the_users_error(
    tokenizer: Tokenizer, tokenizer_of: Callable[[Tokenizer], Tokenizer], eos: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(UserError, match=f"^found .*{reason}"):
        Grammars(tokenizer_of(tokenizer), VOCAB, eos).constraint(SamplingParams(regex="a"))


@pytest.mark.parametrize("vocab", [VOCAB - 100, VOCAB + 100])
def test_a_model_may_have_fewer_or_more_logits_than_the_tokenizer_has_tokens(tokenizer: Tokenizer, vocab: int) -> None:
    text = constraint(Grammars(tokenizer, vocab, (2,)), regex="(.|\n)*")
    assert max(ids(text.allowed())) < VOCAB
    text.accept(1)  # a special token, which is not allowed
    assert ids(text.allowed()) == [2]


def test_the_sampler_draws_what_a_constraint_allows(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """On logits of noise, as the engine does."""
    text, tokens = constraint(grammars, json_schema=PERSON), list[int]()
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(OneRank(), (0, VOCAB), VOCAB)
    while not tokens or tokens[-1] not in EOS:
        draw = Draw(1.0, top_p=0.9, key=(3, 0, len(tokens)), allowed=text.allowed())
        [drawn] = sampler.sample(logits, [draw])
        tokens.append(drawn.token)
        text.accept(drawn.token)
    assert fits_person(tokenizer.decode(tokens[:-1]))
