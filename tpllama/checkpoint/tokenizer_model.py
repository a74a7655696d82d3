"""tokenizer.model, as a transformers tokenizer: the file that Meta puts beside its weights, in either of two forms.

Llama 3's is tiktoken's text, a line per token; Llama 1's and 2's is a SentencePiece model. The name is the same, so
the content tells. Owns what the files leave to Meta's code: special tokens, the first token, the chat formats.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpllama.checkpoint.open import first_line
from tpllama.checkpoint.tokenizer_parts import begin_with, llama3_words, space_in_front
from tpllama.config import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Special tokens that have a role, by their place after the ordinary ones. The others are reserved.
_ROLES = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_NUM_SPECIAL = 256
_ENDS = (1, 8, 9)
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,9}\r?")

_LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# A system message is part of the first user's; each answer closes a text of its own.
_LLAMA2_CHAT = (
    "{% set talk = namespace(system='', turn='user') %}{% for message in messages %}"
    "{% if message.role == 'system' and loop.first %}"
    "{% set talk.system = '<<SYS>>\n' ~ message.content ~ '\n<</SYS>>\n\n' %}"
    "{% elif message.role != talk.turn %}"
    "{{ raise_exception('found the role ' ~ message.role ~ ', expected ' ~ talk.turn ~ "
    "': Llama 2 knows a system message at the start, then user and assistant in turn') }}"
    "{% elif talk.turn == 'user' %}"
    "{{ bos_token ~ '[INST] ' ~ (talk.system ~ message.content) | trim ~ ' [/INST]' }}"
    "{% set talk.system = '' %}{% set talk.turn = 'assistant' %}"
    "{% else %}{{ ' ' ~ message.content | trim ~ ' ' ~ eos_token }}{% set talk.turn = 'user' %}"
    "{% endif %}{% endfor %}"
)


def is_sentencepiece(file: Path) -> bool:
    """Whether the file is a SentencePiece model; otherwise it is Llama 3's. Raises UserError for neither."""
    with _opened(file) as opened:
        start = opened.read(4096)
    # A protobuf message whose first field is its first: the pieces.
    if start.startswith(b"\n"):
        return True
    if not _TIKTOKEN_LINE.fullmatch(start.split(b"\n", 1)[0]):
        raise UserError(
            f"found {file} beginning with {start[:24]!r}, expected a tokenizer of Llama 3 (base64 and rank in each "
            f"line) or Llama 1 and 2 (SentencePiece), download it again"
        )
    return False


def vocabulary_size(file: Path) -> int:
    """The number of tokens, special ones included. Raises UserError for a damaged file."""
    return _open_sentencepiece(file).get_piece_size() if is_sentencepiece(file) else _num_ranks(file) + _NUM_SPECIAL


def eos_token_ids(file: Path) -> tuple[int, ...]:
    """Ids that end a text: Llama 3's end_of_text, eom and eot, or SentencePiece's eos. Builds no tokenizer.

    Raises UserError for a damaged file.
    """
    if is_sentencepiece(file):
        eos = _open_sentencepiece(file).eos_id()
        return () if eos < 0 else (eos,)
    first = _num_ranks(file)
    return tuple(first + place for place in _ENDS)


def instruct_name(file: Path) -> str | None:
    """The folder above the file whose name says that the model was tuned for conversations: nothing in it does."""
    words = {"instruct", "chat"} if is_sentencepiece(file) else {"instruct"}
    folders = reversed(file.parent.resolve().parts)
    return next((name for name in folders if words & set(re.split(r"[\W_]+", name.lower()))), None)


def build_tokenizer(file: Path, instruct: bool) -> PreTrainedTokenizerBase:
    """The tokenizer, which begins every text with BOS. With `instruct` it has the chat template of its generation.

    Special tokens written in a text are read as such. Raises UserError for a damaged file.
    """
    if is_sentencepiece(file):
        return _llama2(file, _LLAMA2_CHAT if instruct else None)
    return _llama3(file, _LLAMA3_CHAT if instruct else None)


def _llama3(file: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    ranks = _ranks(file)
    # In the order of their ids: 128000 to 128255 in the published vocabulary.
    reserved = [place for place in range(_NUM_SPECIAL) if place not in _ROLES]
    names = _ROLES | {place: f"<|reserved_special_token_{number}|>" for number, place in enumerate(reserved)}
    special = [names[place] for place in range(_NUM_SPECIAL)]
    backend = _byte_level(ranks, file)
    backend.add_special_tokens(special)
    bos, bos_id = special[0], len(ranks)
    begin_with(backend, bos, bos_id)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=special[1],
        pad_token=special[4],
        extra_special_tokens=[*special[2:4], *special[5:]],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(ranks: dict[bytes, int], file: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.tokenization_utils_base import generate_merges

    characters: dict[int, str] = bytes_to_unicode()
    vocabulary = {token.decode("latin-1").translate(characters): rank for token, rank in ranks.items()}
    missing = [f"{byte:#04x}" for byte, character in characters.items() if character not in vocabulary]
    if missing:
        raise UserError(f"found no token for byte {missing[0]} in {file}, expected one for each, download it again")
    # tiktoken joins any two neighbours that are a token together, lowest rank first, and looks whole words up before.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=generate_merges(vocabulary), ignore_merges=True))
    backend.pre_tokenizer = llama3_words()
    backend.decoder = decoders.ByteLevel()
    return backend


def _ranks(file: Path) -> dict[bytes, int]:
    """Every token's bytes and rank. tiktoken's own reader caches files by their path, and needs another package."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_lines(file)):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise _damaged(file, f"line {number + 1} is {line[:40]!r}") from error
        if int(rank) != number or len(ranks) != number + 1:
            raise _damaged(file, f"line {number + 1}, {line[:40]!r}, repeats a token or is out of order")
    return ranks


def _num_ranks(file: Path) -> int:
    """The number of ordinary tokens of Llama 3's file, from its lines and its last."""
    lines = _lines(file)
    if not _TIKTOKEN_LINE.fullmatch(lines[-1]) or int(lines[-1].split()[1]) != len(lines) - 1:
        raise _damaged(file, f"its last line is {lines[-1][:40]!r}, number {len(lines)}")
    return len(lines)


def _lines(file: Path) -> list[bytes]:
    with _opened(file) as opened:
        return opened.read().rstrip().split(b"\n")


def _llama2(file: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    from tokenizers import models
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    _open_sentencepiece(file)
    try:
        extractor = SentencePieceExtractor(str(file))
        _check_like_llama(extractor.proto, file)
        tokenizer: Any = LlamaTokenizer(
            **extractor.extract(models.BPE), add_bos_token=True, chat_template=chat_template
        )
    except UserError:
        raise
    except Exception as error:  # The tokenizers library raises plain Exception for an inconsistent vocabulary.
        raise _damaged(file, first_line(error)) from error
    space_in_front(tokenizer.backend_tokenizer)
    return tokenizer


def _check_like_llama(proto: Any, file: Path) -> None:
    """Raises UserError for settings that LlamaTokenizer does not read: other tokens would come out, silently."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.BPE:
        raise UserError(f"found a SentencePiece model {file} that is no BPE, expected a Llama's, use its own tokenizer")
    changes = normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces
    if changes or not (normalizer.add_dummy_prefix and normalizer.escape_whitespaces):
        raise UserError(
            f"found a SentencePiece model {file} that changes a text before cutting it (normalizer "
            f"{normalizer.name!r}), expected a Llama's, which adds a space in front alone, use its own tokenizer"
        )


def _open_sentencepiece(file: Path) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError, ValueError) as error:
        raise _damaged(file, first_line(error)) from error


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"found {file} unreadable ({error.strerror}), expected a tokenizer, check it") from error


def _damaged(file: Path, reason: str) -> UserError:
    return UserError(f"found a damaged tokenizer {file} ({reason}), expected a whole file, download it again")
