"""An answer depends on its own request alone: not on neighbours, not on what the caches held.

Each request is answered among others by one engine that never forgets, and again by itself from
empty caches. With q8_0 weights and cache on the CPU the two are equal to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import tiny_coder
from dflash_local import load
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence
from dflash_local.errors import InputError
from dflash_local.prefixes.store import PrefixStore
from long_text import PYTHON_SOURCE
from pair_engine import fused_drafter, open_engine, open_target, request

N, N_SEQ, N_CTX = 24, 4, 1024


@pytest.fixture(scope="module")
def crowded() -> Iterator[Engine]:
    with open_engine(n_seq=N_SEQ, n_ctx=N_CTX) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone() -> list[Sequence]:
    """The answers to the requests, each decoded plainly in empty caches."""
    with open_engine(n_ctx=N_CTX) as engine:
        return [by_itself(engine, wanted) for wanted in requests(engine, N, 0)]


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


def requests(engine: Engine, n: int, width: int) -> list[Request]:
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
        made.append(request(prompt, width, draw.randrange(8, 48), logprobs=1))
    return made


def among_others(engine: Engine, wanted: list[Request], n_at_once: int) -> list[Sequence]:
    """All answers, so many at a time; a new one begins as soon as one has ended."""
    waiting, running, done = list(wanted), [], []
    while waiting or running:
        while waiting and len(running) < n_at_once:
            running.append(engine.begin(waiting.pop(0)))
            done.append(running[-1])
        assert engine.has_room(running)
        engine.step(running)
        for sequence in [s for s in running if s.finish_reason]:
            running.remove(sequence)
            engine.end(sequence)
    return done


def by_itself(engine: Engine, wanted: Request) -> Sequence:
    engine.slots.forget_all()
    sequence = engine.begin(wanted)
    engine.run([sequence])
    return sequence


@pytest.mark.slow
@pytest.mark.parametrize(("n_at_once", "width"), [(4, 8), (1, 8), (4, 0), (1, 0)])
def test_answers_depend_on_their_own_request(
    crowded: Engine,
    alone: list[Sequence],
    n_at_once: int,
    width: int,
    record_property: Callable[[str, object], None],
) -> None:
    found = Drift()
    wanted = requests(crowded, N, width)
    for ours, theirs in zip(among_others(crowded, wanted, n_at_once), alone, strict=True):
        found.add(ours, theirs)
    print(f"{n_at_once} at once, width {width}: {found}")
    record_property("drift", str(found))
    assert found == Drift(N)
    assert crowded.prefix_cache.reused["slot"] + crowded.prefix_cache.reused["shared"] > N / 4


def test_a_handful_of_equal_tokens_leaves_no_trace() -> None:
    """Prompts mostly begin with the same few tokens. An f16 cache would show that they were
    decoded in another pass."""
    with open_target(n_ctx=N_CTX, kv_type="f16") as target:
        engine = Engine(target, None)
        wanted = [r for r in requests(engine, N, 0) if len(r.prompt) > 70][:3]
        for each in wanted:
            expected = by_itself(engine, each)
            engine.slots.forget_all()
            among_others(engine, [request([*each.prompt[:5], 7, 8, 9], 0, 4)], 1)
            found = among_others(engine, [each], 1)[0]
            assert found.stats.cached_tokens == 0
            assert found.logprobs == expected.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, 8])
def test_exact_answers_in_half_precision(width: int) -> None:
    """An f16 cache rounds by how many rows a pass has, so that kept rows of another request's
    passes would show."""
    with open_target(n_ctx=N_CTX, n_batch=64, kv_type="f16") as target:
        engine = Engine(target, fused_drafter(target), store=PrefixStore(1 << 24), exact=True)
        wanted = [r for r in requests(engine, N, width) if len(r.prompt) > 70][:8]
        wanted += wanted[::-1]
        found = [among_others(engine, [each], 1)[0] for each in wanted]
        assert sum(sequence.stats.cached_tokens for sequence in found) >= 64 * len(wanted) / 2
        assert all(sequence.stats.cached_tokens % 64 == 0 for sequence in found)
        drift = Drift()
        for ours, each in zip(found, wanted, strict=True):
            engine.prefix_cache.clear()
            drift.add(ours, among_others(engine, [each], 1)[0])
    assert drift == Drift(len(wanted))


@pytest.mark.parametrize("options", [{"n_seq": 2}, {"draft_shape": "tree"}])
def test_what_exact_answers_exclude(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="exact"):
        load(*tiny_coder.pair(), exact=True, quiet=True, **options)


def test_an_exact_model() -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    with load(*tiny_coder.pair(), exact=True, **options) as model:
        assert model.draft_shape == "chain"
        first, again = (model.generate("def f(x):", max_tokens=8, logprobs=1) for _ in range(2))
        assert again.stats.cached_tokens == 0
        assert first.logprobs == again.logprobs
