"""An answer bound by a grammar is drafted like any other: forbidden tokens are not proposed, and
the text is that of plain decoding."""

from collections.abc import Iterator
from typing import Any

import pytest

import tiny_coder
from adversarial import always_wrong, oracle, right_for
from dflash_local import Model
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.errors import GrammarError
from dflash_local.sampling.thinking import ThinkingBudget
from dflash_local.target_model.target import Target
from pair_engine import fused_drafter
from pair_engine import request as asked
from plain_answer import PlainAnswer
from shapes import exact_target

N = 32
PROMPT = "x = "
THOUGHTS = ThinkingBudget(5, (b"<thoughts>", b"</thoughts>"), (300, 301, 302), is_open=True)
"""Their end is any three tokens: it is forced, whatever they say."""
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9},
        "unit": {"enum": ["a metre", "a mile"]},
    },
    "required": ["name", "sizes", "unit"],
    "additionalProperties": False,
}
BOUND: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": RECORD},
    "any object": {"json_schema": True},
    "lark": {
        "lark": 'start: line+\nline: /[a-z_ ]{1,30}/ ("=" | "(") /[a-z0-9_. ]{0,20}/ ")"? "\\n"'
    },
    "thoughts": {"thinking_budget": THOUGHTS},
    "thoughts and a least length": {"thinking_budget": THOUGHTS, "min_tokens": 20},
    "thoughts within a grammar": {"thinking_budget": THOUGHTS, "lark": r"start: /(.|\n){40,90}/"},
    "gbnf": {"grammar": 'root ::= line+\nline ::= [a-z_ ]+ ("=" | "(") [a-z0-9_. ]* ")"? "\\n"'},
}
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded with penalties": {"temperature": 0.9, "seed": 4, "repeat_penalty": 1.1, "top_k": 0},
}


@pytest.fixture(scope="module")
def model(either_model: Model) -> Model:
    return either_model


@pytest.fixture(scope="module")
def target(shape: DraftShape) -> Iterator[Target]:
    with exact_target(shape) as opened:
        yield opened


@pytest.mark.one_in(2)
def test_the_end_of_thoughts_comes_whatever_logit_bias_says(model: Model) -> None:
    never = dict.fromkeys(THOUGHTS.end, float("-inf"))
    for width in (0, 16):
        options: dict[str, Any] = {"max_tokens": 12, "draft_width": width, "logit_bias": never}
        told = model.generate("x = ", thinking_budget=THOUGHTS, **options)
        assert tuple(told.tokens[5:8]) == THOUGHTS.end and len(told.tokens) == 12
        assert never.keys().isdisjoint(told.tokens[:5] + told.tokens[8:])


@pytest.fixture(scope="module", params=BOUND)
def bound(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = BOUND[request.param]
    return found


@pytest.mark.one_in(24)
@pytest.mark.parametrize("drawn", DRAWN)
def test_drafters_good_and_bad(
    target: Target, shape: DraftShape, bound: dict[str, Any], drawn: str
) -> None:
    known = PlainAnswer(target, PROMPT, N, **bound, **DRAWN[drawn])
    n_vocab = target.n_vocab
    right = known.scripted(oracle(known.text), shape=shape)
    # An end of text that was drafted and is drawn is in no cache, and so is not accepted.
    assert right.accepted == len(known.tokens) - 1 - right.rounds
    assert right.drafted - right.accepted in (0, 1)
    wrong = known.scripted(always_wrong(known.text, n_vocab), shape=shape)
    assert wrong.accepted == 0
    partly = known.scripted(right_for(known.text, lambda: 3, n_vocab), shape=shape)
    assert max(partly.accepted_lengths) <= 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "params", [{"lark": "start: /[0-9]{18}/"}, {"grammar": "root ::= [0-9]{18}"}]
)
def test_what_the_grammar_forbids_is_not_proposed(
    target: Target, shape: DraftShape, params: dict[str, str]
) -> None:
    """Neither a letter where digits are due, nor the end of a text that may not end."""
    letter = target.vocabulary.tokenize("a")[-1]
    known = PlainAnswer(target, PROMPT, N, **params)
    know = oracle(known.text)
    end = known.tokens[-1]
    assert target.vocabulary.ends_text(end)
    for bad, n in ((end, 1), (letter, 0)):  # the end is right once, at the end
        chain = Draft.chain([bad] * 15)
        assert known.scripted(lambda *_, d=chain: d, shape=shape).drafted == n

        def script(at: int, anchor: int, n: int, bad: int = bad) -> Draft:
            return Draft.chain([*know(at, anchor, 3).tokens, *[bad] * (n - 3)])

        stats = known.scripted(script, shape=shape)
        assert stats.drafted - stats.accepted in (0, 1)
        assert max(stats.accepted_lengths) == 4


def test_branches_that_the_grammar_forbids_are_pruned() -> None:
    """With all that follows them; what is right beside and below what is left stays."""
    with exact_target("tree") as target:
        letter = target.vocabulary.tokenize("a")[-1]
        end = target.vocabulary.ends[0]
        digits = [target.vocabulary.tokenize(f"{digit}")[-1] for digit in (3, 7)]
        known = PlainAnswer(target, PROMPT, N, lark="start: /[0-9]{30}/")

        def script(at: int, _anchor: int, _n: int) -> Draft:
            right = known.text[at + 1 : at + 3]
            if len(right) < 2:
                return Draft.chain([])
            first, second = right
            wrong = next(digit for digit in digits if digit != first)
            # A letter with something below, an end of text, another digit with a letter below, and
            # last what is right, with a letter beside it.
            return Draft(
                [letter, first, end, wrong, letter, first, letter, second],
                [ANCHOR, 0, ANCHOR, ANCHOR, 3, ANCHOR, 5, 5],
            )

        stats = known.scripted(script, shape="tree")
    assert stats.accepted_lengths[3] > 9
    # At the end an end of text is due, and no digit.
    assert set(drafted for drafted, _ in stats.outcomes) <= {0, 1, 2, 3}
    assert stats.outcomes[3, 3] == stats.accepted_lengths[3]


@pytest.mark.one_in(2)
def test_several_at_once_each_keep_to_their_own(shape: DraftShape) -> None:
    ways = [BOUND["json_schema"], BOUND["gbnf"], BOUND["lark"], {}]
    prompts = tiny_coder.prompts()["code"][:4]
    with exact_target(shape, n_ctx=1024, n_seq=len(ways)) as target:
        engine = Engine(target, fused_drafter(target), n_seq=len(ways))
        ids = [target.vocabulary.tokenize(text) for text in prompts]
        sequences = [
            engine.begin(asked(prompt, width, N, shape=shape, **way))
            for prompt, width, way in zip(ids, (16, 5, 0, 9), ways, strict=True)
        ]
        engine.run(sequences)
        for sequence, way in zip(sequences, ways, strict=True):
            assert (sequence.stats.accepted > 0) == sequence.request.drafts
            if way:
                constraint = engine.grammars.constraint(sequence.request.sampling)
                assert constraint is not None
                assert constraint.n_valid(sequence.tokens) == len(sequence.tokens)


@pytest.mark.one_in(2)
def test_log_probabilities_are_the_target_s_own(model: Model) -> None:
    """The grammar takes no part in them, drafted or not."""
    prompt = tiny_coder.prompts()["code"][0]
    free = model.generate(prompt, max_tokens=1, logprobs=4).logprobs[0]
    for width in (0, 16):
        model.forget()
        answer = model.generate(
            prompt, max_tokens=12, logprobs=4, draft_width=width, lark="start: /[0-9]{12}/"
        )
        assert answer.logprobs[0].top == free.top
        assert [found.token for found in answer.logprobs] == answer.tokens
        first = answer.logprobs[0]
        assert first.token not in dict(first.top) or dict(first.top)[first.token] == first.logprob


@pytest.mark.one_in(2)
def test_a_grammar_that_grows_too_large_ends_its_own_answer_alone(model: Model) -> None:
    """Known only once the answer is on its way."""
    schema = {"enum": ["x" * 100_000, "y" * 100_000]}
    with pytest.raises(GrammarError, match="too many states"):
        model.generate("x", json_schema=schema, max_tokens=4)
    assert model.generate("x = ", lark="start: /[0-9]{3}/", max_tokens=9).finish_reason == "stop"
