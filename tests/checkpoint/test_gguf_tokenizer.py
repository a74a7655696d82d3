"""The tokenizer built from GGUF fields: the same ids as transformers' own conversion, and what the fields say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tpllama.checkpoint.gguf import GgufCheckpoint
from tpllama.checkpoint.open import open_checkpoint
from tpllama.config import UserError

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "The capital of France is",
    "  leading and trailing  ",
    "tabs\t\tand\nnew\n\n\nlines\r\n",
    "it's, we'll, they'd, IT'S",
    "été, naïve, Straße, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト 한국어 中文 标点。",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and \u200b zero width \u00a0 spaces",
    "combining e\u0301 and \ufffd and \x00\x07 control",
    "def f(x: int) -> int:\n    return x**2 + 0x1F  # comment\n",
    '{"key": [1, 2.5, null], "other": "a\\nb"}',
    "https://example.org/path?query=1&other=%20",
    "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n",
    "half <|im_start and <|endoftext|> whole",
)
NUMBERS = ("2024", " 12345678", "3.14159", "1st 22nd", "10,000,000.00", "v1.2.3", "a1b22c333")
MESSAGES = (
    [{"role": "user", "content": "Hi! What is 12 + 30?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "été 😀"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
)


@pytest.fixture(scope="module")
def fast() -> PreTrainedTokenizerBase:
    tokenizer = open_checkpoint("smollm2").tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    path = open_checkpoint("smollm2").path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


# Transformers' conversion has no entry for tokenizer.ggml.pre = smollm and splits as GPT-2, which keeps
# digits together, and with a space before them, where smollm cuts them apart. The vocabulary has no token
# of that form for 0 to 9, so these ids agree; for other scripts' digits they don't, see below.
@pytest.mark.parametrize("text", [*TEXTS, *NUMBERS])
def test_ids_equal_transformers_conversion(
    fast: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase, text: str
) -> None:
    ids = fast(text).input_ids
    assert ids == reference(text).input_ids
    assert fast.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_of_any_text(fast: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase, text: str) -> None:
    ids = fast(text).input_ids
    if not any(character.isnumeric() and not character.isascii() for character in text):
        assert ids == reference(text).input_ids
    # Not always the text: the vocabulary lacks some bytes that only rare scripts use.
    assert fast.decode(ids) == reference.decode(ids)


def test_digits_of_other_scripts_are_cut_apart(
    fast: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
) -> None:
    """The published tokenizer does; transformers' conversion, not knowing `smollm`, doesn't."""
    space, squared = fast(" ").input_ids, fast("²").input_ids
    assert fast(" ²").input_ids == space + squared
    assert reference(" ²").input_ids != space + squared


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_ids(
    fast: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool
) -> None:
    mine, theirs = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]
        for tokenizer in (fast, reference)
    )
    assert mine == theirs
    assert mine[0] == fast.bos_token_id


def test_special_tokens(fast: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase) -> None:
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        assert getattr(fast, name) == getattr(reference, name)
    # All control tokens; transformers' conversion names those with a role alone, but treats the rest alike.
    assert sorted(fast.all_special_ids) == sorted(reference.added_tokens_decoder) == list(range(17))
    assert len(fast) == len(reference) == 49152
    assert fast.decode([1, 3, 2], skip_special_tokens=True) == ""


def vocabulary() -> list[str]:
    """One token per byte, in GPT-2's byte alphabet, and a few merged ones."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ab", "abc", "12", "<s>", "</s>", "<tool>", "  "]


@pytest.fixture
def build(write_gguf: Any, tiny_metadata: dict[str, Any]) -> Any:
    """The tokenizer of a file with the vocabulary above: <s> and </s> control, <tool> and two spaces user-defined."""

    def tokenizer(**fields: Any) -> PreTrainedTokenizerBase:
        tokens = vocabulary()
        given = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": [1] * (len(tokens) - 4) + [3, 3, 4, 4],
            "merges": ["a b", "1 2"],
            "bos_token_id": tokens.index("<s>"),
            "eos_token_id": tokens.index("</s>"),
        } | fields
        metadata = {f"tokenizer.ggml.{name}": value for name, value in given.items() if value is not None}
        built = GgufCheckpoint(write_gguf(tiny_metadata | metadata)).tokenizer()
        assert built is not None
        return built

    return tokenizer


def test_user_defined_tokens_stay_whole_and_visible(build: Any) -> None:
    tokenizer = build()
    tokens = vocabulary()
    ids = tokenizer("x<tool>  y</s>").input_ids
    assert ids == [tokens.index(token) for token in ("x", "<tool>", "  ", "y", "</s>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool>  y"
    assert len(tokenizer) == len(tokens)


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("smollm", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("llama3", True, True),
    ],
)
def test_first_token(build: Any, pre: str, stated: bool | None, added: bool) -> None:
    tokenizer = build(pre=pre, add_bos_token=stated)
    first = [tokenizer.bos_token_id] if added else []
    assert tokenizer("x").input_ids == [*first, vocabulary().index("x")]
    assert tokenizer("x", add_special_tokens=False).input_ids == [vocabulary().index("x")]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12", ["12"]),
        ("default", "12", ["12"]),
        (None, "12", ["12"]),
        ("smollm", "12", ["1", "2"]),
        ("gpt-2", "abc", ["ab", "c"]),
        ("llama-bpe", "abc", ["abc"]),  # Whole words are looked up before merging.
        ("llama-bpe", "1212", ["12", "1", "2"]),  # Cut after three digits: 121 and 2.
        ("gpt-2", "1212", ["12", "12"]),
    ],
)
def test_words_are_cut_as_the_file_says(build: Any, pre: str | None, text: str, expected: list[str]) -> None:
    tokenizer = build(pre=pre, add_bos_token=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == expected


@pytest.mark.parametrize("text", [*TEXTS, *NUMBERS])
def test_llama_3_words_equal_transformers(build: Any, write_gguf: Any, tmp_path: Any, text: str) -> None:
    mine = build(pre="llama-bpe", add_bos_token=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf", local_files_only=True)
    words = [
        tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) if text else [] for tokenizer in (mine, theirs)
    ]
    assert words[0] == words[1]


def test_a_way_of_cutting_text_that_is_not_known_is_named(build: Any) -> None:
    """transformers would cut as GPT-2 does: other tokens, silently."""
    with pytest.raises(UserError, match="qwen2"):
        build(pre="qwen2")


def test_sentencepiece_goes_through_transformers(write_gguf: Any, tiny_metadata: dict[str, Any]) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    fields = {
        "model": "llama",
        "tokens": pieces,
        "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.25],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    tokenizer = GgufCheckpoint(write_gguf(tiny_metadata | metadata)).tokenizer()
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>", "\u2581ab"]
    assert tokenizer.decode(tokenizer("ab").input_ids, skip_special_tokens=True) == "ab"
    # SentencePiece puts its space before a text that has one already, too.
    assert tokenizer.convert_ids_to_tokens(tokenizer(" ab").input_ids) == ["<s>", "\u2581", "\u2581ab"]


@pytest.mark.parametrize("fields", [{"bos_token_id": 10**6}, {"merges": ["a zzz"]}, {"model": "rwkv"}])
def test_inconsistent_vocabulary(build: Any, fails: Any, fields: dict[str, Any]) -> None:
    fails(lambda: build(**fields), "tokenizer", "model.gguf")
