"""Text to tokens and back: prompts, chat templates, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Any, Protocol

from tpllama.config import UserError

# Decoders give this for bytes that are no complete character (yet).
_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes; more tokens than that can't complete one.
_MAX_HELD_TOKENS = 8
# So many tokens are decoded again with each new one at the most: the last ones give it its context.
_MAX_WINDOW_TOKENS = 24

Message = dict[str, Any]


class HuggingFaceTokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    chat_template: str | dict[str, str] | None
    eos_token_id: int | None
    added_tokens_decoder: dict[int, Any]

    def convert_ids_to_tokens(self, token_ids: int) -> str | None: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: SequenceOf[int], **kwargs: Any) -> str: ...
    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...


class Tokenizer:
    """A checkpoint's tokenizer, or the lack of one: then token ids are served and text is a clear error."""

    def __init__(self, inner: HuggingFaceTokenizer | None) -> None:
        self._inner = inner

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._inner is not None

    @property
    def has_chat_template(self) -> bool:
        return self._inner is not None and bool(self._inner.chat_template)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._inner.eos_token_id if self._inner else None
        return () if eos is None else (eos,)

    def backend(self) -> Any:
        """The transformers tokenizer itself, for a library that reads its vocabulary."""
        return self._given()

    def encode(self, text: str) -> list[int]:
        """The tokens of a raw prompt, with the special tokens that the tokenizer puts around a text."""
        return self._given().encode(_checked(text))

    @property
    def chat_template(self) -> str:
        """The source of the template that conversations with tools get; empty where there is none."""
        template = self._inner.chat_template if self._inner else None
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return template or ""

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that `decode` leaves out, by name."""
        return {name: number for number, (name, is_special) in self._added.items() if is_special}

    @cached_property
    def _added(self) -> dict[int, tuple[str, bool]]:
        """Names of tokens that no merge makes, and whether `decode` leaves them out."""
        added = self._inner.added_tokens_decoder if self._inner else {}
        return {number: (str(token.content), bool(token.special)) for number, token in added.items()}

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for in a text, which may be part of a character; of a special token, its name."""
        if token in self._added:
            return self._added[token][0].encode()
        return self._bytes_of(self._given().convert_ids_to_tokens(token) or "")

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether a character of a token's name is a byte, as in GPT-2's vocabulary, and not itself."""
        backend = getattr(self._given(), "backend_tokenizer", None)
        return "ByteLevel" in repr(backend.decoder) if backend is not None else False

    def _bytes_of(self, name: str) -> bytes:
        if self._is_byte_level:
            numbers = [_BYTES_BY_NAME.get(character) for character in name]
            return bytes(number for number in numbers if number is not None)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def encode_chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks, or speaks on (continue_final_message).

        variables: what the template gets besides messages and tools, and `apply_chat_template`'s own options.
        """
        if not self.has_chat_template:
            raise UserError("found no chat template in the model's tokenizer, expected one, use --raw prompts")
        if not messages:
            raise UserError("found an empty conversation, expected at least one message")
        from jinja2 import TemplateError

        variables = {"add_generation_prompt": not variables.get("continue_final_message")} | variables
        try:
            rendered = self._given().apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"found a conversation that the model's chat template refuses ({error}), expected roles and an order "
                f"that it knows, change the messages"
            ) from None
        return self._given().encode(_checked(rendered), add_special_tokens=False)

    def decode(self, token_ids: SequenceOf[int]) -> str:
        """Text without special tokens; empty where there is no tokenizer."""
        if self._inner is None:
            return ""
        return self._inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _given(self) -> HuggingFaceTokenizer:
        if self._inner is None:
            raise UserError("found no tokenizer in the checkpoint, expected one for text, give token ids instead")
        return self._inner


def _names_of_bytes() -> dict[str, int]:
    """GPT-2's characters for bytes: a visible one of Latin-1 is itself, the others follow from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES_BY_NAME = _names_of_bytes()


def _checked(text: str) -> str:
    """`text`, if it is text. Raises UserError for bytes that no encoding explains."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"found a prompt that is no valid UTF-8 at character {error.start}, expected text") from None
    return text


class TextStream:
    """The text of tokens as they come. Pieces never split a character and add up to the whole text.

    A stop string ends the text before it, wherever token borders fall: the one that is complete first, the longest
    of those that end together. Text that may be the start of one is held back until it is clear.
    """

    def __init__(self, tokenizer: Tokenizer, context: SequenceOf[int], stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._ids = _end_of(tokenizer, context)
        self._prefix = 0
        self._read = len(self._ids)
        self._before = tokenizer.decode(self._ids)  # the text of tokens from `_prefix` to `_read`
        self._partial_tokens = 0
        self._stop = stop
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        """Adds a token; the text that is now certain. may_stop: whether a stop string that ends here counts."""
        self._ids.append(token)
        now = self._tokenizer.decode(self._ids[self._prefix :])
        self._partial_tokens = self._partial_tokens + 1 if now.endswith(_REPLACEMENT) else 0
        if 0 < self._partial_tokens < _MAX_HELD_TOKENS or len(now) <= len(self._before):
            return ""
        new = now[len(self._before) :]
        self._partial_tokens = 0
        if len(self._ids) - self._prefix > _MAX_WINDOW_TOKENS:
            self._prefix = self._read
            now = self._tokenizer.decode(self._ids[self._prefix :])
        self._before, self._read = now, len(self._ids)
        return self._release(new, may_stop)

    def finish(self, may_stop: bool = True) -> str:
        """The text that was still held back."""
        rest = self._tokenizer.decode(self._ids[self._prefix :])[len(self._before) :]
        piece = self._release(rest, may_stop) if not self.is_stopped else ""
        if not self.is_stopped:
            piece += self._held
            self.text += self._held
        self._held = ""
        return piece

    def _release(self, new: str, may_stop: bool) -> str:
        pending = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if may_stop and (at := pending.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            piece, self._held = pending[: min(found)[1]], ""
        else:
            held = max((overlap(pending, stop) for stop in self._stop), default=0)
            piece, self._held = pending[: len(pending) - held], pending[len(pending) - held :]
        self.text += piece
        return piece


def _end_of(tokenizer: Tokenizer, ids: SequenceOf[int]) -> list[int]:
    """The last tokens of a prompt, which give the first new one its context: decoders look at neighbours.

    They begin with a whole character, for some decoders give up on a run of bytes that begins within one.
    """
    sizes = range(4, 4 + _MAX_HELD_TOKENS)
    ends = (list(ids[-size:]) for size in sizes)
    return next((end for end in ends if not tokenizer.decode(end).startswith(_REPLACEMENT)), list(ids[-4:]))


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
