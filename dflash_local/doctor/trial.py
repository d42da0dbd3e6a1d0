"""Tries a loaded model on three built-in prompts: plainly, in whole blocks, and as it chooses."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_local.bench.prompts.case import Case, tokenized
from dflash_local.bench.prompts.prompt import built_in
from dflash_local.errors import InputError
from dflash_local.model import Model
from dflash_local.stats import Stats

N_TOKENS = 48
"""Of each answer. Three of them make some forty rounds, enough to tell 1 from 2 and from 4."""
_LONGEST_S = 20.0
"""Of each answer: a large model on a slow machine takes a few minutes in all."""


@dataclass(frozen=True)
class PairTrial:
    """`tokens_per_round` and `by_prompt` are of whole blocks, speeds in tokens/s over all prompts.

    `gains` are, prompt by prompt, the pair's speed as it chooses over that of plain decoding, and
    `gained_by` says by which drafts. `drafting` says why nothing was drafted; None if something
    was. `thinking_tokens_per_round` are those with the template's thinking on; None if it has no
    such switch. `unknown_marks` are marks of the chat template that are no tokens of the
    vocabulary. `largest_state` is the largest magnitude of a hidden state that the drafter read.
    `noise` says so if other work disturbed the measurement of the costs.
    """

    tokens_per_round: float
    by_prompt: tuple[float, ...]
    plain_speed: float
    speed: float
    gains: tuple[float, ...]
    gained_by: str
    drafting: str | None
    thinking_tokens_per_round: float | None
    unknown_marks: tuple[str, ...]
    largest_state: float | None
    noise: str | None = None

    @property
    def gain(self) -> float:
        """The speed as it chooses over that of plain decoding."""
        return self.speed / self.plain_speed if self.plain_speed else 0.0


def try_target(model: Model) -> float:
    """The speed of a target alone, in tokens/s. Raises InputError as `try_pair` does, BackendError
    if it cannot answer, as with damaged weights."""
    return Stats.sum(
        _answer(model, case, draft_width=0) for case in _usable_cases(model)
    ).tokens_per_second


def try_pair(model: Model) -> PairTrial:
    """Try a model with its drafter. Raises InputError if the model can read none of the prompts."""
    cases = _usable_cases(model)
    width = model.engine.max_width
    blocks = [_answer(model, case, draft_width=width, draft_shape="chain") for case in cases]
    largest = model.largest_hidden_state()
    if model.target.options.n_gpu_layers:  # a GPU may compile its programs when they are first used
        for case in cases:
            _answer(model, case)
    plain, chosen = zip(*(_in_turns(model, case) for case in cases), strict=True)
    thinking = None
    if thinks(model):
        again = _cases(model, thinking=True)
        answers = [_answer(model, case, draft_width=width, draft_shape="chain") for case in again]
        thinking = Stats.sum(answers).tokens_per_round
    all_chosen = Stats.sum(chosen)
    return PairTrial(
        tokens_per_round=Stats.sum(blocks).tokens_per_round,
        by_prompt=tuple(stats.tokens_per_round for stats in blocks),
        plain_speed=Stats.sum(plain).tokens_per_second,
        speed=all_chosen.tokens_per_second,
        gains=tuple(
            one.tokens_per_second / other.tokens_per_second
            for one, other in zip(chosen, plain, strict=True)
            if other.tokens_per_second
        ),
        gained_by=all_chosen.gained_by,
        drafting=None if all_chosen.drafted else chosen[-1].drafting,
        thinking_tokens_per_round=thinking,
        unknown_marks=tuple(unknown_marks(model)),
        largest_state=largest,
        noise=model.engine.controller.costs.noise if model.engine.controller else None,
    )


def thinks(model: Model) -> bool:
    """Whether the chat template can turn thinking on and off."""
    return "enable_thinking" in (model.target.chat_template or "")


def unknown_marks(model: Model) -> Iterator[str]:
    """Marks of a rendered chat that should be one token each, and are not."""
    if model.target.chat_template is None:
        return
    text = model.prepare_chat().render([{"role": "user", "content": "Hello"}], True)
    for mark in dict.fromkeys(re.findall(r"<\|[\w-]+\|>", text)):
        if not model.is_token(mark):
            yield mark


def _usable_cases(model: Model) -> Sequence[Case]:
    cases = _cases(model, thinking=False)
    if not cases:
        raise InputError(
            f"none of the built-in prompts fits the context of {model.n_ctx} tokens: give --ctx a "
            "larger number"
        )
    return cases


def _cases(model: Model, *, thinking: bool) -> Sequence[Case]:
    prompts = built_in(("chat", "code"), limit=2)
    cases, _ = tokenized(model, prompts, room=N_TOKENS, thinking=thinking)
    return cases[:3]


def _in_turns(model: Model, case: Case) -> tuple[Stats, Stats]:
    """Two plain answers, and two as the pair chooses, between them: other work that comes or goes
    is to slow down both alike."""
    first = _answer(model, case, draft_width=0)
    chosen = [_answer(model, case) for _ in range(2)]
    plain = Stats.sum([first, _answer(model, case, draft_width=0)])
    return plain, replace(Stats.sum(chosen), drafting=chosen[-1].drafting)


def _answer(model: Model, case: Case, **options: Any) -> Stats:
    model.forget()
    return model.generate(
        case.tokens, max_tokens=N_TOKENS, temperature=0.0, deadline_s=_LONGEST_S, **options
    ).stats
