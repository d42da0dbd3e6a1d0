"""Tools in OpenAI's shape: those of a request, which of them to call, calls of the past."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.server import bounds
from dflash_local.server.errors import REFUSED

ToolName = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


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

    model_config = ConfigDict(extra="ignore")

    name: ToolName
    description: bounds.Text | None = None
    parameters: bounds.JsonObject | None = None
    strict: bounds.Flag | None = None


class FunctionTool(BaseModel):
    type: Literal["function"] = "function"
    function: Function

    _functions = model_validator(mode="before")(_functions_only)


class NamedFunction(BaseModel):
    name: ToolName


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=bounds.MAX_TOOLS)]


class AllowedToolsChoice(BaseModel):
    """Some of the tools, where the prompt shows all of them and so stays what the cache holds."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode" if value in ("none", "auto", "required") else None
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
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


class CalledFunction(BaseModel):
    """`arguments` is a JSON text."""

    name: bounds.Name
    arguments: bounds.Text


class ToolCall(BaseModel):
    """A call that a former answer made."""

    model_config = ConfigDict(extra="ignore")

    id: bounds.Label | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    _functions = model_validator(mode="before")(_functions_only)
