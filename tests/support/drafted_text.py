"""Texts for simulated rounds: for every token of an answer, what a drafter proposes after it and
what the target writes. Some are recorded from pairs (`recordings/`), others drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from lab.replay.recorded import RecordedDrafts

BLOCK = 16
_FOLDER = Path(__file__).resolve().parent / "recordings"
_SHARES = np.array([0.5, 0.25, 0.125])
"""The shares of a made-up drafter's next candidates in the rest after its first one."""


@dataclass(frozen=True)
class Place:
    """A token of an answer: one of a recorded passage."""

    drafts: RecordedDrafts
    passage: int
    token: int

    @property
    def proposal(self) -> Draft:
        """The chain after it; candidate r of each position is the token r."""
        return _proposal(id(self.drafts), self.drafts, self.passage, self.token)

    @property
    def written(self) -> list[int]:
        """The target's text after it: of each position the candidate, or one more."""
        ranks: list[int] = self.drafts.ranks[self.passage, self.token].tolist()
        return [*ranks, 99]


@lru_cache(maxsize=100_000)
def _proposal(_: int, drafts: RecordedDrafts, passage: int, token: int) -> Draft:
    logprobs = np.ascontiguousarray(drafts.logprobs[passage, token])
    ids = np.tile(np.arange(logprobs.shape[1], dtype=np.int32), (len(logprobs), 1))
    # A drafter that gives no probabilities gives no candidates either.
    known = Candidates(ids, logprobs) if logprobs[:, 0].any() else None
    return Draft.chain(ids[:, 0].tolist(), logprobs[:, 0].tolist(), known)


class RecordingHash(RecordedDrafts):
    """Recordings by identity, as keys of a cache."""

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Text:
    """Passages of one kind, or of two in turn, in quarters of an answer. `length`: the tokens of a
    round of whole chains, by drawing passages more often; None: as they were recorded."""

    kinds: Sequence[RecordedDrafts]
    length: float | None = None

    def answer(self, n_tokens: int, seed: int) -> list[Place]:
        """The places of an answer, whatever is drafted in it."""
        rng = np.random.default_rng(seed)
        places: list[Place] = []
        while len(places) < n_tokens:
            quarter = 4 * len(places) // n_tokens
            drafts = self.kinds[quarter % len(self.kinds)]
            shares = drafts.weights(self.length) if self.length else None
            passage = int(rng.choice(drafts.n_passages, p=shares))
            places += [Place(drafts, passage, token) for token in range(drafts.n_tokens)]
        return places


def recorded(name: str) -> RecordedDrafts:
    """By the name of its file, or the shipped one."""
    known = RecordedDrafts.shipped() if not name else RecordedDrafts.read(_FOLDER / f"{name}.npz")
    return RecordingHash(known.logprobs, known.ranks)


def confident(
    start: float, fall: float, spread: float, over: float = 0.0, seed: int = 0
) -> RecordedDrafts:
    """Drafts of varying difficulty whose log-probabilities tell it: logits of the drafter's own
    probability begin at `start`, fall along the block, and promise `over` too much."""
    rng = np.random.default_rng(seed)
    n, n_drafts = 2048, BLOCK - 1
    logits = rng.normal(start, spread, (n, 1)) - fall * np.arange(n_drafts)
    logits = logits + rng.normal(0.0, 1.5, (n, n_drafts))
    return _drawn(1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(over - logits)), rng)


def geometric(chance: float, kind: str) -> RecordedDrafts:
    """Every draft survives with the same chance, of which log-probabilities say nothing: random
    ones, those of random weights, or zeros."""
    rng = np.random.default_rng(1)
    shape = 2048, BLOCK - 1
    known = {
        "random": -rng.uniform(0.0, 5.0, shape),
        "untrained": -8.0 - rng.random(shape),
        "zeros": np.zeros(shape),
    }
    return _drawn(np.exp(known[kind]), np.full(shape, chance), rng)


def _drawn(
    told: NDArray[np.float64], true: NDArray[np.float64], rng: np.random.Generator
) -> RecordedDrafts:
    """Passages whose first candidates have the probabilities `told`, and are right as often as
    `true` says; the others share the rest."""
    others = (1 - told)[..., None] * _SHARES
    chances = np.sort(np.concatenate([told[..., None], others], axis=-1), axis=-1)[..., ::-1]
    missed = rng.choice(4, told.shape, p=[*_SHARES, 1 - _SHARES.sum()]) + 1
    ranks = np.where(rng.random(told.shape) < true, 0, missed).astype(np.uint8)
    logprobs = np.log(np.maximum(chances, 1e-9)).astype(np.float32)
    if not told.min() < 1:
        logprobs[..., 0] = 0.0
    passages = -1, 32, BLOCK - 1
    return RecordingHash(logprobs.reshape(*passages, 4), ranks.reshape(passages))


@cache
def text(name: str) -> Text:
    """By its name in `TEXTS`."""
    code, prose = confident(3.2, 0.1, 1.2), confident(0.0, 0.15, 0.8)
    made = {
        "code": lambda: Text([code]),
        "prose": lambda: Text([prose]),
        "hopeless": lambda: Text([confident(-2.0, 0.1, 0.5)]),
        "switching": lambda: Text([code, prose]),
        "geometric 0.85": lambda: Text([geometric(0.85, "random")]),
        "untrained 0.85": lambda: Text([geometric(0.85, "untrained")]),
        "certain 0.6": lambda: Text([geometric(0.6, "zeros")]),
        "geometric 0.3": lambda: Text([geometric(0.3, "random")]),
        "over-confident": lambda: Text([confident(2.5, 0.1, 1.0, over=3.0)]),
        "shipped": lambda: Text([recorded("")]),
        "shipped 6.5": lambda: Text([recorded("")], 6.5),
        "shipped drawn": lambda: Text([recorded("drawn")]),
        "q4": lambda: Text([recorded("q4")]),
        "q4 drawn": lambda: Text([recorded("q4-drawn")]),
        "dspark": lambda: Text([recorded("dspark")]),
        "dflash2": lambda: Text([recorded("dflash2")]),
        "dflash2 5": lambda: Text([recorded("dflash2")], 5.0),
        "turning": lambda: Text([recorded("dspark"), confident(-1.0, 0.1, 0.8, seed=3)]),
    }
    return made[name]()


TEXTS = (
    "code", "prose", "hopeless", "switching", "geometric 0.85", "untrained 0.85", "certain 0.6",
    "geometric 0.3", "over-confident", "shipped", "shipped 6.5", "shipped drawn",
)  # fmt: skip
KEPT_OUT = "q4", "q4 drawn", "dspark", "dflash2", "dflash2 5", "turning"
"""Texts on which no rule or number was tried."""
