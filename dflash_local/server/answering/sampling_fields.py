"""The fields that all generating requests have, and the model's settings for them."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from dflash_local.model import Model
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import bad_request

LACKING: dict[str, tuple[Any, ...]] = {
    # llama-server's
    "adaptive_target": (-1,),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "tfs_z": (1,),
    # vLLM's
    "chat_template": ("",),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of other servers that this one lacks, with the values that change nothing."""

N_SEEDS = 2**32 - 1
_LEAST_TOP_P = 1e-6
_BAN = -100

_TopK = Annotated[
    int,
    Field(strict=True, ge=-1, le=bounds.MAX_INT),
    AfterValidator(lambda k: max(k, 0)),
    bounds.WHOLE,
]
_TopP = Annotated[bounds.Probability, AfterValidator(lambda p: max(p, _LEAST_TOP_P))]
"""OpenAI's 0 is the likeliest token only."""

_DryBase = Annotated[bounds.Factor, AfterValidator(lambda base: base if base >= 1 else 1.75)]
"""Below 1 llama-server takes its default."""

_Sigma = Annotated[float, Field(strict=True, ge=-1, le=100, allow_inf_nan=False)]
_Breaker = Annotated[str, Field(strict=True, min_length=1, max_length=40)]
_Breakers = Annotated[list[_Breaker], Field(max_length=16)]
_Grammar = Annotated[str, Field(strict=True, max_length=1 << 20)]

Stop = Annotated[
    Annotated[bounds.StopText, Tag("one")] | Annotated[bounds.StopTexts, Tag("list")],
    bounds.BY_BEING_A_LIST,
]
"""One text or several. OpenAI takes at most 4, but editors send more."""

DraftWidth = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[bounds.Count, Tag("rows")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "rows"),
]


class SamplingFields(BaseModel):
    """Fields of sampling and stopping: OpenAI's, and llama-server's that editors send.

    `seed` -1 draws one, as leaving it out does. `repetition_penalty` is `repeat_penalty`; `id_slot`
    is the slot that is taken if it is free; -1 is any. With --context-shift, `n_keep` and
    `n_discard` name the part of a text that stays when it has filled the context. `min_tokens`,
    `stop_token_ids`, `allowed_token_ids` and `bad_words` are vLLM's. This project's own
    `draft_width` is the verify width: the tokens that a verify pass checks, 0 for plain decoding,
    "auto" for the width that pays best; by default the server's. Unknown fields are told in the log
    and ignored, or refused with --strict; those of other servers that this one lacks are refused
    where they are switched on, so that nobody waits for the effect of a setting that has none.
    """

    model_config = ConfigDict(extra="allow")
    """Unknown fields are kept, to be told of."""

    temperature: bounds.Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    min_p: bounds.Probability | None = None
    seed: bounds.Seed | None = None
    presence_penalty: bounds.Penalty | None = None
    frequency_penalty: bounds.Penalty | None = None
    repeat_penalty: bounds.Factor | None = None
    repetition_penalty: bounds.Factor | None = None
    repeat_last_n: bounds.LastN | None = None
    dry_multiplier: bounds.Factor | None = None
    dry_base: _DryBase | None = None
    dry_allowed_length: bounds.Count | None = None
    dry_penalty_last_n: bounds.LastN | None = None
    dry_sequence_breakers: _Breakers | None = None
    top_n_sigma: _Sigma | None = None
    typical_p: _TopP | None = None
    xtc_probability: bounds.Probability | None = None
    xtc_threshold: bounds.Probability | None = None
    dynatemp_range: bounds.Factor | None = None
    dynatemp_exponent: bounds.Factor | None = None
    logit_bias: bounds.LogitBias | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bounds.Flag | None = None
    ignore_eos: bounds.Flag | None = None
    min_tokens: bounds.Count | None = None
    stop_token_ids: Annotated[bounds.TokenIds, Field(max_length=bounds.MAX_STOPS)] | None = None
    allowed_token_ids: Annotated[bounds.TokenIds, Field(max_length=1 << 18)] | None = None
    bad_words: bounds.StopTexts | None = None
    cache_prompt: bounds.Flag | None = None
    t_max_predict_ms: bounds.Milliseconds | None = None
    grammar: _Grammar | None = None
    lora: bounds.LoraScales | None = None
    id_slot: bounds.Predict | None = None
    n_keep: bounds.Predict | None = None
    n_discard: bounds.Count | None = None
    draft_width: DraftWidth | None = None

    @model_validator(mode="before")
    @classmethod
    def _lacking(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, off in LACKING.items():
                value = given.get(name)
                if name not in cls.model_fields and value is not None and value not in off:
                    raise bad_request(
                        f"{name} is {str(value)[:60]!r}, but this server has no such setting; "
                        "leave it out",
                        param=name,
                    )
        return given

    @property
    def stop_texts(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_AS_THEY_ARE = SamplingFields.model_fields.keys() - {
    "repeat_penalty", "repetition_penalty", "seed", "logit_bias", "stop",
    "include_stop_str_in_output", "ignore_eos", "cache_prompt", "t_max_predict_ms", "grammar",
    "lora", "id_slot",
}  # fmt: skip
"""Fields that the model takes under the same name, whatever their value."""


def sampling_options(fields: SamplingFields) -> dict[str, Any]:
    """The settings in `fields`, as keyword arguments of `Model.astream`."""
    seed, slot, ms = fields.seed, fields.id_slot, fields.t_max_predict_ms
    stops = None if fields.stop is None else fields.stop_texts
    others = {
        "repeat_penalty": fields.repeat_penalty or fields.repetition_penalty or None,
        "seed": None if seed in (None, -1) else seed % N_SEEDS,
        "logit_bias": _biases(fields.logit_bias) if fields.logit_bias else None,
        "stop_kept" if fields.include_stop_str_in_output else "stop": stops,
        "ignore_eos": fields.ignore_eos or None,
        "cache_prompt": False if fields.cache_prompt is False else None,
        "deadline_s": ms / 1000 if ms else None,
        "grammar": fields.grammar or None,
        "id_slot": None if slot is None or slot < 0 else slot,
        "lora": None if fields.lora is None else bounds.lora_scales(fields.lora),
    }
    as_they_are = fields.model_dump(include=_AS_THEY_ARE, exclude_none=True)
    return as_they_are | {name: value for name, value in others.items() if value is not None}


def usual_sampling(model: Model) -> dict[str, Any]:
    """The sampling of `model` where a request does not say."""
    return {**CHAT_SAMPLING, **model.sampling}


def token_limit(name: str, given: int | None) -> int | None:
    """`max_tokens` as the model takes it: -1, as clients of local servers send, is no limit."""
    if given == 0:
        raise bad_request(f"{name} is 0; give at least 1, or leave it out", param=name)
    return None if given == -1 else given


def _biases(given: dict[str, float]) -> dict[int | str, float]:
    """-100 forbids a token, as with OpenAI; any other value is added to its logit."""
    return {
        int(key) if key.isascii() and key.isdigit() else key: -math.inf if bias <= _BAN else bias
        for key, bias in given.items()
    }
