"""Tools in OpenAI's form: those of a request, which of them to call, and calls of the past."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.tool import Tool
from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import REFUSED, bad_request

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

    @property
    def tool(self) -> Tool:
        return Tool.of({"function": self.model_dump()})


class FunctionTool(BaseModel):
    type: Literal["function"] = "function"
    function: Function

    _functions = model_validator(mode="before")(_functions_only)


def _reaches_no_server(given: Any) -> Any:
    if bounds.field_of(given, "type") == "mcp":
        raise PydanticCustomError(
            REFUSED,
            "this server calls no other, so it takes no tools of type mcp; give their functions as "
            "tools of type function, and call them yourself",
        )
    return given


class HostedTool(BaseModel):
    """One that OpenAI or Anthropic run themselves, or describe to their own models alone, such as a
    web search. The model here is not told about it: editors send it whether it is there or not."""

    type: bounds.Label

    _mcp = model_validator(mode="before")(_reaches_no_server)


class NamedFunction(BaseModel):
    name: ToolName


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[bounds.ToolsOf[NamedTool], Field(min_length=1)]


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


Choice = tuple[str, list[str] | None]
"""The calls an answer may make: "none", "auto" or "required", and of which tools; None is all."""


@dataclass(frozen=True)
class ToolUse:
    """`shown`: the tools that the prompt describes. `allowed`: those that an answer may call.

    `required`: it must call one of these. `parallel`: it may make several calls.
    """

    shown: Sequence[Tool] = ()
    allowed: Sequence[Tool] = ()
    required: bool = False
    parallel: bool = True


def tool_use(
    tools: Sequence[Tool],
    mode: str = "auto",
    names: Sequence[str] | None = None,
    *,
    parallel: bool | None = True,
) -> ToolUse:
    """The use of tools that a request asks for by its tools, `Choice` and `parallel_tool_calls`.

    Raises ApiError for a choice without tools, or of a tool that is not among them.
    """
    known = [tool.name for tool in tools]
    if len(set(known)) < len(known):
        raise bad_request("two tools have the same name; give each its own", param="tools")
    if mode == "none":
        return ToolUse()  # the prompt shows none: a model that knows about tools calls them
    if not tools and (mode == "required" or names is not None):
        raise bad_request("tool_choice asks for a call; give tools", param="tool_choice")
    for name in names or ():
        if name not in known:
            raise bad_request(
                f"tool_choice names {name!r}; the tools are: {', '.join(known)}",
                param="tool_choice",
            )
    allowed = [tool for tool in tools if names is None or tool.name in names]
    return ToolUse(tools, allowed, mode == "required", parallel is not False)


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
