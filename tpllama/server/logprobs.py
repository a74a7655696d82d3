"""Log-probabilities in the forms of the three APIs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpllama.engine.request import TokenLogprobs
from tpllama.engine.tokenizer import TextStream, Tokenizer

# JSON has no infinity.
_LEAST = -9999.0


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text: itself, its bytes where they are part of a character, its id where there is no tokenizer."""
    if not tokenizer.has_text:
        return f"token_id:{token}"
    written = tokenizer.token_bytes(token)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """OpenAI's form for chat."""
    content = [
        _chat_token(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": max(logprob, _LEAST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def by_token(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens' log-probabilities by their text, and the token's own, last if it is none of them.

    Of tokens that look alike, as there are in some vocabularies, the likeliest is told.
    """
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(token_text(tokenizer, token), max(logprob, _LEAST))
    return found


class CompletionLogprobs:
    """OpenAI's form for completions, of one text that grows.

    context: the tokens before it; offset: where it begins in the text that is answered.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int], offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, context, ())
        self._offset = offset
        self._lists: dict[str, list[Any]] = _empty()

    def push(self, token: int, entry: TokenLogprobs | None) -> None:
        """Adds a token; it has no entry where nothing comes before it."""
        lists = self._lists
        lists["tokens"].append(token_text(self._tokenizer, token))
        lists["text_offset"].append(self._offset)
        lists["token_logprobs"].append(entry and max(entry.logprob, _LEAST))
        lists["top_logprobs"].append(by_token(self._tokenizer, entry) if entry else None)
        self._offset += len(self._stream.push(token))

    def push_prompt(self, token_ids: list[int], entries: list[TokenLogprobs]) -> None:
        """Adds a prompt's tokens, whose entries begin with the second one's."""
        for token, entry in zip(token_ids, [None, *entries], strict=True):
            self.push(token, entry)

    def take(self) -> dict[str, list[Any]]:
        """What was added since it was taken the last time."""
        taken, self._lists = self._lists, _empty()
        return taken


def _empty() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
