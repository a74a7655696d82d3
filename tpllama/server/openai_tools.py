"""Tools and the choice among them as OpenAI's clients write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tpllama.server.errors import ApiError
from tpllama.server.fields import Form
from tpllama.server.tools import Tool, ToolUse

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Form):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of its arguments, an object's.")
    strict: bool | None = Field(None, description="Calls follow the schema, as they do where one must be made.")


class FunctionTool(Form):
    """A tool. All are functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Form):
    """The function that must be called."""

    name: FunctionName


class NamedToolChoice(Form):
    """A call of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def tool_use(tools: list[FunctionTool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """What a request says of tools. Raises ApiError for a choice that there is not."""
    offered = tuple(_tool(tool.function, f"tools[{at}].function") for at, tool in enumerate(tools or ()))
    name = choice.function.name if isinstance(choice, NamedToolChoice) else choice
    return checked(offered, name or ("auto" if offered else "none"), 1 if parallel is False else None)


def checked(tools: tuple[Tool, ...], choice: str, most_calls: int | None = None, **others: Any) -> ToolUse:
    """The tools and the choice, if it can be made among them. `others`: fields of ToolUse."""
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(400, f"found the tool {twice} twice, expected each once, drop one", param="tools")
    is_known = choice in ("none", "auto") or (choice == "required" and names) or choice in names
    if not is_known:
        expected = f"one of {', '.join(names)}" if names else "tools with it"
        raise ApiError(400, f"found tool_choice {choice}, expected {expected}, correct it", param="tool_choice")
    return ToolUse(tools, choice if tools else "none", most_calls, **others)


def _tool(function: FunctionDefinition, place: str) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise ApiError(
            400, f"found {place}.parameters of another type, expected an object's schema", param=f"{place}.parameters"
        )
    return Tool(function.name, function.description or "", parameters, bool(function.strict))
