"""Fields of requests to both `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import from_json

from dflash_local.chat.lark import literal
from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.http.errors import bad_request


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


_GUIDED = ("json", "choice", "regex", "grammar")

ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` is vLLM's: each chunk tells the usage so far."""

    include_usage: bounds.Flag | None = None
    continuous_usage_stats: bounds.Flag | None = None


class StructuredOutputs(BaseModel):
    """vLLM's ways to bind an answer, of which a request gives at most one: to a JSON schema, to one
    of several texts, to a regular expression, or to a grammar in Lark or GBNF."""

    json_schema: bounds.JsonObject | bounds.JsonText | None = Field(None, alias="json")
    json_object: bounds.Flag | None = None
    choice: (
        Annotated[bounds.ListOf[bounds.StopText], Field(min_length=1, max_length=1024)] | None
    ) = None
    regex: Annotated[str, Field(strict=True, min_length=1, max_length=1 << 16)] | None = None
    grammar: bounds.JsonText | None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; give one of them")
        return self

    @property
    def schema_of_answer(self) -> Any:
        """As `ChoicesRequest.schema_of_answer`."""
        given = self.json_schema
        if isinstance(given, str):
            try:
                given = from_json(given)
            except ValueError as error:
                raise bad_request(
                    f"the JSON schema is not valid JSON: {error}", param="structured_outputs"
                ) from None
        return given or self.json_object or None

    @property
    def bindings(self) -> dict[str, str]:
        """The keyword arguments of `Model.astream` that bind the answer's text."""
        if self.choice:
            return {"lark": f"start: {' | '.join(map(literal, self.choice))}"}
        if self.regex:
            return {"lark": f"start: {_pattern(self.regex)}"}
        if self.grammar:
            return {"grammar" if "::=" in self.grammar else "lark": self.grammar}
        return {}


def _pattern(regex: str) -> str:
    """A regular expression of the whole answer, as Lark writes it."""
    whole = regex.removeprefix("^")
    if whole.endswith("$") and not whole.endswith("\\$"):
        whole = whole[:-1]
    slashed = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], whole)
    return "/" + slashed.replace("\n", "\\n") + "/"


class ChoicesRequest(SamplingFields):
    """`n` are the answers to each prompt. `json_schema`, `n_predict`, `n_probs`,
    `timings_per_token` and `return_progress` are llama-server's, `structured_outputs`,
    `guided_...` and `prompt_logprobs` vLLM's."""

    USUAL_LIMIT: ClassVar[int | None] = None

    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    stream_options: StreamOptions | None = None
    n: bounds.Choices | None = None
    max_tokens: bounds.Predict | None = None
    response_format: ResponseFormat | None = None
    json_schema: bounds.JsonObject | None = None
    n_predict: bounds.Predict | None = None
    n_probs: bounds.Alternatives | None = None
    timings_per_token: bounds.Flag | None = None
    return_progress: bounds.Flag | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: bounds.Alternatives | None = None

    @model_validator(mode="before")
    @classmethod
    def _guided(cls, given: Any) -> Any:
        """vLLM's older names."""
        if not isinstance(given, dict):
            return given
        guided = {name: given.get(f"guided_{name}") for name in _GUIDED}
        guided = {name: value for name, value in guided.items() if value is not None}
        if guided and not given.get("structured_outputs"):
            return {**given, "structured_outputs": guided}
        return given

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; None: to the end of text or of the context."""
        if self.max_tokens is None and self.n_predict is not None:
            # With 0 llama.vim has a prompt read into the cache.
            return token_limit("n_predict", self.n_predict or 1)
        return token_limit(
            "max_tokens", self.USUAL_LIMIT if self.max_tokens is None else self.max_tokens
        )

    @property
    def bindings(self) -> dict[str, str]:
        """The keyword arguments of `Model.astream` that bind the answer's text."""
        return self.structured_outputs.bindings if self.structured_outputs else {}

    @property
    def schema_of_answer(self) -> Any:
        """The JSON schema that binds the answer; True for any JSON object, None for free text."""
        given = self.response_format
        if isinstance(given, JsonObjectFormat):
            return given.json_schema or True
        if isinstance(given, JsonSchemaFormat):
            return given.json_schema.json_schema or True
        if self.structured_outputs is not None and self.json_schema is None:
            return self.structured_outputs.schema_of_answer
        return self.json_schema

    def check(self) -> None:
        """Raises ApiError if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options are for streams; set stream", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs are for answers in one piece; leave stream out",
                param="prompt_logprobs",
            )
        if self.structured_outputs is not None and (self.response_format or self.json_schema):
            raise bad_request(
                "structured_outputs and a response format both bind the answer; give one of them",
                param="structured_outputs",
            )
