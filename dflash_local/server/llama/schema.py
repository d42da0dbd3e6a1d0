"""Requests of llama-server's own API: `/completion`, `/infill`, `/tokenize`, `/detokenize`.

Fields that only tell llama-server how to work are ignored: slots, batches, adapters, the order of
samplers.
"""

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field, ValidationInfo, field_validator

from dflash_local.chat.pictures import MOST_IMAGES
from dflash_local.server.answering import bounds
from dflash_local.server.answering.infill_prompt import OtherText
from dflash_local.server.answering.sampling_fields import SamplingFields

_Piece = bounds.Text | bounds.TokenId
_Pieces = Annotated[bounds.ListOf[_Piece], Field(max_length=4 << 20)]
_MixedText = bounds.TextOr[_Pieces]
_ResponseField = Annotated[str, Field(strict=True, max_length=256)]


class LlamaRequest(SamplingFields):
    """Fields of both `/completion` and `/infill`, under llama-server's names and defaults."""

    model: bounds.Label | None = None
    stream: bounds.Flag = False
    n_predict: bounds.Predict = Field(
        default=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
        description="The most tokens of the answer; -1 is as many as the context holds, and 0 "
        "none: the prompt is read into the cache.",
    )
    n_cmpl: bounds.Choices = Field(
        default=1,
        validation_alias=AliasChoices("n_cmpl", "n"),
        description="Answers to each prompt; more than one are returned as a list.",
    )
    n_probs: bounds.Alternatives = Field(
        default=0,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="How many alternatives to report with each token.",
    )
    post_sampling_probs: bounds.Flag = Field(
        default=False,
        description="Report with `n_probs` the chances from which each token was drawn, after "
        "top_k, top_p, min_p and temperature, and not the model's own.",
    )
    n_indent: bounds.Count = Field(
        default=0, description="The answer ends before a line that is indented by fewer characters."
    )
    json_schema: bounds.JsonObject | bounds.Flag | None = None
    return_tokens: bounds.Flag = False
    timings_per_token: bounds.Flag = False
    return_progress: bounds.Flag = Field(
        default=False,
        description="A stream begins with how much of the prompt is read, again and again.",
    )
    response_fields: Annotated[bounds.ListOf[_ResponseField], Field(max_length=256)] | None = Field(
        default=None,
        description="Return these fields only; `timings/prompt_n` is one of an inner object.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _null(cls, value: Any, info: ValidationInfo) -> Any:
        """llama-server reads null as a missing field."""
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
        """Besides OpenAI's form `[[id, bias], ...]`, and `false` for a token that is forbidden."""
        value = bounds.few(value)
        if isinstance(value, list) and all(isinstance(x, list) and len(x) == 2 for x in value):
            value = {str(token): bias for token, bias in value}
        if isinstance(value, dict):
            value = {token: -100 if bias is False else bias for token, bias in value.items()}
        return value


class MediaPrompt(BaseModel):
    """A text with a marker in place of each picture, `<__media__>`, and their files in base64."""

    prompt_string: bounds.Text
    multimodal_data: Annotated[bounds.ListOf[bounds.Picture], Field(max_length=MOST_IMAGES)]


def _text_in(prompt: Any) -> Any:
    """The text of a prompt that is sent as an object, but without pictures."""
    if not isinstance(prompt, dict) or "prompt_string" not in prompt:
        return prompt
    return prompt if prompt.get("multimodal_data") else prompt["prompt_string"]


class CompletionRequest(LlamaRequest):
    """A prompt is a text, token ids, or both mixed in a list, or an object with a text as
    `prompt_string`. A list of texts only, or one that holds lists, is several prompts."""

    prompt: (
        bounds.Text
        | MediaPrompt
        | Annotated[bounds.ListOf[_Piece | _Pieces | MediaPrompt], Field(max_length=4 << 20)]
    )

    @property
    def prompts(self) -> list[list[str | int] | MediaPrompt]:
        given = self.prompt
        if isinstance(given, str):
            return [[given]]
        if isinstance(given, MediaPrompt):
            return [given]
        if any(isinstance(piece, int) for piece in given):
            return [[piece for piece in given if isinstance(piece, str | int)]]
        return [[piece] if isinstance(piece, str | int) else piece for piece in given]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        value = [_text_in(piece) for piece in value] if isinstance(value, list) else _text_in(value)
        # Before each of them is read, which takes a while for thousands.
        if isinstance(value, list):
            kinds = {type(piece) for piece in value}
            if int in kinds and not kinds.isdisjoint((list, dict)):
                raise ValueError("ids next to lists; give one prompt, or several each in a list")
            if int not in kinds and len(value) > bounds.MAX_CHOICES:
                raise ValueError(f"{len(value)} prompts; give at most {bounds.MAX_CHOICES}")
            if not value:
                raise ValueError("the prompt is empty; give a text, or token ids in a list")
        return value


class InfillRequest(LlamaRequest):
    """`prompt` stands in the gap already. It, the prefix and the suffix are texts, or lists of
    token ids and texts, which are read as the text that they make. `input_extra` is read before the
    gap; where the context cannot hold all of it, the first texts are left out.

    Without a temperature the answer is the likeliest one, and further ones are drawn at 0.8.
    """

    input_prefix: _MixedText
    input_suffix: _MixedText
    input_extra: Annotated[bounds.ListOf[OtherText], Field(max_length=1024)] = Field(
        default_factory=list
    )
    prompt: _MixedText = ""


class TokenizeRequest(BaseModel):
    """llama-server's defaults: nothing is put before the text, and special tokens are read."""

    model: bounds.Label | None = None
    content: bounds.Text | _Pieces = ""
    add_special: bounds.Flag = False
    parse_special: bounds.Flag = True
    with_pieces: bounds.Flag = False

    @property
    def pieces(self) -> list[str | int]:
        return [self.content] if isinstance(self.content, str) else self.content


class DetokenizeRequest(BaseModel):
    model: bounds.Label | None = None
    tokens: bounds.TokenIds = Field(default_factory=list)
