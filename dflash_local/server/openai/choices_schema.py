"""What `/v1/chat/completions` and `/v1/completions` are both sent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.http.errors import ApiError


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object. Clients of llama-server give a schema here too."""

    type: Literal["json_object"]
    json_schema: bounds.JsonObject | None = Field(None, alias="schema")


class NamedSchema(BaseModel):
    name: bounds.Label | None = None
    description: bounds.Text | None = None
    json_schema: bounds.JsonObject = Field(default_factory=dict, alias="schema")
    strict: bounds.Flag | None = None


class JsonSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, whatever `strict` says."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(BaseModel):
    include_usage: bounds.Flag | None = None


class ChoicesRequest(SamplingFields):
    """`n` are the answers to each prompt. `json_schema` is llama-server's."""

    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    stream_options: StreamOptions | None = None
    n: bounds.Choices | None = None
    max_tokens: bounds.Predict | None = None
    response_format: ResponseFormat | None = None
    json_schema: bounds.JsonObject | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def schema_of_answer(self) -> Any:
        """The JSON schema that binds the answer; True for any JSON object, None for free text."""
        given = self.response_format
        if isinstance(given, JsonObjectFormat):
            return given.json_schema or True
        if isinstance(given, JsonSchemaFormat):
            return given.json_schema.json_schema or True
        return self.json_schema

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options are for streams; set stream", param="stream_options"
            )
