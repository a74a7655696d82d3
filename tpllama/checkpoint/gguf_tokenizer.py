"""The tokenizer a GGUF file describes, as a transformers tokenizer.

Owns building it from the vocabulary in the metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.gguf_reader import MappedReader
from tpllama.checkpoint.open import first_line
from tpllama.checkpoint.tokenizer_parts import begin_with, llama3_words, space_in_front
from tpllama.config import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("smollm", *_LLAMA3_NAMES, "gpt-2", "default")


def build_tokenizer(reader: MappedReader, path: Path) -> PreTrainedTokenizerBase | None:
    """The file's tokenizer, or None where it holds no vocabulary."""
    model = reader.value("tokenizer.ggml.model")
    if model is None or "tokenizer.ggml.tokens" not in reader.fields:
        return None
    pre = reader.value("tokenizer.ggml.pre") or "default"
    try:
        if model == "gpt2":
            return _byte_level(reader, _known_pre_tokenizer(pre, path))
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and reader.value("tokenizer.ggml.add_space_prefix") in (None, True):
            space_in_front(backend)
    except UserError:
        raise
    except Exception as error:  # The tokenizers library raises plain Exception for an inconsistent vocabulary.
        raise UserError(
            f"found a tokenizer in {path} that can't be read ({first_line(error)}), expected a whole vocabulary, "
            f"download the file again"
        ) from error
    return tokenizer


def _known_pre_tokenizer(pre: str, path: Path) -> str:
    """`pre`, if its way of cutting text is known here: any other would silently give other tokens."""
    if pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"found pre-tokenizer {pre!r} in {path}, expected one of {', '.join(_PRE_TOKENIZERS)}, "
            f"use the model in Hugging Face's form"
        )
    return pre


def _byte_level(reader: MappedReader, pre: str) -> PreTrainedTokenizerBase:
    """Built straight from the fields: transformers' own conversion takes seconds."""
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = reader.value("tokenizer.ggml.tokens")
    kinds = reader.value("tokenizer.ggml.token_type")
    ids = {name: reader.value(f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIAL.items()}
    special = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    control = [] if kinds is None else [tokens[i] for i in (kinds == _CONTROL).nonzero()[0]]
    user_defined = [] if kinds is None else [tokens[i] for i in (kinds == _USER_DEFINED).nonzero()[0]]
    backend = _backend(tokens, reader.value("tokenizer.ggml.merges") or [], pre)
    # Added in the order of their ids, so that no later step appends a second entry.
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)
    if _adds_bos(reader, pre) and ids["bos_token"] is not None:
        begin_with(backend, special["bos_token"], int(ids["bos_token"]))
    named: dict[str, Any] = dict(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[token for token in control if token not in special.values()],
        chat_template=reader.value("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _backend(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # Llama 3 looks a whole word up before it merges.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pre: str) -> PreTokenizer:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in _LLAMA3_NAMES:
        return llama3_words()
    return words


def _adds_bos(reader: MappedReader, pre: str) -> bool:
    stated = reader.value("tokenizer.ggml.add_bos_token")
    # Converters leave the flag out for Llama 3, which always begins with one.
    return pre in _LLAMA3_NAMES if stated is None else bool(stated)
