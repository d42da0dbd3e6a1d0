"""Types of request fields, each with its bounds, for the schemas of all APIs.

Numbers are strict: as with OpenAI, neither a text nor a boolean is a number. Every field has a
bound: values that no model could use are refused before any work. Fields that a schema does not
have are ignored, as pydantic does by default: clients send fields of other servers.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from dflash_local.server.http.errors import bad_request
from dflash_local.target_model.pixels import MOST_BYTES

T = TypeVar("T")

MAX_INT = 2**31 - 1
"""llama.cpp takes its counts as 32-bit integers."""

MAX_TEXT = 8 << 20
"""Characters of one text, far more than any context holds."""

MAX_CHOICES = 16
MAX_ENTRIES = 1024
MAX_MESSAGES = 10_000
MAX_STOPS = 64
MAX_TOOLS = 512

ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at the first bad item: an error for each would hold up all clients."""

MessagesOf = Annotated[ListOf[T], Field(max_length=MAX_MESSAGES)]
"""Messages, or their parts."""

SomeMessagesOf = Annotated[MessagesOf[T], Field(min_length=1)]
ToolsOf = Annotated[ListOf[T], Field(max_length=MAX_TOOLS)]
"""Tools, or calls of them."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Takes 5.0 for 5: some languages have one kind of number only."""

MaxTokens = Annotated[int, Field(strict=True, ge=1, le=MAX_INT), WHOLE]
Predict = Annotated[int, Field(strict=True, ge=-1, le=MAX_INT), WHOLE]
"""llama-server's `n_predict`: -1 goes on to the end of text, 0 reads the prompt into the cache."""

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INT), WHOLE]
LastN = Annotated[int, Field(strict=True, ge=-1, le=MAX_INT), WHOLE]
"""The number of tokens to look back at; -1 is the whole context."""

Milliseconds = Annotated[int, Field(strict=True, ge=0, le=24 * 3600 * 1000), WHOLE]
Choices = Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES), WHOLE]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1), WHOLE]
Logprobs = Annotated[int, Field(strict=True, ge=0, le=5), WHOLE]
TopLogprobs = Annotated[int, Field(strict=True, ge=0, le=20), WHOLE]
Alternatives = Annotated[int, Field(strict=True, ge=0, le=100), WHOLE]
"""llama-server's `n_probs`: the number to report with each token."""

TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]

Temperature = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
"""Beyond OpenAI's 2, as with llama-server and vLLM."""

Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
"""A factor or exponent of llama-server's samplers."""

Bias = Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]

Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
Picture = Annotated[str, Field(strict=True, max_length=4 * MOST_BYTES // 3 + 256)]
"""The file of a picture in base64, perhaps as a data URI."""

JsonText = Annotated[str, Field(strict=True, max_length=1 << 20)]
"""A text that is parsed, which holds up all other requests meanwhile."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
Label = Annotated[str, Field(strict=True, max_length=1024)]
"""A text that is passed on or ignored, such as `user`."""

StopText = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
StopTexts = Annotated[ListOf[StopText], Field(max_length=MAX_STOPS)]
TokenIds = Annotated[ListOf[TokenId], Field(max_length=4 << 20)]


def few(value: Any) -> Any:
    """pydantic would look at all items of an object before it counts them."""
    if isinstance(value, (dict, list)) and len(value) > MAX_ENTRIES:
        kind = "an object" if isinstance(value, dict) else "a list"
        raise ValueError(f"{kind} of {len(value)} entries; at most {MAX_ENTRIES} are taken")
    return value


Few = BeforeValidator(few)
LogitBias = Annotated[dict[Annotated[str, Field(max_length=256)], Bias], Few]
"""To what is added to logits: OpenAI's token ids, as texts, or llama-server's texts, whose tokens
are meant."""


class LoraScale(BaseModel):
    """The scale of an adapter, by its number in `/lora-adapters`."""

    id: Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]
    scale: Annotated[float, Field(ge=-10000, le=10000, allow_inf_nan=False)]


LoraScales = Annotated[ListOf[LoraScale], Few]


def lora_scales(given: Sequence[LoraScale]) -> dict[int, float]:
    """The same as the model's option `lora`."""
    return {each.id: each.scale for each in given}


JsonObject = dict[str, Any]
"""Bounded by the size and depth of the body, which are checked before it is read."""

BY_BEING_A_LIST = Discriminator(lambda value: "list" if isinstance(value, list) else "one")
"""Tells the member of a union with the tag "list" from the one with the tag "one"."""

TextOr = Annotated[Annotated[Text, Tag("one")] | Annotated[T, Tag("list")], BY_BEING_A_LIST]
"""A text or a list: `TextOr[list[Part]]`."""


def refuse(
    lines: Mapping[str, str], *, unless: Sequence[Any], codes: Mapping[str, str] | None = None
) -> Any:
    """A validator of a model, which refuses the fields of `lines` with these, unless they have one
    of these values. `codes`: those of errors that have one."""

    def check(given: Any) -> Any:
        if isinstance(given, dict):
            for name, line in lines.items():
                if given.get(name) not in unless:
                    raise bad_request(line, param=name, code=(codes or {}).get(name))
        return given

    return model_validator(mode="before")(check)


def field_of(value: Any, name: str) -> Any:
    """A field of a JSON object or of a model; None if there is none. For discriminators, which
    pydantic calls with either."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
