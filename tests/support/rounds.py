"""Plays a controller on a made-up machine and text, round by round, as the engine asks it.

The controller sees noisy times, some of them hiccups. It is judged by the times without noise, with
every change of rows, every draft and every injected row in them. A text's tokens, and the drafts
after each, do not depend on the rounds before.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import Chain, DraftShape, Shape, Tree
from dflash_local.engine.accept import accept
from dflash_local.engine.round import MOST_WITH_A_DRAFT
from drafted_text import BLOCK, Place, Text
from machines import Machine, noisy

N_NODES = 31
SHAPES: dict[str, list[Shape]] = {
    "chain": [Chain(BLOCK - 1)],
    "tree": [Tree(N_NODES, N_NODES + 1)],
    "auto": [Chain(BLOCK - 1), Tree(N_NODES, N_NODES + 1)],
}
_VOCABULARY = 1 << 20
_ON_THE_WAY = (0.35, 0.65)
"""Of the cost of new graphs, by the passes with them: a GPU records with the second what llama.cpp
has built with the first."""
_MOST_AHEAD = 16
"""Plain steps in one call, at most, as in the engine."""


class FixedPolicy:
    """A request of a fixed width."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def rate(self, _: Any) -> None:
        return None


class Fixed:
    """One width for all, the whole time; 0: plain decoding."""

    idle = 0

    def __init__(self, width: int, shape: DraftShape = "chain", n_draft: int = BLOCK - 1) -> None:
        self._width, self._shape, self._n_draft = width, SHAPES[shape][-1], n_draft

    def open(self, *_: object, **__: object) -> FixedPolicy:
        return FixedPolicy(self._shape)

    def n_drafts(self, policies: Sequence[Any], limits: Sequence[int]) -> list[int]:
        return [self._n_draft if self._width > 1 and limit > 0 else 0 for limit in limits]

    def judge(self, _: object, drafts: Sequence[Draft]) -> list[list[float]]:
        return [[1.0] * len(draft) for draft in drafts]

    def rows(self, chains: Sequence[list[float]]) -> list[int]:
        return [min(self._width, 1 + len(chain)) if chain else 1 for chain in chains]

    def observe(self, *_: object) -> None:
        """Learns nothing."""

    def observe_round(self, *_: object, **__: object) -> None:
        """Learns nothing."""


def emitted(draft: Draft, written: Sequence[int]) -> list[int]:
    """The tokens after a draft where the target writes these."""
    tokens = iter(written)
    return accept(draft, lambda _: next(tokens), lambda _: False).tokens


@dataclass
class Played:
    """The outcome: tokens, seconds, and of each round its rows, whether it drafted, and how many
    tokens of each sequence."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trees: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    policies: list[Any] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class _Answer:
    places: list[Place]
    n_tokens: int
    policy: Any
    done: int = 0
    pending: int = 0

    @property
    def remaining(self) -> int:
        return self.n_tokens - self.done

    def limit(self) -> int:
        shape = self.policy.shape
        return min(shape.limit(shape.n_nodes, self.remaining), self.remaining * N_NODES)


def play(
    machine: Machine,
    text: Text,
    controller: Any,
    lengths: Sequence[int],
    *,
    n_seqs: int = 1,
    shape: DraftShape = "chain",
    prompt: int = 200,
    seed: int = 0,
    late: bool = False,
) -> Played:
    """Answers of these lengths after prompts of `prompt` tokens, `n_seqs` at a time, a new one as
    soon as one has ended; ends when there are none to fill the batch. `late`: while an answer goes
    on, a round is observed once the next one has asked for drafts, where it may wait."""
    jitter = random.Random(seed)
    played = Played()
    waiting = list(enumerate(lengths))

    def begin() -> _Answer:
        i, n = waiting.pop(0)
        policy = controller.open(prompt * n_seqs, shapes=SHAPES[shape])
        played.policies.append(policy)
        return _Answer(text.answer(n, 1000 * seed + i), n, policy, pending=prompt)

    answers = [begin() for _ in range(n_seqs)]
    last: tuple[int, str] = (0, "")
    untold: list[Callable[[], None]] = []
    made = 0
    while True:
        policies = [answer.policy for answer in answers]
        limits = [answer.limit() for answer in answers]
        n_drafts = controller.n_drafts(policies, limits)
        while untold:
            untold.pop(0)()
        depth = sum(prompt + answer.done for answer in answers)
        slow = machine.slow if played.tokens >= machine.slow_at else 1.0
        drafts = [
            _draft(answer, n) if n else Draft.chain([])
            for answer, n in zip(answers, n_drafts, strict=True)
        ]
        n_drafting = sum(map(bool, n_drafts))
        n_steps, inject_ms, draft_ms, n_injected = 1, 0.0, 0.0, 0
        if n_drafting:
            chances = controller.judge(policies, drafts)
            widths = controller.rows(chances)
            drafts = [draft.clip(n - 1) for draft, n in zip(drafts, widths, strict=True)]
            backlogs = [a.pending for a, n in zip(answers, n_drafts, strict=True) if n]
            n_injected = sum(backlogs)
            inject_ms = machine.inject * sum(n for n in backlogs if n > MOST_WITH_A_DRAFT)
            draft_ms = (
                machine.drafts(n_drafting, max(n_drafts)) + machine.inject * n_injected - inject_ms
            )
        else:
            left = min(answer.remaining for answer in answers)
            n_steps = max(min(controller.idle + 1, _MOST_AHEAD, left), 1)
        kind = "tree" if any(d and not d.is_chain for d in drafts) else "chain"
        rows = n_seqs + sum(map(len, drafts))
        made = made + 1 if (rows, kind) == last else 0
        last = rows, kind
        steady_ms = machine.step(rows, depth, kind) + machine.after_draft * (n_drafting > 0)
        new_ms = 0.0
        for _ in range(n_steps):
            new_ms += machine.switch * (_ON_THE_WAY[made] if made < 2 else 0.0)
            made += 1
        made -= 1
        verify_ms = slow * (steady_ms + new_ms / n_steps)
        host_ms = machine.host + (machine.draft_host if n_drafting else 0.0)
        inject_ms, draft_ms = slow * inject_ms, slow * draft_ms
        played.seconds += 1e-3 * (inject_ms + draft_ms + n_steps * (verify_ms + host_ms))
        played.drafted += [n_drafting > 0] * n_steps
        played.lengths += [max(n_drafts)] * n_steps
        played.trees += [kind == "tree"] * n_steps
        played.rows += [rows] * n_steps
        for answer, draft, n in zip(answers, drafts, n_drafts, strict=True):
            n_tokens = n_steps
            if n:
                tokens = emitted(draft, answer.places[answer.done].written)
                n_tokens = min(len(tokens), answer.remaining)
                if draft:
                    untold.append(partial(controller.observe, answer.policy, draft, tokens))
            answer.pending = n_tokens if n else answer.pending + n_tokens
            answer.done += n_tokens
            played.tokens += n_tokens
        observe_round = partial(
            controller.observe_round,
            rows,
            kind,
            n_drafting,
            depth,
            1e-3 * draft_ms * noisy(jitter, machine.noise),
            1e-3 * verify_ms * noisy(jitter, machine.noise),
            1e-3 * host_ms * noisy(jitter, machine.noise),
            n_steps=n_steps,
            n_injected=n_injected,
            inject_s=1e-3 * inject_ms * noisy(jitter, machine.noise),
        )
        untold.append(observe_round)
        goes_on = all(answer.remaining > 0 for answer in answers)
        while untold and not (late and goes_on and n_drafting and controller.may_wait):
            untold.pop(0)()
        for i, answer in enumerate(answers):
            if answer.remaining <= 0:
                if not waiting:
                    return played
                answers[i] = begin()


def _draft(answer: _Answer, n: int) -> Draft:
    proposal = answer.places[answer.done].proposal
    if n < len(proposal):  # by a drafter that goes token by token
        proposal = Draft.chain(proposal.tokens[:n], proposal.logprobs[:n])
    policy = answer.policy
    return policy.shape.cut(proposal, _VOCABULARY, answer.limit(), answer.remaining, policy.rate)
