"""Requests of llama-stack 0.2's inference API, and what they mean to templates and the engine."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from tpllama.engine.request import SamplingParams
from tpllama.server.errors import ApiError
from tpllama.server.fields import MOST_TOKENS, NO_OTHER_KEYS, Form, ModelId, StopString, with_little_space
from tpllama.server.llama_stack_messages import Content, Conversation
from tpllama.server.openai_tools import FunctionName, checked
from tpllama.server.tools import BUILT_IN, Tool, ToolUse

_MOST_IN_BATCH = 2048
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_JSON_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
# What the tools that Llama 3.1 knows by name are called with.
_BUILT_IN_PARAMETERS = {name: "code" if name == "code_interpreter" else "query" for name in BUILT_IN}


class GreedyStrategy(Form):
    """The likeliest token."""

    type: Literal["greedy"]


class TopPStrategy(Form):
    """The likeliest tokens that make up `top_p`."""

    type: Literal["top_p"]
    temperature: float | None = Field(None, gt=0, le=2, description="Default: 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Default: 0.95.")


class TopKStrategy(Form):
    """The `top_k` likeliest tokens."""

    type: Literal["top_k"]
    top_k: int = Field(ge=1, le=MOST_TOKENS)


class Sampling(Form):
    """How tokens are chosen, and when a text ends."""

    strategy: Annotated[GreedyStrategy | TopPStrategy | TopKStrategy, Field(discriminator="type")] | None = None
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Default, and 0: what the context holds.")
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop: Annotated[list[StopString], Field(max_length=64)] | None = None


class JsonSchemaFormat(Form):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class GrammarFormat(Form):
    """Rules' names and what they expand to, or a list of alternatives, as llguidance's Lark dialect writes it.

    The rule `start`, or the first one, is that of the text.
    """

    type: Literal["grammar"]
    bnf: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | list[str]],
        Field(min_length=1, json_schema_extra=NO_OTHER_KEYS),
    ]


class Logprobs(Form):
    """How many tokens' log-probabilities are told at each place."""

    top_k: int | None = Field(None, ge=0, le=100)


class ToolParameter(Form):
    """An argument of a tool."""

    param_type: str
    description: str | None = None
    required: bool | None = Field(None, description="Default: true.")
    default: Any = None


class ToolDefinition(Form):
    """A tool that the model may call, or the name of one that it knows."""

    tool_name: FunctionName
    description: str | None = None
    parameters: dict[str, ToolParameter] | None = None


class ToolConfig(Form):
    """How tools are told of and used."""

    tool_choice: str | None = None
    tool_prompt_format: Literal["json", "function_tag", "python_list"] | None = None
    system_message_behavior: Literal["append", "replace"] | None = None


class StackFields(Form):
    """What all requests have."""

    model_id: ModelId
    sampling_params: Sampling | None = None
    response_format: Annotated[JsonSchemaFormat | GrammarFormat, Field(discriminator="type")] | None = None
    logprobs: Logprobs | None = None


class ToolFields(StackFields):
    """What requests for an assistant's answers have besides."""

    tools: Annotated[list[ToolDefinition], Field(max_length=256)] | None = None
    tool_config: ToolConfig | None = None


class StackChatRequest(ToolFields):
    """POST /v1/inference/chat-completion."""

    messages: Conversation
    stream: bool | None = None
    tool_choice: Literal["auto", "required", "none"] | None = Field(None, description="As in tool_config.")
    tool_prompt_format: Literal["json", "function_tag", "python_list"] | None = Field(
        None, description="As in tool_config."
    )


class StackBatchChatRequest(ToolFields):
    """POST /v1/inference/batch-chat-completion."""

    messages_batch: Annotated[list[Conversation], Field(min_length=1, max_length=_MOST_IN_BATCH)]


class StackCompletionRequest(StackFields):
    """POST /v1/inference/completion."""

    content: Content
    stream: bool | None = None


class StackBatchCompletionRequest(StackFields):
    """POST /v1/inference/batch-completion."""

    content_batch: Annotated[list[Content], Field(min_length=1, max_length=_MOST_IN_BATCH)]


def tool_use(request: ToolFields) -> ToolUse:
    """What a request says of tools. Raises ApiError for a choice that there is not."""
    config = request.tool_config or ToolConfig()
    chosen = {"tool_choice": config.tool_choice, "tool_prompt_format": config.tool_prompt_format}
    for name in chosen:
        old = getattr(request, name, None)
        if None not in (old, chosen[name]) and old != chosen[name]:
            raise ApiError(400, f"found {name} and another in tool_config, expected one, drop it", param=name)
        chosen[name] = old or chosen[name]
    tools = tuple(_tool(each) for each in request.tools or ())
    form, is_replaced = chosen["tool_prompt_format"], config.system_message_behavior == "replace"
    return checked(tools, chosen["tool_choice"] or "auto", form=form, is_replaced=is_replaced)


def _tool(given: ToolDefinition) -> Tool:
    parameters = given.parameters or {}
    if not parameters and given.tool_name in _BUILT_IN_PARAMETERS:
        parameters = {_BUILT_IN_PARAMETERS[given.tool_name]: ToolParameter(param_type="string", required=True)}
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for name, parameter in parameters.items():
        written = _TYPES.get(parameter.param_type.partition("[")[0], parameter.param_type)
        if written not in _JSON_TYPES:
            raise ApiError(
                400, f"found param_type {parameter.param_type!a}, expected one of {', '.join([*_TYPES, *_JSON_TYPES])}",
                param="tools",
            )  # fmt: skip
        told = {"description": parameter.description, "default": parameter.default}
        schema["properties"][name] = {"type": written} | {key: each for key, each in told.items() if each is not None}
    schema["required"] = [name for name, parameter in parameters.items() if parameter.required is not False]
    return Tool(given.tool_name, given.description or "", schema)


def answer_constraint(request: StackFields) -> dict[str, Any]:
    """What a text must follow, as SamplingParams has it; empty where it is free."""
    match request.response_format:
        case JsonSchemaFormat(json_schema=schema):
            return {"json_schema": with_little_space(schema)}
        case GrammarFormat(bnf=rules):
            alternatives = {name: " | ".join([each] if isinstance(each, str) else each) for name, each in rules.items()}
            lines = [f"{name}: {expansion}" for name, expansion in alternatives.items()]
            first = [] if "start" in alternatives else [f"start: {next(iter(alternatives))}"]
            return {"grammar": "\n".join([*first, *lines]) + "\n"}
        case _:
            return {}


def sampling_params(request: StackFields, max_new_tokens: int, constraint: dict[str, Any]) -> SamplingParams:
    """What the engine is asked for."""
    given = request.sampling_params or Sampling.model_validate({})
    match given.strategy:
        case TopPStrategy(temperature=temperature, top_p=top_p):
            chosen: dict[str, Any] = {"temperature": temperature or 1.0, "top_p": top_p or 0.95}
        case TopKStrategy(top_k=top_k):
            chosen = {"temperature": 1.0, "top_k": top_k}
        case _:
            chosen = {"temperature": 0.0}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        repetition_penalty=given.repetition_penalty or 1.0,
        stop=tuple(given.stop or ()),
        seed=secrets.randbits(63),
        logprobs=None if request.logprobs is None else request.logprobs.top_k or 0,
        **chosen,
        **constraint,
    )
