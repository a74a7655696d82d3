"""Exchanges without a server: on a loaded model, and on tokens that a test chooses instead of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from tpllama.engine.engine import Limits
from tpllama.engine.grammar import Grammars
from tpllama.engine.request import Output, Request, TokenLogprobs
from tpllama.engine.text import Piece, Text
from tpllama.engine.tokenizer import Tokenizer
from tpllama.server.exchange import Exchange

EOS, EOM = "<|im_end|>", "<|eom_id|>"

# As Llama 3.1's does: tools in its own words, one call to a message, and `ipython` for what it brought.
LLAMA_TEMPLATE = """
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{{- '<|im_start|>' + (message.role if message.role != 'tool' else 'ipython') + '\n' }}
{%- if loop.first and tools %}
{{- 'Tools:' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '\n' }}
{%- endif %}
{%- if loop.first and builtin_tools is defined %}{{- 'Built in: ' + builtin_tools | join(', ') + '\n' }}{% endif %}
{%- if message.tool_calls is defined %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- message.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def llama_like() -> Tokenizer:
    """The embedded model's tokenizer with Llama 3.1's special tokens, and a template that knows tools."""
    from tpllama.checkpoint.open import open_checkpoint

    inner = open_checkpoint("smollm2").tokenizer()
    inner.add_special_tokens({"extra_special_tokens": ["<|python_tag|>", EOM]})
    inner.chat_template = LLAMA_TEMPLATE
    return Tokenizer(inner)


def model_of(tokenizer: Tokenizer, context_length: int = 2048) -> Any:
    """What exchanges need to know of an LLM, without weights."""
    limits = Limits(context_length, 49152)
    engine = SimpleNamespace(tokenizer=tokenizer, limits=limits, grammars=Grammars(tokenizer, 49152, (0, 2)))
    return SimpleNamespace(tokenizer=tokenizer, engine=engine)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend().encode(text, add_special_tokens=False)


def played(exchange: Exchange, llm: Any, texts: Sequence[list[int]]) -> list[Piece]:
    """The engine's pieces for texts of these tokens, one for each sample of each prompt, a token of each in turn."""
    prompts, params = exchange.prepare(llm)
    ends = frozenset(llm.tokenizer.special_tokens[name] for name in (EOS, EOM) if name in llm.tokenizer.special_tokens)
    pieces: deque[Piece | Exception] = deque()
    left, runs = list(texts), []
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        for sample in range(each.n):
            tokens = left.pop(0)
            longest = len(prompt.token_ids) + min(len(tokens), each.max_new_tokens)
            request = Request(index, sample, prompt.token_ids, each, longest, end_ids=ends)
            request.prompt_logprobs = [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in prompt.token_ids[1:]]
            text = Text(request, prompt, llm.tokenizer)
            text.pieces = pieces
            runs.append((request, text, tokens))
    assert not left
    for step in zip_longest(*(tokens for _, _, tokens in runs)):
        for (request, text, _), token in zip(runs, step, strict=True):
            if token is not None and request.finish_reason is None:
                asked = request.params.logprobs
                request.append(token, None if asked is None else TokenLogprobs(token, -0.5, ((token, -0.5),) * asked))
                text.take_newest()
    return [piece for piece in pieces if isinstance(piece, Piece)]


def streamed(exchange: Exchange, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """All events of a stream."""
    return [event for piece in pieces for event in exchange.on_piece(piece)] + exchange.on_end()


def outputs_of(pieces: Sequence[Piece]) -> list[Output]:
    outputs = [piece.output for piece in pieces if piece.output]
    return sorted(outputs, key=lambda output: (output.index, output.sample))


def run(exchange: Exchange, llm: Any) -> Any:
    """What a model answers: a body, or a stream's events."""
    pieces = list(llm.pieces(*exchange.prepare(llm)))
    return streamed(exchange, pieces) if exchange.is_stream else exchange.answer(outputs_of(pieces))
