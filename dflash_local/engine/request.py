"""A request for an answer, in token ids."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from dflash_local.draft.shape import DraftShape
from dflash_local.errors import InputError, PromptTooLongError
from dflash_local.sampling.grammar import Constraint
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.images import Image, spoken, without_images


def _never(_token: int) -> bool:
    return False


@dataclass(frozen=True)
class Request:
    """A prompt, and how to answer it.

    `draft_width`: target rows of a verify pass, the anchor included. 0 and 1 are plain decoding,
    "auto" is the width that pays best, round by round. `draft_shape`: the shape of its drafts, if
    target and drafter can do more than chains. Without `cache_prompt` nothing of the prompt comes
    from the caches. `on_token` gets every token except an end of text, in order; if it returns
    True, generation ends. `constraint` is the grammar of `sampling` at its beginning, for this
    request alone; None: it is made when the request begins. `owner`: it may copy from earlier texts
    of that owner, whose later requests may copy from it; None: it copies from its own text alone.
    `prompt_logprobs`: the number of alternatives to report with each token of the prompt; None:
    nothing is reported of it. `lora`: how strongly each of the target's adapters acts; None: as
    loaded. `id_slot`: the slot that it takes if that is free. `images`: those that the prompt's
    negative ids stand for, by the place of each one's first id. With `n_keep`, an answer goes on
    where the context is full: see `Sequence.shift`.
    """

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    draft_width: int | Literal["auto"] = 0
    on_token: Callable[[int], bool] = _never
    cache_prompt: bool = True
    constraint: Constraint | None = None
    draft_shape: DraftShape = "chain"
    owner: str | None = None
    prompt_logprobs: int | None = None
    lora: tuple[float, ...] | None = None
    id_slot: int | None = None
    n_keep: int | None = None
    n_discard: int = 0
    images: Mapping[int, Image] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        return self.draft_width == "auto" or self.draft_width > 1

    @cached_property
    def spoken(self) -> list[int]:
        """The prompt, with a token in place of each id that stands for a part of an image."""
        return spoken(self.prompt) if self.images else self.prompt

    @property
    def n_cells(self) -> int:
        """Cells of the prompt: its tokens, and those of images beyond their positions."""
        return len(self.prompt) + sum(image.n_more for image in self.images.values())

    def check(self, n_vocab: int, n_ctx: int, max_width: int, limit: str) -> None:
        """Raises InputError or PromptTooLongError if it cannot begin.

        `max_width` is the widest verify pass; 0 without a drafter. `limit` gives the reason.
        """
        if not self.prompt:
            raise InputError("the prompt is empty; give at least one token")
        for token in without_images(self.prompt) if self.images else self.prompt:
            if not 0 <= token < n_vocab:
                raise InputError(f"token id {token} of the prompt is not in 0 to {n_vocab - 1}")
        if self.images and self.prompt[-1] < 0:
            raise InputError("the prompt ends with an image; let some text follow")
        if self.images and self.prompt_logprobs is not None:
            raise InputError("log-probabilities of a prompt with images are not reported")
        n = self.n_cells
        if n >= n_ctx:
            raise PromptTooLongError(
                f"the prompt has {n} tokens, the context holds {n_ctx} with at least one for the "
                "answer; shorten the prompt or load with a larger n_ctx",
                n,
                n_ctx,
            )
        if self.max_tokens is not None and not _is_count(self.max_tokens, 1):
            raise InputError(
                f"max_tokens is {self.max_tokens!r}; expected a whole number, 1 or more"
            )
        least, most = self.sampling.min_tokens, self.max_tokens
        if most is not None and least > most:
            raise InputError(f"min_tokens is {least}, but max_tokens {most}; give at most as many")
        for name, value, low in (
            ("id_slot", self.id_slot, 0),
            ("n_keep", self.n_keep, -1),
            ("n_discard", self.n_discard, 0),
        ):
            if value is not None and not _is_count(value, low):
                raise InputError(f"{name} is {value!r}; expected a whole number, {low} or more")
        told = self.prompt_logprobs
        if told is not None and not (_is_count(told, 0) and told <= n_vocab):
            raise InputError(f"prompt_logprobs is {told!r}; expected 0 to {n_vocab}, or None")
        width = self.draft_width
        if width == "auto":
            return
        if not _is_count(width, 0):
            raise InputError(
                f'draft_width is {width!r}; expected a whole number, 0 or more, or "auto"'
            )
        if self.drafts and not max_width:
            raise InputError(
                f"draft_width is {width}, but there is no drafter; "
                "load one with draft=, or set draft_width to 0"
            )
        if width > max(max_width, 1):
            raise InputError(f"draft_width is {width}; {limit} allows at most {max_width}")


def _is_count(value: object, least: int) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and value >= least  # type: ignore[operator]
