"""Drafted answers are those of plain decoding, chains and trees: token by token where the machine
computes so (see `shapes`), by the gap rule elsewhere."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tiny_coder
from add_up import N_NODES, add_up
from dflash_local import Model, Result
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.drafter import DraftRequest, WrappedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from elsewhere import DECIDERS, controller
from gap_rule import (
    equal_by_gap_rule,
    forked_logits,
    joint_logits,
    largest_difference,
    step_logits,
)
from long_text import PYTHON_SOURCE
from pair_engine import answer, fused_drafter, open_target
from pairwise import pairwise_cases
from sampling_ways import WAYS
from shapes import assert_equal, exact_model, exact_target

N = 24
WIDTHS: dict[DraftShape, tuple[int | str, ...]] = {
    "chain": (2, 5, 8, 9, 16, *DECIDERS),
    "tree": (4, 16, 32, 64, "by lot"),
}
"""Fixed ones, or who decides."""
MAX_TOKENS: dict[DraftShape, int] = {"chain": 48, "tree": 24}
SHORT, LONG = ("code", "chat"), ("conversation", "source")
"""Prompts, the latter of more than 600 tokens: such a prompt takes seconds."""
DAILY = {("chain", kind) for kind in SHORT}
"""Trees take F32 weights; daily the mini pair has them, in `test_round` and `test_odd_trees`."""
BEFORE = ("nothing", "its beginning")
"""The part of a prompt that the caches have."""
CASES = [
    pytest.param(shape, *case, marks=[] if (shape, case[2]) in DAILY else [pytest.mark.slow])
    for shape, widths in WIDTHS.items()
    for case in pairwise_cases(list(WAYS), widths, SHORT + LONG, BEFORE, (None, 3))
]

Plain = Callable[..., Result]


@pytest.fixture(scope="module")
def model(shape: DraftShape, request: pytest.FixtureRequest) -> Model:
    """The tiny pair: trained, so that drafts are as good as they are for users."""
    found: Model = request.getfixturevalue(f"{shape}_model")
    return found


@pytest.fixture(scope="module")
def plain(model: Model) -> Plain:
    """Plain decoding from empty caches; each answer is computed once."""
    known: dict[str, Result] = {}

    def decode(prompt: str | list[int], **options: Any) -> Result:
        key = json.dumps([prompt, options], sort_keys=True, default=str)
        if key not in known:
            model.forget()
            known[key] = model.generate(prompt, draft_width=0, **options)
            assert known[key].stats.drafted == 0
        return known[key]

    return decode


def text_of(kind: str) -> str:
    prompts = tiny_coder.prompts()
    if kind == "source":
        return PYTHON_SOURCE[:2600]
    if kind == "conversation":
        chat = prompts["chat"]
        turns = (p + "```python\nreturn None\n```<|im_end|>\n" for p in chat[:15])
        return "".join(turns) + chat[15]
    return prompts[kind][1]


@pytest.fixture
def decide(model: Model, shape: DraftShape) -> Iterator[Callable[[str], None]]:
    """Leave the widths to such a decider for one test, without copies, which may be wider."""
    engine, n_nodes = model.engine, N_NODES if shape == "tree" else 0
    before = engine.controller

    def deciding(decider: str) -> None:
        engine.offers_copies = False
        engine.control(controller(decider, n_nodes))

    yield deciding
    engine.control(before)
    engine.offers_copies = True


@pytest.mark.one_in(16)
@pytest.mark.usefixtures("as_far_ahead_as_allowed")
@pytest.mark.parametrize(
    ("shape", "way", "width", "kind", "before", "logprobs"),
    CASES,
    indirect=["shape"],
    scope="module",
)
def test_drafted_answers_are_the_plain_ones(
    model: Model,
    plain: Plain,
    decide: Callable[[str], None],
    shape: DraftShape,
    way: str,
    width: int | str,
    kind: str,
    before: str,
    logprobs: int | None,
) -> None:
    prompt = text_of(kind)
    assert (len(model.tokenize(prompt)) > 600) == (kind in LONG)
    options = {"max_tokens": MAX_TOKENS[shape], "logprobs": logprobs, **WAYS[way]}
    expected = plain(prompt, **options)
    model.forget()
    if before == "its beginning":
        model.generate(prompt[: len(prompt) // 2] + "\n\nx = 1", max_tokens=9)
    if isinstance(width, str):
        decide(width)
        options |= {"draft_width": "auto", "draft_shape": "auto" if shape == "tree" else shape}
    drafted = model.generate(prompt, **{"draft_width": width} | options)
    assert_equal(drafted, expected)
    if logprobs:
        assert [entry.token for entry in drafted.logprobs] == expected.tokens
    if isinstance(width, str):
        add_up(drafted)
        return
    # A list of JSON may end before anything is drafted.
    assert drafted.stats.drafted > 0 or "JSON" in way
    assert (drafted.stats.tree_rounds > 0) == (shape == "tree" and drafted.stats.drafted > 0)


@pytest.mark.slow
def test_across_the_last_positions_of_the_context(shape: DraftShape) -> None:
    with exact_model(shape, n_ctx=256) as model:
        source = model.tokenize(PYTHON_SOURCE)
        room = model.n_ctx
        widths = (2, 5, 8, 9, 16) if shape == "chain" else (16, 64)
        for n_prompt in (200, room - 17, room - 16, room - 2, room - 1)[shape == "tree" :]:
            # No end of text, so that both get there.
            ends = [t for t in range(model.target.n_vocab) if model.target.vocabulary.ends_text(t)]
            options: dict[str, Any] = {
                "max_tokens": None,
                "logit_bias": dict.fromkeys(ends, -float("inf")),
            }
            prompt = source[:n_prompt]
            expected = model.generate(prompt, draft_width=0, **options)
            assert expected.finish_reason == "length"
            # The last token that is emitted needs no place of its own.
            assert len(expected.tokens) == room - n_prompt + 1
            for width in widths:
                model.forget()
                assert_equal(model.generate(prompt, draft_width=width, **options), expected)


@pytest.mark.slow
def test_after_a_request_whose_every_draft_was_rejected(shape: DraftShape) -> None:
    with exact_target(shape) as target:
        honest = Engine(target, None)
        prompt = target.vocabulary.tokenize(tiny_coder.prompts()["chat"][0])
        expected = answer(honest, prompt, 0, N).tokens
        honest.slots.forget_all()

        def spoil(request: DraftRequest, draft: Draft) -> Draft:
            anchor_at, text = drafter.length(request.seq), prompt + expected
            if anchor_at + len(draft) + 1 >= len(text):
                return Draft.chain([])
            wrong = [(text[anchor_at + 1 + i] + 1) % target.n_vocab for i in range(len(draft))]
            if shape == "chain":
                return Draft.chain(wrong)
            # What is right further on comes after two that are not.
            first = [wrong[0], (wrong[0] + 1) % target.n_vocab]
            right = text[anchor_at + 2 :][: len(draft) - 2]
            return Draft([*first, *right], [ANCHOR, ANCHOR, *range(len(right))])

        drafter = WrappedDrafter(fused_drafter(target), spoil)
        engine = Engine(target, drafter)
        spoiled = answer(engine, prompt, 16, N, shape=shape)
        assert spoiled.tokens == expected
        assert spoiled.stats.drafted > 0
        assert spoiled.stats.accepted == 0
        drafter.change = lambda _, draft: draft
        again = answer(engine, prompt, 16, N, shape=shape)
        assert again.tokens == expected
        assert again.stats.accepted > 0


# Where rounding differs


@pytest.mark.slow
def test_half_precision_cache_and_long_context_by_the_gap_rule(
    record_property: Callable[[str, object], None],
) -> None:
    different = 0
    ways: list[tuple[int, DraftShape]] = [(5, "chain"), (16, "chain"), (16, "tree")]
    with open_target(n_ctx=1024, kv_type="f16", n_threads=None, n_branches=32) as target:
        bare = Engine(target, None)
        prompt = target.vocabulary.tokenize(text_of("source"))
        run = answer(bare, prompt, 0, logprobs=2)
        text, begin = prompt + run.tokens, len(prompt) - 1
        single = step_logits(target, text, begin)
        wide = [joint_logits(target, [text], begin, [width])[0] for width in (2, 5, 16)]
        wide.append(forked_logits(target, text, begin, 3))
        noise = max(largest_difference([single], [found]) for found in wide)
        engine = Engine(target, fused_drafter(target))
        for width, drafts in ways:
            engine.slots.forget_all()
            drafted = answer(engine, prompt, width, shape=drafts).tokens
            different += not equal_by_gap_rule(run.tokens, run.logprobs, drafted, noise)
    record_property("noise", noise)
    record_property("answers that differ", f"{different} of {len(ways)}")
    print(f"f16 KV, 600 tokens: noise {noise:.3g}, {different} of {len(ways)} answers differ")
