"""Width "auto" on made-up machines: what the controller decides there, and what it leaves behind.
That answers are the plain ones is in `test_identity`."""

from collections.abc import Callable, Iterator

import pytest

import tiny_coder
from add_up import N_NODES, add_up
from dflash_local import Model
from dflash_local.draft.shape import DraftShape
from elsewhere import DECIDERS, controller
from pair_engine import consistent
from shapes import of_both_shapes

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")
N = 24
Decided = Callable[[str], Model]


@pytest.fixture
def decided(either_model: Model, shape: DraftShape) -> Iterator[Decided]:
    """The mini pair with empty caches and such a decider, which may choose trees, if there are
    any; or with all widths fixed."""
    model = either_model
    before = model.engine.controller, model.draft_width, model.draft_shape

    def decide(decider: str) -> Model:
        model.forget()
        if decider != "fixed":
            model.engine.control(controller(decider, N_NODES if shape == "tree" else 0))
            model.draft_width = "auto"
            model.draft_shape = "auto" if shape == "tree" else "chain"
        return model

    yield decide
    model.engine.control(before[0])
    model.draft_width, model.draft_shape = before[1:]


def in_step(model: Model, text: list[int]) -> None:
    """Fail unless both caches have all of the text but its last token; after a request that was
    done with drafting, the drafter's has the first part of it."""
    (slot,), drafter = model.engine.slots, model.drafter
    assert drafter and slot.cached == text[:-1] and not slot.pending
    if slot.gave_up:
        assert drafter.length(0) <= len(slot.cached)
    else:
        consistent(model.engine, drafter, len(text) - 1)


only_chains = pytest.mark.parametrize("shape", ["chain"], indirect=True)


@pytest.mark.slow
@only_chains
def test_the_machines_do_what_they_are_here_for(decided: Decided) -> None:
    """Else equal answers would say little."""
    prompt = tiny_coder.prompts()["code"][0]
    seen: dict[str, dict[int, int]] = {}
    gave_up = set()
    for decider in DECIDERS:
        model = decided(decider)
        result = model.generate(prompt, max_tokens=96, temperature=0.8, seed=3)
        add_up(result)
        in_step(model, [*model.tokenize(prompt), *result.tokens])
        seen[decider] = result.stats.widths
        gave_up |= {decider} if model.engine.slots[0].gave_up else set()
    assert 1 not in seen["cheap"] and len(seen["cheap"]) > 4
    assert len(seen["by the row"]) > 3
    assert seen["even"][1] > 9 and len(seen["even"]) > 2  # in one answer, plain and drafted
    assert seen["by lot"][1] > 9 and len(seen["by lot"]) > 4
    assert seen["probing"][1] > 48 and len(seen["probing"]) > 1
    assert seen["resigning"][1] > 48 and len(seen["resigning"]) > 1
    assert list(seen["hopeless"]) == [1]
    assert gave_up == {"resigning", "hopeless"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tree"], indirect=True)
def test_trees_are_among_what_they_do(decided: Decided) -> None:
    for decider in ("cheap", "by lot"):  # where rows have a price, chains are taken
        result = decided(decider).generate(tiny_coder.prompts()["code"][0], max_tokens=48)
        add_up(result)
        assert result.stats.tree_rounds > 3, decider
    n_drafted = sum(n for width, n in result.stats.widths.items() if width > 1)
    assert result.stats.tree_rounds < n_drafted  # by lot some are chains


@pytest.mark.one_in(4)
@of_both_shapes(
    "decider", ["fixed", "cheap", "even", "probing", "hopeless", "by lot"], ["by lot", "fixed"]
)
def test_stop_texts_are_found_wherever_they_come(decided: Decided, decider: str) -> None:
    prompt, model = tiny_coder.prompts()["code"][0], decided(decider)
    expected = model.generate(prompt, max_tokens=N, draft_width=0)
    text = expected.text
    for stop in [text[at : at + 3] for at in range(5, 60, 11)]:
        result = model.generate(prompt, max_tokens=N, stop=stop)
        assert (result.text, result.finish_reason) == (text[: text.index(stop)], "stop")
        assert result.tokens == expected.tokens[: len(result.tokens)]
        # The last token is one that brings the stop text, and none comes after it.
        assert stop in model.detokenize(result.tokens)
        assert stop not in model.detokenize(result.tokens[:-1])
        ended = [*model.tokenize(prompt), *result.tokens]
        in_step(model, ended)
        # Nothing is left of what was decoded beyond: the next answer goes on from there.
        following = model.generate(ended, max_tokens=4).tokens
        model.forget()
        assert model.generate(ended, max_tokens=4, draft_width=0).tokens == following


@only_chains
def test_where_drafting_was_given_up_no_prompt_is_decoded_again(decided: Decided) -> None:
    model, prompt = decided("hopeless"), tiny_coder.prompts()["chat"][0]
    first = model.generate(prompt, max_tokens=40)
    assert model.engine.slots[0].gave_up and model.drafter and model.drafter.length(0) == 0
    longer = [*model.tokenize(prompt), *first.tokens]
    second = model.generate(longer, max_tokens=N)
    assert second.stats.cached_tokens == len(longer) - 1
    # A request that must draft pays for it once.
    third = model.generate(longer, max_tokens=N, draft_width=16)
    assert third.tokens == second.tokens
    assert third.stats.cached_tokens == 0 and third.stats.drafted > 0


@only_chains
def test_without_a_controller_auto_is_plain(decided: Decided) -> None:
    model = decided("cheap")
    model.engine.control(None)
    result = model.generate(tiny_coder.prompts()["chat"][0], max_tokens=N)
    assert list(result.stats.widths) == [1]
    in_step(model, [*model.tokenize(tiny_coder.prompts()["chat"][0]), *result.tokens])
