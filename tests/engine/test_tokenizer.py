"""Text that grows token by token: whole characters, all of the text, nothing of a stop string."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tpllama.config import UserError
from tpllama.engine.tokenizer import TextStream, Tokenizer

REPLACEMENT = "\ufffd"
UNICODE = st.text(max_size=40) | st.text(st.sampled_from("aé 中日本語😀👩‍👩‍👧🇫🇷\n"), max_size=40)


def stream_pieces(tokenizer: Tokenizer, ids: list[int], context: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What each token released, up to where a stop string ended it, and the rest."""
    stream, pieces = TextStream(tokenizer, context, stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.is_stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


def text_after(tokenizer: Tokenizer, context: list[int], ids: list[int]) -> str:
    return tokenizer.decode(context + ids)[len(tokenizer.decode(context)) :]


@given(text=UNICODE, prompt=UNICODE)
@settings(max_examples=200, deadline=None)
@example(text="👩‍👩‍👧", prompt="")
@example(text=REPLACEMENT * 12 + "😀", prompt="a")
def test_pieces_are_whole_characters_and_add_up_to_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    ids, context = tokenizer.encode(text), tokenizer.encode(prompt)
    assume(tokenizer.decode(ids) == text)  # this tokenizer has no tokens for some bytes
    pieces = stream_pieces(tokenizer, ids, context)
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_add_up_to_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Tokens that are parts of characters, in any order, as a model at a high temperature draws them."""
    parts = sorted(set(tokenizer.encode("".join(map(chr, range(0x80, 0x800, 7))) + "😀🇫🇷中日本")))
    tokens = st.sampled_from(parts) | st.integers(0, 49151)
    ids = data.draw(st.lists(tokens, max_size=30))
    context = tokenizer.encode(data.draw(st.sampled_from(["", "a", "The capital of", "中"])))
    assert "".join(stream_pieces(tokenizer, ids, context)) == text_after(tokenizer, context, ids)


def test_text_comes_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    pieces = stream_pieces(tokenizer, ids, [])
    assert pieces == [*(tokenizer.decode([token]) for token in ids), ""]


# Tokenizers of the sentencepiece kind: a space belongs to the word after it, and unknown characters are bytes.


@pytest.fixture(scope="module")
def llama2_tokenizer() -> Tokenizer:
    """With the normalizer, the byte fallback and the decoder of Llama 2's."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decode_space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decode_space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>"))


@given(text=st.text("ab cé中😀", max_size=20), prompt=st.text("ab 中", min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
@example(text=" a", prompt="b")
@example(text="中中", prompt="a")
@example(text="中", prompt="中中")
def test_spaces_and_bytes_survive_between_prompt_and_text(llama2_tokenizer: Tokenizer, text: str, prompt: str) -> None:
    both, context = llama2_tokenizer.encode(prompt + text), llama2_tokenizer.encode(prompt)
    assume(both[: len(context)] == context)
    assert "".join(stream_pieces(llama2_tokenizer, both[len(context) :], context)) == text


# Stop strings.


def cut_at_first_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, the longest of those that end together."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


STOPS = st.lists(st.text("ab c", min_size=1, max_size=6), max_size=3).map(tuple)


@given(parts=st.lists(st.text("ab c", max_size=6), max_size=8), stops=STOPS)
@settings(max_examples=400, deadline=None)
@example(parts=["ab", "c"], stops=("abc", "b"))
@example(parts=["abc"], stops=("abc", "b"))
@example(parts=["aab", "aaab"], stops=("aaab",))
def test_text_ends_before_the_first_stop_wherever_tokens_end(
    tokenizer: Tokenizer, parts: list[str], stops: tuple[str, ...]
) -> None:
    ids = [token for part in parts for token in tokenizer.encode(part)]
    whole = "".join(parts)
    assert "".join(stream_pieces(tokenizer, ids, [], stops)) == cut_at_first_stop(whole, stops)


@given(parts=st.lists(st.text("ab c", max_size=6), max_size=8), stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_nothing_is_held_back_but_what_may_start_a_stop(
    tokenizer: Tokenizer, parts: list[str], stops: tuple[str, ...]
) -> None:
    stream, so_far = TextStream(tokenizer, [], stops), ""
    for token in (token for part in parts for token in tokenizer.encode(part)):
        stream.push(token)
        so_far += tokenizer.decode([token])
        assert stream.is_stopped == any(stop in so_far for stop in stops)
        if stream.is_stopped:
            break
        held = so_far[len(stream.text) :]
        assert so_far == stream.text + held
        starts = [stop[:size] for stop in stops for size in range(1, len(stop))]
        assert held == max((start for start in starts if so_far.endswith(start)), key=len, default="")


@pytest.mark.parametrize("stop", ["😀", "本語", "👩‍👧"])
def test_stops_of_many_bytes_are_found(tokenizer: Tokenizer, stop: str) -> None:
    pieces = stream_pieces(tokenizer, tokenizer.encode(f"before{stop}after"), [], (stop,))
    assert "".join(pieces) == "before"


def test_a_stop_cut_off_by_the_end_is_text(tokenizer: Tokenizer) -> None:
    assert "".join(stream_pieces(tokenizer, tokenizer.encode("one tw"), [], ("two",))) == "one tw"


# Special tokens, and no tokenizer at all.


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "a", " b", "é", "😀"]), max_size=12))
@settings(max_examples=100, deadline=None)
@example(["<|im_start|>"] * 9 + ["😀"])
def test_special_tokens_are_no_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode("".join(parts))
    assert "".join(stream_pieces(tokenizer, ids, [])) == "".join(part for part in parts if not part.startswith("<|"))


def test_chats_end_where_the_assistant_speaks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(expected)


def test_without_a_tokenizer_ids_are_served_and_text_is_an_error() -> None:
    none = Tokenizer(None)
    assert not none.has_text
    assert none.eos_token_ids == ()
    assert "".join(stream_pieces(none, [1, 2, 3], [4])) == ""
    with pytest.raises(UserError, match="found no tokenizer"):
        none.encode("text")
    with pytest.raises(UserError, match="found no chat template"):
        none.encode_chat([{"role": "user", "content": "Hi"}])


# What tokens stand for.


@given(text=UNICODE)
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assume(tokenizer.decode(ids) == text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_the_bytes_of_other_tokens(tokenizer: Tokenizer, llama2_tokenizer: Tokenizer) -> None:
    assert b"".join(map(llama2_tokenizer.token_bytes, llama2_tokenizer.encode("ab 中"))).decode() == " ab 中"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert tokenizer.decode([2]) == ""
    assert tokenizer.token_bytes(60_000) == b""
