"""Defaults of requests to a pair: sampling, and whether to think."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.hub.repository import repository_of
from dflash_local.pairs import registry
from dflash_local.pairs.entry import Entry
from dflash_local.sampling.params import SamplingParams

_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.penalty_last_n": "repeat_last_n",
    "general.sampling.xtc_probability": "xtc_probability",
    "general.sampling.xtc_threshold": "xtc_threshold",
}
"""What a model's file may say, by llama.cpp's names, and the options of that meaning."""

CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Of chats where neither a request nor the model says: llama.cpp's own. Greedy, a small model fills
a screen with one sentence. OpenAI's defaults (temperature 1, top_p 1) draw from the whole
vocabulary: from a small quantised model a misplaced token every few sentences."""

_SOURCE = "dflash_local.source"
"""The key by which the converter says where a drafter comes from."""


@dataclass(frozen=True)
class Defaults:
    """`sampling`: options of requests; `by_thinking`: of chats that say whether to think.
    `thinking`: what chats ask their template for; None asks for nothing. `answer_length`:
    `max_tokens` of chats; None if it is not known."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    by_thinking: Mapping[bool, Mapping[str, float]] = field(default_factory=dict)
    thinking: bool | None = None
    answer_length: int | None = None
    is_given: bool = False
    """Whether the user set `thinking`."""

    @property
    def for_chats(self) -> Mapping[str, float]:
        """The sampling of chats that do not say."""
        return {**CHAT_SAMPLING, **self.sampling}

    def lines(self) -> list[str]:
        """Lines for a user about them."""
        lines = []
        if self.thinking is False and not self.is_given:
            lines.append(
                "thinking is off: the drafter was trained without it; --thinking, or "
                "enable_thinking in a request, turns it on"
            )
        told = [f"{name} {value:.10g}" for name, value in self.sampling.items()]
        if self.answer_length is not None:
            told.append(f"answers of at most {self.answer_length} tokens in chats")
        if told:
            lines.append(f"if a request does not say: {', '.join(told)}")
        return lines


def defaults_of(
    target: GgufFile,
    draft: GgufFile | None,
    thinking: bool | None = None,
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> Defaults:
    """The defaults in the registry for these files, by their origin, or else in the target's file.
    `thinking` and `sampling` come first where they are given."""
    pair = pair_of(draft)
    known = pair or registry.of_target(repository_of(target.path) or str(target.path))
    is_given = thinking is not None
    if thinking is None and pair is not None:
        thinking = pair.thinking
    advised = _in_file(target)
    if known is None:
        return Defaults({**advised, **sampling}, {}, thinking, None, is_given)
    each_way = {
        each: {**(known.sampling_for(each) or advised), **sampling} for each in (None, True, False)
    }
    by_thinking = {each: each_way[each] for each in (True, False)}
    return Defaults(each_way[thinking], by_thinking, thinking, known.answer_length, is_given)


def draft_window_of(draft: GgufFile | None) -> int:
    """The number of tokens that drafts should look back at: as many as the drafter was trained on,
    0 for all where the registry does not know."""
    pair = pair_of(draft)
    return (pair and pair.training_length) or 0


def pair_of(draft: GgufFile | None) -> Entry | None:
    """The registry's entry for a drafter's file, by its origin."""
    if draft is None:
        return None
    source = draft.get(_SOURCE)
    found = registry.of_drafter(source) if isinstance(source, str) else None
    return found or registry.of_drafter(repository_of(draft.path) or str(draft.path))


def _in_file(target: GgufFile) -> dict[str, Any]:
    """The sampling that a file advises, without what no request may ask for."""
    found = {}
    for key, name in _SAMPLING_KEYS.items():
        value = target.get(key)
        if name == "top_k" and value == -1:  # as other programs have it
            value = 0
        with suppress(InputError):
            SamplingParams(**{name: value}).validate(target.n_vocab or 0)
            found[name] = value
    return found
