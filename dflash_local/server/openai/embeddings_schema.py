"""Requests to the routes of embeddings: https://platform.openai.com/docs/api-reference/embeddings,
with llama-server's further fields."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from dflash_local.server.answering import bounds
from dflash_local.server.answering.embedding import MAX_TEXTS

_Pieces = Annotated[
    bounds.ListOf[bounds.Text | bounds.TokenId], Field(min_length=1, max_length=4 << 20)
]


class TextPart(BaseModel):
    """A part of a content; a model of vectors reads nothing but text."""

    type: Literal["text"]
    text: bounds.Text


class ContentInput(BaseModel):
    """A text in parts, as messages have it."""

    content: Annotated[bounds.ListOf[TextPart], Field(min_length=1, max_length=MAX_TEXTS)]


class PromptInput(BaseModel):
    """A text in llama-server's form."""

    prompt_string: bounds.Text


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "pieces"
    if isinstance(value, str):
        return "text"
    return "content" if bounds.field_of(value, "content") is not None else "prompt"


_Input = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[_Pieces, Tag("pieces")]
    | Annotated[ContentInput, Tag("content")]
    | Annotated[PromptInput, Tag("prompt")],
    Discriminator(_kind),
]


def _several(given: Any) -> Any:
    """A list that has numbers is one text."""
    if isinstance(given, list) and not any(isinstance(piece, int) for piece in given):
        return given
    return [given]


Inputs = Annotated[
    bounds.ListOf[_Input],
    Field(min_length=1, max_length=MAX_TEXTS),
    BeforeValidator(_several, json_schema_input_type=_Input | list[_Input]),
]
"""A text, token ids, both in a row, or several of these."""


class EmbeddingsRequest(BaseModel):
    """Texts to make vectors of."""

    model_config = ConfigDict(extra="allow")

    model: bounds.Label | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(strict=True, ge=1, le=bounds.MAX_INT)] | None = Field(
        default=None,
        description="Leave out the numbers of a vector behind these, for models whose first "
        "numbers are a shorter vector.",
    )
    embd_normalize: Annotated[int, Field(strict=True, ge=-1, le=64)] = Field(
        default=2,
        description="Divide a vector by its norm of this order: 2 is the euclidean one, 0 the "
        "largest number over 32760, -1 none.",
    )

    @property
    def texts(self) -> list[str | Sequence[str | int]]:
        """The inputs as models take them."""
        return [_text(given) for given in self.input]


def _text(given: str | list[str | int] | ContentInput | PromptInput) -> str | list[str | int]:
    if isinstance(given, PromptInput):
        return given.prompt_string
    if isinstance(given, ContentInput):
        return "".join(part.text for part in given.content)
    return given
