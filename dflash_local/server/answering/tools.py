"""Tools in OpenAI's form: those of a request, which of them to call, and calls of the past."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.tool import Tool
from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import REFUSED, ApiError

ToolName = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


def _functions_only(given: Any) -> Any:
    kind = given.get("type", "function") if isinstance(given, dict) else "function"
    if kind != "function":
        raise PydanticCustomError(
            REFUSED,
            "tools are functions here; there is none of type {kind}",
            {"kind": str(kind)[:64]},
        )
    return given


class Function(BaseModel):
    """`parameters` is the JSON schema of the arguments."""

    name: ToolName
    description: bounds.Text | None = None
    parameters: bounds.JsonObject | None = None
    strict: bounds.Flag | None = None


class FunctionTool(BaseModel):
    type: Literal["function"] = "function"
    function: Function

    _functions = model_validator(mode="before")(_functions_only)


class HostedTool(BaseModel):
    """One that OpenAI or Anthropic run themselves, or describe to their own models alone, such as a
    web search. The model here is not told about it."""

    type: bounds.Label


class NamedFunction(BaseModel):
    name: ToolName


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction

    @classmethod
    def of(cls, name: str) -> NamedTool:
        return cls(type="function", function=NamedFunction(name=name))


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=bounds.MAX_TOOLS)]


class AllowedToolsChoice(BaseModel):
    """Some of the tools. The prompt shows all of them, so that it still is in the cache."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode" if value in ("none", "auto", "required") else None
    kind = bounds.field_of(value, "type")
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(
        _kind,
        custom_error_type=REFUSED,
        custom_error_message="expected none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}',
    ),
]


@dataclass(frozen=True)
class ToolUse:
    """`shown`: the tools that the prompt describes. `allowed`: those that an answer may call.

    `force` is "required" where the answer must call one of these, or the name of the one that it
    must call. `parallel`: it may make several calls.
    """

    shown: tuple[Tool, ...] = ()
    allowed: tuple[Tool, ...] = ()
    force: str | None = None
    parallel: bool = True


def tool_use(
    tools: Sequence[FunctionTool] | None, choice: Any, *, parallel: bool | None
) -> ToolUse:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for.

    Raises ApiError for a choice without tools, or of a tool that is not among them.
    """
    shown = tuple(
        Tool(**given.function.model_dump(exclude={"strict"}, exclude_none=True))
        for given in tools or ()
    )
    names = [tool.name for tool in shown]
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools have the same name; give each its own", param="tools")
    several = parallel is not False
    if choice is None or choice == "auto":
        return ToolUse(shown, shown, None, several)
    if choice == "none":
        return ToolUse()  # the prompt shows none: a model that knows about tools calls them
    if not shown:
        raise ApiError(400, "tool_choice asks for a call; give tools", param="tool_choice")
    if choice == "required":
        return ToolUse(shown, shown, "required", several)
    force: str | None = None
    if isinstance(choice, NamedTool):
        wanted, force = [choice.function.name], choice.function.name
    else:
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
        if choice.allowed_tools.mode == "required":
            force = "required"
    for name in wanted:
        if name not in names:
            raise ApiError(
                400,
                f"tool_choice names {name!r}; the tools are: {', '.join(names)}",
                param="tool_choice",
            )
    return ToolUse(shown, tuple(tool for tool in shown if tool.name in wanted), force, several)


def _as_text(given: Any) -> Any:
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given


Arguments = Annotated[bounds.JsonText, BeforeValidator(_as_text)]


class CalledFunction(BaseModel):
    """`arguments` is a JSON text; some clients send the object itself."""

    name: bounds.Name
    arguments: Arguments


class ToolCall(BaseModel):
    """A call that an earlier answer made."""

    id: bounds.Label | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    _functions = model_validator(mode="before")(_functions_only)
