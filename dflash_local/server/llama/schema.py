"""Requests of llama-server's own API: `/completion` and `/infill`.

Fields that only say how llama-server should go about it are ignored: slots, batches, adapters, the
order of samplers. A sampler that there is not here is refused where it is switched on, so that
nobody waits for the effect of a setting that has none.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field, ValidationInfo, field_validator

from dflash_local.server.answering.bounds import (
    MAX_CHOICES,
    Choices,
    Count,
    Factor,
    Flag,
    JsonObject,
    Label,
    Predict,
    Probability,
    Text,
    TokenId,
)
from dflash_local.server.answering.sampling_fields import SamplingFields

_Piece = Text | TokenId
_Pieces = Annotated[list[_Piece], Field(max_length=4 << 20)]
_Alternatives = Annotated[int, Field(strict=True, ge=0, le=100)]
_ResponseField = Annotated[str, Field(strict=True, max_length=256)]

_ABSENT = {
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "mirostat": 0,
    "post_sampling_probs": False,
    "typical_p": 1,
    "xtc_probability": 0,
}
"""Samplers that there are not here, with the value that switches each off."""


class LlamaRequest(SamplingFields):
    """What `/completion` and `/infill` have in common, under llama-server's names and defaults."""

    model: Label | None = None
    stream: Flag = False
    n_predict: Predict = Field(
        default=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
        description="Tokens of the answer at most; -1 is as many as the context holds, and 0 none: "
        "the prompt is read into the cache.",
    )
    n_cmpl: Choices = Field(
        default=1,
        validation_alias=AliasChoices("n_cmpl", "n"),
        description="Answers to each prompt; more than one are answered as a list.",
    )
    n_probs: _Alternatives = Field(
        default=0,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="How many alternatives to report with each token.",
    )
    n_indent: Count = Field(
        default=0,
        description="The answer ends before a line indented by fewer characters than that.",
    )
    json_schema: JsonObject | Flag | None = None
    return_tokens: Flag = False
    timings_per_token: Flag = False
    response_fields: Annotated[list[_ResponseField], Field(max_length=256)] | None = Field(
        default=None,
        description="Answer these fields alone; `timings/prompt_n` is one of an inner object.",
    )
    dry_multiplier: Factor = 0.0
    dynatemp_range: Factor = 0.0
    mirostat: Count = 0
    post_sampling_probs: Flag = False
    typical_p: Factor = 1.0
    xtc_probability: Probability = 0.0

    @field_validator("*", mode="before")
    @classmethod
    def _null(cls, value: Any, info: ValidationInfo) -> Any:
        """llama-server reads null as a field that is not there."""
        if value is not None or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        return value if field.is_required() else field.get_default(call_default_factory=True)

    @field_validator("t_max_predict_ms", mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        return 0 if value == -1 else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """`[[id, bias], ...]` and `false` for a token that is forbidden, beside OpenAI's form."""
        if isinstance(value, list) and all(isinstance(x, list) and len(x) == 2 for x in value):
            value = {str(token): bias for token, bias in value}
        if isinstance(value, dict):
            value = {token: -100 if bias is False else bias for token, bias in value.items()}
        return value

    @field_validator(*_ABSENT)
    @classmethod
    def _absent(cls, value: Any, info: ValidationInfo) -> Any:
        off = _ABSENT[str(info.field_name)]
        if value != off:
            raise ValueError(f"there is no such sampler here; leave it out, or give {off}")
        return value


class CompletionRequest(LlamaRequest):
    """A prompt is a text, token ids, or both mixed in a list. A list of texts alone, or one that
    holds lists, is several prompts."""

    prompt: Text | Annotated[list[_Piece | _Pieces], Field(max_length=4 << 20)]

    @property
    def prompts(self) -> list[str | list[str | int]]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if any(isinstance(piece, int) for piece in given):
            return [[piece for piece in given if not isinstance(piece, list)]]
        return [piece for piece in given if not isinstance(piece, int)]

    @field_validator("prompt")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, list):
            kinds = {type(piece) for piece in value}
            if {list, int} <= kinds:
                raise ValueError("ids beside lists; give one prompt, or several each in a list")
            if int not in kinds and len(value) > MAX_CHOICES:
                raise ValueError(f"{len(value)} prompts; give at most {MAX_CHOICES}")
            if not value:
                raise ValueError("the prompt is empty; give a text, or token ids in a list")
        return value


class OtherText(BaseModel):
    """A piece of another file, or of another place in this one."""

    text: Text
    filename: Label = "tmp"


class InfillRequest(LlamaRequest):
    """`prompt` is what stands in the gap already. `input_extra` is read before the gap; the first
    of them are left out where the context cannot hold all.

    Without a temperature the answer is the likeliest one, and further ones are drawn at 0.8.
    """

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[OtherText], Field(max_length=1024)] = Field(default_factory=list)
    prompt: Text = ""


class TokenizeRequest(BaseModel):
    """llama-server's defaults: nothing is put before the text, and special tokens are read."""

    model: Label | None = None
    content: Text | _Pieces = ""
    add_special: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeRequest(BaseModel):
    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=4 << 20)] = Field(default_factory=list)
