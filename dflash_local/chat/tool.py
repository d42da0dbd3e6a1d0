"""A tool that the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_local.errors import InputError

# Characters that every dialect can write between its marks; the length is Anthropic's, twice
# OpenAI's.
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """`parameters` is the JSON schema of the arguments, an object; by default there are none.

    Raises InputError for a bad name, and for parameters that are not the schema of an object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_PARAMETERS))

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InputError(
                f"a tool is named {self.name!r}; give 1 to 128 letters, digits, '_', '-' and '.'"
            )
        given: object = self.parameters
        kind = given.get("type", "object") if isinstance(given, Mapping) else None
        if kind != "object":
            raise InputError(
                f"the parameters of tool {self.name} are not the JSON schema of an object; "
                'give one with "type": "object"'
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Tool:
        """A tool in OpenAI's shape: `{"type": "function", "function": {"name": ..., ...}}`."""
        function = None
        if isinstance(given, Mapping) and given.get("type", "function") == "function":
            function = given.get("function")
        if not isinstance(function, Mapping) or "name" not in function:
            raise InputError(
                'a tool is not a function with a name; give {"type": "function", "function": '
                '{"name": ..., "parameters": ...}}'
            )
        description = function.get("description")
        if not (description is None or isinstance(description, str)):
            raise InputError(
                f"the description of tool {function['name']} is not a text; give a text"
            )
        parameters = function.get("parameters")
        given = {} if parameters is None else {"parameters": parameters}
        return cls(function["name"], description, **given)

    def shown(self) -> dict[str, Any]:
        """The tool in OpenAI's shape, as chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
