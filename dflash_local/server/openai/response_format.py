"""`response_format`: free text, a JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import REFUSED

_KINDS = ("text", "json_object", "json_schema")


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object; llama-server's clients give a schema here too."""

    type: Literal["json_object"]
    json_schema: bounds.JsonObject | None = Field(None, alias="schema")


class NamedSchema(BaseModel):
    name: bounds.Label | None = None
    description: bounds.Text | None = None
    json_schema: bounds.JsonObject = Field(default_factory=dict, alias="schema")
    strict: bounds.Flag | None = None


class JsonSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, `strict` or not."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in _KINDS else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[JsonObjectFormat, Tag("json_object")]
    | Annotated[JsonSchemaFormat, Tag("json_schema")],
    Discriminator(
        _kind,
        custom_error_type=REFUSED,
        custom_error_message=f"expected an object with a type, one of {', '.join(_KINDS)}",
    ),
]


def schema_of(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Any:
    """The JSON schema that binds the answer; True for any JSON object, None for free text."""
    if isinstance(given, JsonObjectFormat):
        return given.json_schema or True
    if isinstance(given, JsonSchemaFormat):
        return given.json_schema.json_schema or True
    return None
