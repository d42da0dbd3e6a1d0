"""Requests that one engine answers among others, and again by themselves from empty caches."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import tiny_coder
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence
from long_text import PYTHON_SOURCE
from pair_engine import request


@dataclass
class Drift:
    """The answers that differ, and the largest difference of a log-probability up to there."""

    n: int = 0
    different: list[int] = field(default_factory=list)
    logprob: float = 0.0

    def add(self, ours: Sequence, theirs: Sequence) -> None:
        self.n += 1
        if ours.tokens != theirs.tokens:
            self.different.append(self.n - 1)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=False):
            if a.token != b.token:
                break
            self.logprob = max(self.logprob, abs(a.logprob - b.logprob))


def requests(engine: Engine, n: int, width: int, **params: Any) -> list[Request]:
    """Prompts of many lengths, some of which begin alike, with answers of many lengths."""
    draw = random.Random(5)
    tokenize = engine.target.vocabulary.tokenize
    prompts = [tokenize(text) for kind in tiny_coder.prompts().values() for text in kind]
    source = tokenize(PYTHON_SOURCE)
    made = []
    for _ in range(n):
        prompt = draw.choice(prompts)
        if draw.random() < 0.4:
            prompt = source[: draw.randrange(20, 150)] + prompt
        seed, n_most = len(made), draw.randrange(8, 48)
        made.append(request(prompt, width, n_most, **({"logprobs": 1, "seed": seed} | params)))
    return made


def among_others(
    engine: Engine, wanted: list[Request], n_at_once: int, leaving: Collection[int] = ()
) -> list[Sequence]:
    """All answers, so many at a time; a new one begins as soon as one has ended. Those who ask for
    `leaving` go after a few tokens."""
    waiting, running, done = list(wanted), [], []
    while waiting or running:
        while waiting and len(running) < n_at_once:
            running.append(engine.begin(waiting.pop(0)))
            done.append(running[-1])
        assert engine.has_room(running)
        engine.step(running)
        for i in leaving:
            if i < len(done) and len(done[i].tokens) > 4:
                done[i].cancelled.set()
        for sequence in [s for s in running if s.finish_reason]:
            running.remove(sequence)
            engine.end(sequence)
    return done


def by_itself(engine: Engine, wanted: Request) -> Sequence:
    engine.slots.forget_all()
    sequence = engine.begin(wanted)
    engine.run([sequence])
    return sequence
