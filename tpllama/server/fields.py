"""Fields that OpenAI's two request forms share: how tokens are chosen, what a text must follow, how it is sent.

A field that is not declared is refused, and so is a value that would be ignored; what has no meaning here and does
no harm (`user`, `metadata`, ...) is accepted and said so.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tpllama.engine.request import SamplingParams
from tpllama.server.errors import ApiError

# Beyond these a number is a mistake.
MOST_TOKENS = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
# Of a dictionary whose keys have a pattern, the schema has to say that others are refused.
NO_OTHER_KEYS = {"additionalProperties": False}
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=4096, json_schema_extra=NO_OTHER_KEYS),
]


def _encodable(text: str) -> str:
    text.encode()  # UnicodeEncodeError is a ValueError, which names the field
    return text


ModelId = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_encodable)]
NO_MEANING = "Accepted, and without a meaning here."


class Form(BaseModel):
    """Part of a request. JSON's own types, finite numbers, no field that is not declared."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(Form):
    """How an answer is streamed."""

    include_usage: bool | None = Field(None, description="Whether a last event counts the tokens.")
    include_obfuscation: Literal[False] | None = Field(None, description="Events are never padded.")


class TextFormat(Form):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Form):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Form):
    """A JSON schema with a name, as OpenAI has it."""

    name: str = Field(max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is followed exactly, whatever this says.")


class JsonSchemaFormat(Form):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class SamplingFields(Form):
    """How tokens are chosen, and when a text ends."""

    model: ModelId
    temperature: float | None = Field(None, ge=0, le=2, description="0 takes the likeliest token. Default: 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Default: another one for each request.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, description="What is added to a token's logit, by token id.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, description=NO_MEANING)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOKENS, description="-1 and 0 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]], Field(max_length=1024)] | None = None
    guided_json: dict[str, Any] | None = Field(None, description="A JSON schema that the text follows.")
    guided_regex: str | None = Field(None, description="A regular expression that the text matches.")
    guided_grammar: str | None = Field(None, description="A grammar in llguidance's Lark dialect.")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last event counts the tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


def check_stream_options(fields: SamplingFields) -> None:
    """Raises ApiError where options of a stream are given without one."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "found stream_options without stream, expected both or none", param="stream_options")


def sampling_params(
    fields: SamplingFields, max_new_tokens: int, *, logprobs: int | None, prompt_logprobs: int | None = None,
    constraint: dict[str, Any] | None = None,
) -> SamplingParams:  # fmt: skip
    """What the engine is asked for. `constraint`: what the text must follow, where it is not what the fields say."""
    if fields.min_tokens is not None and fields.min_tokens > max_new_tokens:
        raise ApiError(
            400, f"found min_tokens {fields.min_tokens}, expected at most the {max_new_tokens} that there may be",
            param="min_tokens",
        )  # fmt: skip
    given = {
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": fields.top_p,
        "n": fields.n,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "top_k": None if fields.top_k is None else max(fields.top_k, 0),
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
        "ignore_eos": fields.ignore_eos,
        "min_tokens": fields.min_tokens,
        "stop": fields.stop,
        "stop_token_ids": fields.stop_token_ids,
        "logit_bias": {int(token): bias for token, bias in (fields.logit_bias or {}).items()},
        # Two requests that say nothing of a seed are not meant to get the same text.
        "seed": secrets.randbits(63) if fields.seed is None else fields.seed,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    } | (text_constraint(fields) if constraint is None else constraint)
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_new_tokens=max_new_tokens, **chosen)


def text_constraint(fields: SamplingFields) -> dict[str, Any]:
    """What a text must follow, as SamplingParams has it; empty where it is free."""
    given: list[tuple[str, str, Any]] = [
        (name, ours, value)
        for name, ours, value in (
            ("response_format", "json_schema", _schema_of(fields.response_format)),
            ("guided_json", "json_schema", fields.guided_json and with_little_space(fields.guided_json)),
            ("guided_regex", "regex", fields.guided_regex),
            ("guided_grammar", "grammar", fields.guided_grammar),
        )
        if value is not None
    ]
    if len(given) > 1:
        names = [name for name, _, _ in given]
        raise ApiError(400, f"found {' and '.join(names)}, expected one of them, drop the others", param=names[1])
    return {ours: value for _, ours, value in given}


def with_little_space(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose texts have a line's end and an indent between their parts, but no more.

    Otherwise small models go on with spaces for ever.
    """
    return {"x-guidance": {"whitespace_pattern": r"\n? {0,16}"}} | dict(schema)


def _schema_of(form: ResponseFormat | None) -> dict[str, Any] | None:
    match form:
        case JsonObjectFormat():
            return with_little_space({"type": "object"})
        case JsonSchemaFormat():
            schema = form.json_schema.schema_
            return with_little_space({"type": "object"} if schema is None else schema)
        case _:
            return None
