"""The keyword arguments of every generating method."""

import operator
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from dflash_local.chat.tool import Tool
from dflash_local.draft.shape import DraftShape
from dflash_local.errors import InputError
from dflash_local.fit.options import check_names, checked_scale
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.thinking import ThinkingBudget

_SAMPLING = {field.name for field in fields(SamplingParams)}
_GRAMMARS = {"grammar", "json_schema", "lark"}
_FLAGS = ("cache_prompt", "context_shift", "ignore_eos", "prompt_progress", "special")


class Options(TypedDict, total=False):
    """Keyword arguments of every generating method, together with those of `SamplingParams`.

    `max_tokens`: None generates up to an end of text or the end of the context; if it is not given,
    256, or in a chat `Model.answer_length`, where that is known. `stop`: texts that end the answer,
    which is cut before them. `stop_kept`: the same, but the answer is cut after them.
    `draft_width`: target rows per verify pass; 0 is plain decoding, "auto" the width that pays best
    on this machine, None the model's default. `draft_shape`: "chain", "tree" (if the model was
    loaded for trees) or "auto", whichever pays best.

    `cancel`: an event that, once set, ends the answer within one round. `queue_timeout`: seconds to
    wait for a slot before QueueTimeoutError is raised. `deadline_s`: seconds after the first token
    at which the answer ends, as `max_tokens` ends it. `cache_prompt` False computes the whole
    prompt again. `ignore_eos` forbids the end-of-text tokens, `bad_words` those of words that are
    one token, `allowed_token_ids` all but these; an answer that has all its grammar allows ends
    even so. `special` writes the names of control tokens into the text. `logit_bias` takes token
    ids, and texts, which stand for their tokens. `prompt_logprobs` reports log-probabilities of the
    prompt's tokens, with so many alternatives to each; nothing of the prompt then comes from the
    caches. `prompt_progress` has the first chunks tell the part of the prompt that is read. `lora`
    says how strongly adapters act, by their number in the load's `lora`, from 0; those that it
    leaves out do not. `id_slot` is the slot, from 0, that the request takes if that is free. With
    `context_shift` an answer goes on where the context is full: the first `n_keep` tokens stay (-1:
    the whole prompt), and of the rest the older half is left out, or `n_discard` tokens.

    `owner` names whom the request is for: drafts may be copied from recent texts of the same owner,
    too, and the beginning of a prompt is reused from texts of that owner alone. None: copied from
    its own text alone, and reused from texts without an owner.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    stop_kept: str | Sequence[str]
    draft_width: int | Literal["auto"] | None
    draft_shape: DraftShape | None
    cancel: threading.Event | None
    queue_timeout: float | None
    deadline_s: float | None
    cache_prompt: bool
    ignore_eos: bool
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    special: bool
    owner: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    logit_bias: Mapping[int | str, float]
    grammar: str | None
    json_schema: Mapping[str, Any] | bool | None
    lark: str | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_progress: bool
    min_tokens: int
    stop_token_ids: Sequence[int]
    thinking_budget: ThinkingBudget | None
    id_slot: int | None
    context_shift: bool
    n_keep: int
    n_discard: int
    lora: Mapping[int, float] | None


class ChatOptions(Options, total=False):
    """Keyword arguments of the chat methods. A `json_schema` binds the text after the thoughts;
    with `tools` that is such a text or a call.

    `tools`: functions that the model may call, in OpenAI's shape. `tool_choice`: "auto", "none",
    "required", or the name of the one that it must call. `chat_template_kwargs` go to the template,
    as in `{"enable_thinking": False}`. `reasoning_budget`: after so many tokens the thoughts are
    ended, with `reasoning_budget_message` before their end; None is the model's own. `begun` is the
    text and the tokens of an answer that was cut, which goes on: the chunks have the new part, the
    result's `content` and `reasoning` all of it.
    """

    tools: Sequence[Mapping[str, Any] | Tool] | None
    tool_choice: str
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_budget: int | None
    reasoning_budget_message: str | None
    begun: tuple[str, Sequence[int]] | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raises InputError for a name that is not an option, with the one that was meant, and for a
    text such as "no", which would count as true."""
    known = _SAMPLING | Options.__annotations__.keys()
    check_names(options, known, "a request", "see dflash_local.options.Options")
    for name in _FLAGS:
        if not isinstance(options.get(name, False), bool):
            raise InputError(f"{name} is {reprlib.repr(options[name])}; give True or False")


def names_a_grammar(options: Mapping[str, Any]) -> bool:
    """Whether the answer is to follow a grammar, which may take long to compile."""
    return any(options.get(name) is not None for name in _GRAMMARS)


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among `options`, not yet validated."""
    return SamplingParams(**{k: v for k, v in options.items() if k in _SAMPLING})


def texts_of(
    options: Mapping[str, Any], name: Literal["stop", "stop_kept", "bad_words"]
) -> tuple[str, ...]:
    """The texts of an option that has one, or several in a list. Raises InputError."""
    given = options.get(name) or ()
    texts = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{name} is {text!r}; give a text, or several in a list")
    return texts


def cancel_of(options: Mapping[str, Any]) -> threading.Event | None:
    """The caller's event. Raises InputError."""
    cancel: threading.Event | None = options.get("cancel")
    if not (cancel is None or callable(getattr(cancel, "is_set", None))):
        raise InputError(f"cancel is {cancel!r}; give a threading.Event")
    return cancel


def owner_of(options: Mapping[str, Any]) -> str | None:
    """The owner's name. Raises InputError."""
    owner: str | None = options.get("owner")
    if not (owner is None or isinstance(owner, str)):
        raise InputError(f"owner is {owner!r}; give a text, or None")
    if owner is not None and any("\ud800" <= character <= "\udfff" for character in owner):
        raise InputError(f"owner is {owner!r}, which has half a surrogate pair; give Unicode text")
    return owner


def lora_of(options: Mapping[str, Any], usual: Sequence[float]) -> tuple[float, ...]:
    """The scale of each adapter, `usual` where the request gives none. Raises InputError."""
    given = options.get("lora")
    if given is None:
        return tuple(usual)
    if not isinstance(given, Mapping):
        raise InputError(f"lora is {given!r}; give numbers of adapters and how strongly they act")
    scales = [0.0] * len(usual)
    for index, scale in given.items():
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(usual):
            known = f"0 to {len(usual) - 1}" if usual else "none"
            raise InputError(f"lora names adapter {index!r}; loaded are {known}")
        scales[index] = checked_scale(f"the scale of adapter {index}", scale)
    return tuple(scales)


def seconds_of(name: str, options: Mapping[str, Any]) -> float | None:
    """The option `name`, a time of 0 seconds or more, or None. Raises InputError."""
    value = options.get(name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and value >= 0):
        raise InputError(f"{name} is {value!r}; expected seconds, 0 or more, or None")
    return value


def token_ids(prompt: Iterable[int], name: str = "the prompt") -> list[int]:
    """A prompt of token ids, or what else `name` is, as a list. Raises InputError for anything
    else."""
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError("text without its encoding")
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise InputError(
            f"{name} is {reprlib.repr(prompt)}; give a text, or token ids in a list"
        ) from None
