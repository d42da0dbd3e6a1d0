"""Drafts that are copies of the text: whatever repeats, the answer is plain decoding's.

A bias leaves the model only a few tokens, so that answers repeat in every way, and copies of them
are right for a while, then wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_coder
from adversarial import ScriptedDrafter, right_for
from dflash_local.copies.chances import N_KINDS, CopyPrior
from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from elsewhere import CHEAP, Elsewhere
from pair_engine import answer, consistent, fused_drafter, open_target, request
from plain_answer import PlainAnswer, plain_tokens
from sampling_ways import JSON_LIST, WAYS
from shapes import exact_file, exact_target

N = 28
MOST = 63

alphabets = st.lists(st.integers(300, 900), min_size=1, max_size=4, unique=True)
ways = st.sampled_from(["greedy", "seeded", "seeded with penalties"])


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target(n_ctx=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def forking() -> Iterator[Target]:
    """A target with exact trees."""
    with exact_target("tree") as opened:
        yield opened


def sure() -> CopyPrior:
    """Takes every copy for right."""
    prior = CopyPrior()
    for each in (prior.of(greedy=True), prior.of(greedy=False)):
        each.right = [0.99 * tried for tried in each.tried]
    return prior


def copying(target: Target, drafter: Any = None, *, n_nodes: int = 0) -> Engine:
    """Drafts copies wherever there are any: rows cost next to nothing, and copies count as sure."""
    width = drafter.block_size if drafter else 1
    n_copied = target.max_width - 1
    chosen = Elsewhere(CHEAP, n_nodes, block_size=width, n_copied=n_copied)
    engine = Engine(target, drafter, target.options.n_seq, chosen, copies=sure())
    engine.slots.forget_all()
    return engine


def options_of(way: str, alphabet: Sequence[int]) -> dict[str, Any]:
    options = {"temperature": 1.0, "seed": 5} if way == "seeded" else dict(WAYS.get(way, {}))
    return options | {"logit_bias": dict.fromkeys(alphabet, 60.0)}


@st.composite
def repeating(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A few tokens, and a prompt that repeats parts of itself, more or less."""
    alphabet = draw(alphabets)
    prompt = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=20))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(prompt) - 1))
        prompt = prompt + prompt[begin : begin + draw(st.integers(1, 20))]
    return alphabet, prompt[:80]


@given(repeating(), ways, st.sampled_from([2, 3, 8, 16, 64, "auto"]), st.booleans())
@settings(deadline=None, max_examples=10)
def test_without_a_drafter(
    target: Target, text: tuple[list[int], list[int]], way: str, width: Any, same: bool
) -> None:
    """Also where earlier texts of a few tokens take each other up all the time, and mislead."""
    alphabet, prompt = text
    options = options_of(way, alphabet)
    engine = copying(target)
    for tokens in (prompt, [*prompt[::-1], 950, *prompt], prompt if same else prompt[:5]):
        expected = plain_tokens(target, tokens, N, **options)
        found = answer(engine, tokens, width, N, owner="me", **options)
        assert found.tokens == expected
        stats = found.stats
        assert stats.emitted == 1 + stats.rounds + stats.accepted
        assert stats.copied == stats.drafted and stats.copied_accepted == stats.accepted
        assert found.from_copy == found.from_draft and sum(found.from_copy) == stats.accepted
        slot = engine.slots[found.slot.seq]
        assert slot.cached == [*tokens, *expected[:-1]] and not slot.pending
        engine.slots.forget_all()


def test_whole_passes_are_copied(target: Target) -> None:
    """One token again and again: each pass is as wide as it may be."""
    options = options_of("greedy", [400])
    expected = plain_tokens(target, [400] * 8, 200, **options)
    found = answer(copying(target), [400] * 8, "auto", 200, **options)
    assert found.tokens == expected
    assert found.stats.tokens_per_round > 40
    assert max(found.stats.widths) == 1 + MOST


@given(repeating(), ways, st.integers(0, 6))
@settings(deadline=None, max_examples=6)
def test_beside_a_drafter_that_is_right_for_so_many(
    target: Target, text: tuple[list[int], list[int]], way: str, k: int
) -> None:
    alphabet, prompt = text
    options = options_of(way, alphabet)
    expected = plain_tokens(target, prompt, N, **options)
    drafter = ScriptedDrafter(right_for(prompt + expected, lambda: k, target.n_vocab))
    for width in (8, "auto"):
        engine = copying(target, drafter)
        found = answer(engine, prompt, width, N, **options)  # type: ignore[arg-type]
        assert found.tokens == expected
        consistent(engine, drafter, len(prompt) + len(expected) - 1)
        assert found.stats.copied <= found.stats.drafted
        assert sum(found.from_copy) == found.stats.copied_accepted <= found.stats.accepted


@given(repeating(), ways, st.sampled_from([4, 16, 32]))
@settings(deadline=None, max_examples=4)
def test_trees(forking: Target, text: tuple[list[int], list[int]], way: str, width: int) -> None:
    """Of the drafter's candidates and copies together, and of several copies alone."""
    alphabet, prompt = text
    options = options_of(way, alphabet) | {"shape": "tree"}
    expected = plain_tokens(forking, prompt, 24, **options)
    for drafter in (None, fused_drafter(forking)):
        engine = copying(forking, drafter, n_nodes=31)
        for chosen in (width, "auto"):
            engine.slots.forget_all()
            found = answer(engine, prompt, chosen, 24, **options)  # type: ignore[arg-type]
            assert found.tokens == expected


def test_an_answer_is_used_again(target: Target) -> None:
    """After a prefix hit the text is the whole of prompt and answer, whatever came from a cache."""
    prompt = [400, 401, 402, 403] * 6
    options = options_of("seeded", [400, 401, 402, 403])
    engine = copying(target)
    first = answer(engine, prompt, "auto", N, **options)
    longer = prompt + first.tokens + [404, 405]
    again = answer(engine, longer, "auto", N, **options)
    assert again.stats.cached_tokens > len(prompt)
    assert again.tokens == plain_tokens(target, longer, N, **options)
    assert again.stats.copied_accepted > 0


def test_several_at_once() -> None:
    """Each copies its own text. They join and leave, and one is suspended and goes on."""
    with open_target(
        exact_file("tree"), n_ctx=1024, n_seq=3, kv_type="f32", flash_attn=False
    ) as target:
        alphabets = [[400, 401], [500, 501, 502], [600]]
        prompts = [(alphabet * 12)[: 15 + i] for i, alphabet in enumerate(alphabets)]
        ways = ["greedy", "seeded", "greedy"]
        options = [options_of(*pair) for pair in zip(ways, alphabets, strict=True)]
        expected = [plain_tokens(target, p, N, **o) for p, o in zip(prompts, options, strict=True)]
        for drafter in (None, fused_drafter(target)):
            engine = copying(target, drafter)
            answers = [
                engine.begin(request(p, width, N, **o))  # type: ignore[arg-type]
                for p, o, width in zip(prompts, options, ["auto", "auto", 8], strict=True)
            ]
            for _ in range(3):
                engine.step(answers)
            suspended = answers[1]
            if suspended.finish_reason is None:
                engine.suspend(suspended)
                engine.step([answers[0], answers[2]])
                engine.resume(suspended)
            engine.run(answers)
            assert [each.tokens for each in answers] == expected
            assert all(each.stats.copied_accepted > 0 for each in answers)


@pytest.mark.parametrize("width", ["auto", 40])
def test_room_for_copies_makes_no_wider_trees(width: Any) -> None:
    """Each row of a tree has a branch of its own, unless a fixed width asks for more."""
    with open_target(exact_file("tree"), kv_type="f32", flash_attn=False, n_branches=20) as target:
        prompt = target.vocabulary.tokenize(tiny_coder.prompts()["chat"][0])
        engine = copying(target, fused_drafter(target), n_nodes=19)
        found = answer(engine, prompt, width, N, shape="tree")
        assert found.tokens == plain_tokens(target, prompt, N)
        assert found.stats.tree_rounds > 0 and not found.stats.copied
        assert max(found.stats.widths) == (20 if width == "auto" else width)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["seeded", "greedy"])
def test_grammar_and_logprobs(target: Target, way: str) -> None:
    """A token that a grammar forbids is not copied, and each one has its log-probabilities."""
    tokenize = target.vocabulary.tokenize
    prompt = tokenize('[one, two, 34]\n["one","two",34]\n[one, two, 34]\n')
    options: dict[str, Any] = {"grammar": JSON_LIST, "logprobs": 1}
    options |= {"temperature": 0.7, "seed": 5} if way == "seeded" else {}
    known = PlainAnswer(target, prompt, N, **options)
    for width in (8, 64):
        assert known.asked(copying(target), width, logprobs=1).logprobs == known.logprobs


def test_the_rows_of_a_batch_are_shared() -> None:
    """Copies of the first sequences leave the others their drafts."""
    with open_target(n_ctx=1024, n_seq=4, n_batch=100) as target:
        engine = copying(target, fused_drafter(target))
        prompts = [[400 + i, 401 + i] * 8 for i in range(4)]
        options = [options_of("greedy", prompt[:2]) for prompt in prompts]
        answers = [
            engine.begin(request(prompt, "auto", 200, **each))
            for prompt, each in zip(prompts, options, strict=True)
        ]
        engine.run(answers)
        for each, prompt in zip(answers, prompts, strict=True):
            assert set(each.tokens) <= set(prompt)
            assert sum(n for (drafted, _), n in each.stats.outcomes.items() if not drafted) <= 1


def test_the_chances_are_those_of_all_requests_that_draw_or_do_not(target: Target) -> None:
    engine = copying(target)
    prior = engine.copies = CopyPrior()
    cold, drawn = CopyPrior().tried, prior.of(greedy=False)
    answer(engine, [400, 401] * 10, "auto", N, **options_of("greedy", [400, 401]))
    assert len(prior.tried) == N_KINDS and prior.tried != cold == drawn.tried
    greedy = list(prior.tried)
    answer(engine, [400, 401] * 10, "auto", N, **options_of("seeded", [400, 401]))
    assert prior.tried == greedy and drawn.tried != cold


def test_a_later_request_copies_what_an_earlier_one_of_its_owner_said(target: Target) -> None:
    """The same prompt, which leads to the same answer: from its 16th token on it is copied."""
    engine = copying(target)
    prompt = target.vocabulary.tokenize("def read_json(path):\n    ")
    expected = plain_tokens(target, prompt, N)
    runs = {}
    for name, owner in {"first": "me", "again": "me", "other": "you", "nobody": None}.items():
        engine.slots.forget_all()
        runs[name] = answer(engine, prompt, "auto", N, owner=owner)
        assert runs[name].tokens == expected
    copied = {name: run.stats.copied_accepted for name, run in runs.items()}
    assert copied.pop("again") >= N // 2 > max(copied.values())
    assert len(engine.earlier) == 2


def test_exact_answers_copy_from_no_earlier_one(target: Target) -> None:
    engine = Engine(target, None, 1, exact=True, copies=sure())
    for _ in range(2):
        engine.slots.forget_all()
        found = answer(engine, [400, *range(500, 540)], 8, 8, owner="me")
        assert found.stats.copied == 0
