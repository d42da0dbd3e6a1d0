"""A drafter before and after, by the engine itself: tokens per round and tokens/s, in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from dflash_local.draft.drafter import Drafter
from dflash_local.draft.shape import ShapeName
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.sampling.params import SamplingParams
from dflash_local.stats import Stats
from dflash_local.target_model.target import Target

TEMPERATURES = (0.0, 0.8)
OWN, BUILT_IN = "held out", "built-in"
LEAST_GAIN = 1.02
"""Tokens per round on held-out prompts of the user's kind, after over before. Less is within the
noise of some dozens of answers."""
MOST_LOSS = 0.97
"""The same on built-in prompts."""


@dataclass(frozen=True)
class Row:
    """Prompts of one kind at one temperature, before and after, drafted in one shape. `ratio` is
    that of the tokens per round."""

    prompts: str
    shape: ShapeName
    temperature: float
    n_prompts: int
    length_before: float
    length_after: float
    speed_before: float
    speed_after: float

    @property
    def ratio(self) -> float:
        return self.length_after / self.length_before if self.length_before else 0.0

    @property
    def gain(self) -> float:
        """The ratio of the tokens/s."""
        return self.speed_after / self.speed_before if self.speed_before else 0.0


def compare(
    target: Target,
    before: Drafter | None,
    after: Drafter,
    prompts: Mapping[str, Sequence[list[int]]],
    max_tokens: int,
    say: Callable[[str], None],
) -> list[Row]:
    """Measure both drafters on prompts by their kind, whole blocks in each round, also as trees
    where the target was loaded for them: a change that makes chains longer may make trees shorter.
    The caches of the target are empty before and after. Without `before` it is plain decoding.
    Raises as the engine."""
    engines = Engine(target, before), Engine(target, after)
    shapes: list[ShapeName] = ["chain", "tree"] if target.options.n_branches > 1 else ["chain"]
    rows = []
    for kind, shape, temperature in product(prompts, shapes, TEMPERATURES):
        if not prompts[kind]:
            continue
        found: tuple[list[Stats], list[Stats]] = [], []
        for i, tokens in enumerate(prompts[kind]):
            turns = (0, 1) if i % 2 else (1, 0)
            for which in turns:
                request = Request(
                    list(tokens),
                    SamplingParams(temperature=temperature, seed=i),
                    max_tokens,
                    engines[which].max_width,
                    cache_prompt=False,
                    draft_shape=shape,
                )
                found[which].append(_answer(engines[which], request))
        old, new = map(Stats.sum, found)
        row = Row(
            kind,
            shape,
            temperature,
            len(prompts[kind]),
            old.tokens_per_round,
            new.tokens_per_round,
            old.tokens_per_second,
            new.tokens_per_second,
        )
        rows.append(row)
        say(
            f"{kind}, {shape}s, temperature {temperature:g}: {row.length_before:.2f} tokens per "
            f"round before, {row.length_after:.2f} after"
        )
    return rows


def wins(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether the new drafter should take the old one's place, and why, in words. The shape of
    drafts in which it does worse counts."""
    ratios = {
        kind: min(
            statistics.fmean(row.ratio for row in rows if (row.prompts, row.shape) == (kind, shape))
            for shape in dict.fromkeys(row.shape for row in rows)
        )
        for kind in dict.fromkeys(row.prompts for row in rows)
    }
    gain, rest = ratios.get(OWN, 0.0), ratios.get(BUILT_IN, 1.0)
    told = f"{gain:.2f} times the tokens per round on held-out prompts, {rest:.2f} on built-in ones"
    if gain < LEAST_GAIN:
        return False, f"{told}: a gain of less than {LEAST_GAIN:.2f} may be chance"
    if rest < MOST_LOSS:
        return False, f"{told}: built-in prompts may lose at most down to {MOST_LOSS:.2f}"
    return True, told


def beats_plain(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether drafts are faster than plain decoding, which `rows` have as the drafter before, and
    the gain, in words. The shape that does best on held-out prompts counts."""

    def gain(kind: str, shape: ShapeName) -> float:
        found = [row.gain for row in rows if (row.prompts, row.shape) == (kind, shape)]
        return statistics.fmean(found) if found else 1.0

    shape = max(dict.fromkeys(row.shape for row in rows), key=lambda each: gain(OWN, each))
    own, rest = gain(OWN, shape), gain(BUILT_IN, shape)
    told = (
        f"drafts as {shape}s make {own:.2f} times the tokens/s of plain decoding on held-out "
        f"prompts, {rest:.2f} on built-in ones"
    )
    if own >= LEAST_GAIN and rest >= MOST_LOSS:
        return True, told
    return False, f"{told}: not faster in general, so plain decoding stays the default"


def _answer(engine: Engine, request: Request) -> Stats:
    sequence = engine.begin(request)
    engine.run([sequence])
    engine.slots.forget_all()
    return sequence.stats
