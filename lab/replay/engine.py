"""An engine whose answers are given texts. It does all the work of a real one.

Each pass of the target is computed and each token drawn from its logits, as always. Then the token
of the given text takes the place of the drawn one: it is emitted, it decides which drafts are
accepted, and the caches, the features and the drafter go on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest, WrappedDrafter
from dflash_local.engine import sequence
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.errors import BackendError, InputError
from dflash_local.target_model.target import Target
from lab.replay.drafts import ReplayedDrafts, Walk

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""The tokens that shall come out, by those of the prompt."""


@dataclass(eq=False)
class ReplaySequence(sequence.Sequence):
    """`answer` comes out, whatever is drawn. `walk` leads it through recorded drafts, if any."""

    answer: Sequence[int] = field(kw_only=True)
    walk: Walk | None = field(kw_only=True)

    def draw(self, target: Target, output_row: int) -> int:
        super().draw(target, output_row)
        return self.answer[len(self.tokens)]

    def upcoming(self, n: int) -> list[int]:
        return list(self.answer[len(self.tokens) :][:n])

    def emit(self, token: int, *, ends_text: bool) -> bool:
        if token != self.answer[len(self.tokens)]:
            raise BackendError("a replay emitted another token than the one given")
        return super().emit(token, ends_text=ends_text)


class ReplayedDrafter(WrappedDrafter):
    """A drafter whose drafts are as long as they are asked for: with random weights it is sure of
    nothing, and one that makes a token at a time would stop after the first."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        super().begin([replace(request, whole=True) for request in requests])


class ReplayEngine(Engine):
    """Takes the requests whose answers it knows."""

    def __init__(
        self, engine: Engine, answers: Answers, drafts: ReplayedDrafts | None = None
    ) -> None:
        """Over the models of `engine`, which must not be used any more. `answers` may grow later.
        `drafts` take the place of the drafter's own."""
        self._answers = answers
        self._drafts = drafts
        self._by_slot: dict[int, ReplaySequence] = {}
        self._walks: dict[tuple[tuple[int, ...], int | None], Walk] = {}
        drafter = engine.drafter
        super().__init__(
            engine.target,
            ReplayedDrafter(drafter, self._mark) if drafter and drafts else drafter,
            len(engine.slots),
            engine.controller,
            copies=engine.copies,
            learns=False,
        )
        self.usual_shape = engine.usual_shape
        self.plain_because = engine.plain_because
        self.copy_from = engine.copy_from

    def begin(self, request: Request) -> ReplaySequence:
        """As `Engine.begin`. The answer ends where the given text does. Raises InputError for a
        prompt without one, too."""
        answer = self._answers.get(tuple(request.prompt))
        if not answer:
            raise InputError("a replay has no answer to this prompt; give it one")
        n = len(answer)
        most = n if request.max_tokens is None else min(request.max_tokens, n)
        begun = super().begin(replace(request, max_tokens=most))
        state = {each.name: getattr(begun, each.name) for each in fields(begun)}
        replayed = ReplaySequence(**state, answer=answer, walk=self._walk(request, n))
        self._by_slot[replayed.slot.seq] = replayed
        return replayed

    def resume(self, sequence: sequence.Sequence) -> None:
        super().resume(sequence)
        assert isinstance(sequence, ReplaySequence), "`begin` makes no others"
        self._by_slot[sequence.slot.seq] = sequence

    def _walk(self, request: Request, n_tokens: int) -> Walk | None:
        """The same for the same request in all variants, so that all find it as hard to draft."""
        if self._drafts is None:
            return None
        asked = tuple(request.prompt), request.sampling.seed
        if asked not in self._walks:
            self._walks[asked] = self._drafts.begin(n_tokens)
        return replace(self._walks[asked])

    def _mark(self, request: DraftRequest, draft: Draft) -> Draft:
        drafting = self._by_slot[request.seq]
        assert self._drafts is not None and drafting.walk is not None, "else nothing is marked"
        return self._drafts.mark(draft, drafting.answer, len(drafting.tokens), drafting.walk)
