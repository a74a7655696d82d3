"""tokenizer.model of both kinds: the ids of tiktoken and SentencePiece themselves, and the chat formats."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from checkpoint import formats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizerBase

from tpllama.checkpoint.tokenizer_model import (
    build_tokenizer,
    eos_token_ids,
    instruct_name,
    is_sentencepiece,
    vocabulary_size,
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog; it's what they'd do, isn't it? We'll see in 2024 or 12345.",
    "def f(x):\n    return {'a': x ** 2}\n\n\nclass A:\n    pass\n",
    "été naïve Straße Ελληνικά русский язык 日本語のテキスト 한국어 中文",
    "aaaa aaaaaaaa abab ababab  two  spaces   three",
) * 5
TEXTS = (
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading, trailing ",
    "  two  spaces  ",
    "tabs\t\tand\nnew\n\n\nlines\r\n",
    "it's, we'll, they'd, IT'S",
    "été, naïve, Straße, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト 한국어 中文 标点。",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and \u200b zero width \u00a0 spaces",
    "combining e\u0301 and \ufffd and \x00\x07 control",
    "def f(x: int) -> int:\n    return x**2 + 0x1F  # comment\n",
    "2024 12345678 3.14159 10,000,000.00 v1.2.3",
    "a" * 300,
    "abab" * 50,
    "\u2581 the mark of a space",
)
# What Llama 3's published code cuts words by, written here once more: the test must not follow a change of it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi! "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye."},
]


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    formats.write_tiktoken(file, CORPUS)
    return file


@pytest.fixture(scope="module")
def reference3(llama3: Path) -> tiktoken.Encoding:
    lines = [line.split() for line in llama3.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("llama3", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})


@pytest.fixture(scope="module")
def tokenizer3(llama3: Path) -> PreTrainedTokenizerBase:
    return build_tokenizer(llama3, instruct=True)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    formats.write_sentencepiece(file, CORPUS, vocab_size=500)
    return file


@pytest.fixture(scope="module")
def reference2(llama2: Path) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(llama2))


@pytest.fixture(scope="module")
def tokenizer2(llama2: Path) -> PreTrainedTokenizerBase:
    return build_tokenizer(llama2, instruct=True)


@pytest.mark.parametrize("text", TEXTS)
def test_llama_3_ids_are_tiktokens(
    tokenizer3: PreTrainedTokenizerBase, reference3: tiktoken.Encoding, text: str
) -> None:
    ids = tokenizer3(text).input_ids
    assert ids == [reference3.n_vocab, *reference3.encode(text, disallowed_special=())]
    assert tokenizer3.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40) | st.text("ab 1\n'sT", max_size=40))
def test_llama_3_ids_of_any_text(tokenizer3: PreTrainedTokenizerBase, reference3: tiktoken.Encoding, text: str) -> None:
    assume(not any(token in text for token in tokenizer3.all_special_tokens))
    ids = tokenizer3(text, add_special_tokens=False).input_ids
    assert ids == reference3.encode(text, disallowed_special=())
    assert tokenizer3.decode(ids) == text


def test_llama_3_looks_whole_words_up_before_merging(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"xyz"]
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = build_tokenizer(tmp_path / "tokenizer.model", instruct=False)
    # No pair of tokens makes xyz, so merging alone could not find it.
    assert tokenizer("xyz", add_special_tokens=False).input_ids == [258]
    assert tokenizer("abc", add_special_tokens=False).input_ids == [257]
    assert tokenizer("xyzz", add_special_tokens=False).input_ids == [*b"xyzz"]


def test_llama_3_special_tokens(tokenizer3: PreTrainedTokenizerBase, reference3: tiktoken.Encoding) -> None:
    base = reference3.n_vocab
    roles = {0: "begin_of_text", 1: "end_of_text", 2: "reserved_special_token_0", 3: "reserved_special_token_1"}
    roles |= {4: "finetune_right_pad_id", 5: "reserved_special_token_2", 6: "start_header_id", 7: "end_header_id"}
    roles |= {8: "eom_id", 9: "eot_id", 10: "python_tag", 11: "reserved_special_token_3"}
    roles |= {255: "reserved_special_token_247"}
    a, b = reference3.encode("a"), reference3.encode("b")
    for place, name in roles.items():
        assert tokenizer3.convert_tokens_to_ids(f"<|{name}|>") == base + place
        assert tokenizer3(f"a<|{name}|>b", add_special_tokens=False).input_ids == [*a, base + place, *b]
    assert len(tokenizer3) == base + 256
    assert sorted(tokenizer3.all_special_ids) == list(range(base, base + 256))
    assert tokenizer3.decode(range(base, base + 256), skip_special_tokens=True) == ""
    assert (tokenizer3.bos_token_id, tokenizer3.eos_token_id, tokenizer3.pad_token_id) == (base, base + 1, base + 4)


@pytest.mark.parametrize("text", TEXTS)
def test_llama_2_ids_are_sentencepieces(
    tokenizer2: PreTrainedTokenizerBase, reference2: SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer2(text).input_ids
    assert ids == [1, *reference2.encode(text)]
    assert tokenizer2.decode(ids, skip_special_tokens=True) == reference2.decode(reference2.encode(text))


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40) | st.text("ab 1\n'sT", max_size=40))
def test_llama_2_ids_of_any_text(
    tokenizer2: PreTrainedTokenizerBase, reference2: SentencePieceProcessor, text: str
) -> None:
    assume(not any(token in text for token in tokenizer2.all_special_tokens))
    assert tokenizer2(text).input_ids == [1, *reference2.encode(text)]


def test_llama_2_special_tokens(tokenizer2: PreTrainedTokenizerBase, reference2: SentencePieceProcessor) -> None:
    assert (tokenizer2.bos_token_id, tokenizer2.eos_token_id, tokenizer2.unk_token_id) == (1, 2, 0)
    assert len(tokenizer2) == reference2.get_piece_size()
    assert tokenizer2.decode([1, 2, 0], skip_special_tokens=True) == ""


def test_facts_without_building(llama2: Path, llama3: Path, reference3: tiktoken.Encoding) -> None:
    base = reference3.n_vocab
    assert (is_sentencepiece(llama2), is_sentencepiece(llama3)) == (True, False)
    assert eos_token_ids(llama2) == (2,)
    assert eos_token_ids(llama3) == (base + 1, base + 8, base + 9)
    assert vocabulary_size(llama3) == base + 256
    assert vocabulary_size(llama2) == len(build_tokenizer(llama2, instruct=False))


def test_llama_3_chat(tokenizer3: PreTrainedTokenizerBase) -> None:
    def said(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    talk = [*TALK, {"role": "tool", "content": "42"}]
    parts = [said("system", "Be brief."), said("user", "Hi!"), said("assistant", "Hello."), said("user", "Bye.")]
    expected = "<|begin_of_text|>" + "".join([*parts, said("ipython", "42")])
    assert tokenizer3.apply_chat_template(talk, tokenize=False) == expected
    prompt = tokenizer3.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_llama_2_chat(tokenizer2: PreTrainedTokenizerBase, reference2: SentencePieceProcessor) -> None:
    prompt = tokenizer2.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    first, second = "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi! [/INST] Hello. ", "[INST] Bye. [/INST]"
    assert prompt == f"<s>{first}</s><s>{second}"
    # Meta's code has SentencePiece encode each exchange by itself.
    ids = [1, *reference2.encode(first), 2, 1, *reference2.encode(second)]
    assert tokenizer2(prompt, add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize(
    "talk", [TALK[2:], [TALK[1], TALK[1]], [TALK[1], TALK[2], TALK[0]], [{"role": "tool", "content": "42"}]]
)
def test_llama_2_knows_no_other_talk(tokenizer2: PreTrainedTokenizerBase, talk: list[dict[str, str]]) -> None:
    with pytest.raises(TemplateError, match="expected"):
        tokenizer2.apply_chat_template(talk, tokenize=False)


def test_a_base_model_has_no_chat_template(llama2: Path, llama3: Path) -> None:
    assert build_tokenizer(llama2, instruct=False).chat_template is None
    assert build_tokenizer(llama3, instruct=False).chat_template is None


def test_instruct_name_is_the_nearest_folders(tmp_path: Path) -> None:
    file = tmp_path / "an-instruct-run" / "Llama-3-8B-Instruct" / "original" / "tokenizer.model"
    file.parent.mkdir(parents=True)
    formats.write_tiktoken(file)
    assert instruct_name(file) == "Llama-3-8B-Instruct"
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    assert instruct_name(link / "tokenizer.model") == "Llama-3-8B-Instruct"


@pytest.mark.parametrize(
    "content",
    [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"{}", b"IQ== zero\n", b"\x80\x02}q\x00."],
)
def test_neither_kind(tmp_path: Path, fails: Any, content: bytes) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    for action in (eos_token_ids, vocabulary_size, lambda file: build_tokenizer(file, instruct=False)):
        fails(lambda action=action: action(file), str(file), "Llama 3", "SentencePiece")


def test_unreadable_file(tmp_path: Path, fails: Any) -> None:
    fails(lambda: eos_token_ids(tmp_path / "tokenizer.model"), "tokenizer.model")


def test_damaged_llama_3_file(llama3: Path, tmp_path: Path, fails: Any) -> None:
    file = tmp_path / "tokenizer.model"
    lines = llama3.read_bytes().splitlines()
    cut = llama3.read_bytes().rstrip()[:-1]
    for content in (cut, b"\n".join(lines[:-1]) + b"\nIQ=", b"\n".join(lines[1:]), b"\n".join(lines[:9] + lines[10:])):
        file.write_bytes(content)
        fails(lambda: eos_token_ids(file), str(file), "damaged tokenizer")
        fails(lambda: build_tokenizer(file, instruct=False), str(file), "damaged tokenizer")
    changed = [b"!" + base64.b64encode(b"a new one") + b" 300", lines[299].split()[0] + b" 300", b"x", b""]
    for content in [*(lines[:300] + [line] + lines[301:] for line in changed), [lines[1], lines[0], *lines[2:]]]:
        file.write_bytes(b"\n".join(content))
        fails(lambda: build_tokenizer(file, instruct=False), str(file), "damaged tokenizer")


def test_llama_3_file_without_a_byte(tmp_path: Path, fails: Any) -> None:
    file = tmp_path / "tokenizer.model"
    tokens = [bytes([byte]) for byte in range(255)] + [b"ab"]
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    fails(lambda: build_tokenizer(file, instruct=False), str(file), "0xff")


def test_damaged_llama_2_file(llama2: Path, tmp_path: Path, fails: Any) -> None:
    file = tmp_path / "tokenizer.model"
    whole = llama2.read_bytes()
    for size in (len(whole) // 2, len(whole) // 3, 5, 1):
        file.write_bytes(whole[:size])
        fails(lambda: eos_token_ids(file), str(file), "damaged tokenizer")
        fails(lambda: build_tokenizer(file, instruct=False), str(file), "damaged tokenizer")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "unigram", "vocab_size": 340},
        {"normalization_rule_name": "nfkc"},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
    ],
)
def test_sentencepiece_models_that_are_no_llamas(tmp_path: Path, fails: Any, changes: dict[str, Any]) -> None:
    """LlamaTokenizer would read them, and give other tokens."""
    file = tmp_path / "tokenizer.model"
    formats.write_sentencepiece(file, CORPUS, **changes)
    fails(lambda: build_tokenizer(file, instruct=False), str(file), "a Llama's")


def test_a_vocabulary_of_llama_3s_size_builds_quickly(tmp_path: Path) -> None:
    """128000 tokens of up to 12 letters, each made of two others; the bound is loose, for busy machines."""
    letters = [bytes([byte]) for byte in b" etaoinshrdlu"]
    made = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *letters])
    pool = list(letters)
    for token in pool:
        for letter in letters:
            if len(made) < 128000 and token + letter not in made and len(token) < 12:
                made[token + letter] = None
                pool.append(token + letter)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(made)))
    start = time.process_time()
    tokenizer = build_tokenizer(file, instruct=True)
    assert time.process_time() - start < 6
    assert tokenizer("a").input_ids == [128000, 97]
    assert eos_token_ids(file) == (128001, 128008, 128009)
