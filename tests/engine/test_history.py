"""An answer depends on its own request alone: not on neighbours, not on what the caches held.

Each request is answered among others by one engine that never forgets, and again by itself from
empty caches. With q8_0 weights and cache on the CPU the two are equal to the bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.prefixes.store import PrefixStore
from long_text import PYTHON_SOURCE
from neighbours import Drift, among_others, by_itself, requests
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


@pytest.mark.one_in(2)
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


@pytest.mark.one_in(2)
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


def test_an_exact_prompt_that_is_reported_leaves_no_row() -> None:
    """Its passes are as narrow as rows with logits may be."""
    with open_target(n_ctx=N_CTX, n_batch=128, exact=True) as target:
        engine = Engine(target, None, exact=True)
        prompt = target.vocabulary.tokenize(PYTHON_SOURCE)[:300]
        reported = replace(request(prompt, 0, 2), prompt_logprobs=0)
        found = [among_others(engine, [each], 1)[0] for each in (reported, request(prompt, 0, 2))]
        assert len(found[0].prompt_logprobs) == len(prompt) - 1
        assert found[1].stats.cached_tokens == 0
