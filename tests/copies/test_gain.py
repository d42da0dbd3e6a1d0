"""The gain and loss of copies on simulated machines: texts that come out whatever is drafted, and
rounds that take as long as there. No model runs."""

import math
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from random import Random

import pytest

from copies import copies_of
from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import Costs
from dflash_local.copies.chances import CopyPrior
from dflash_local.copies.copier import Copier, Copy
from dflash_local.copies.join import copy_alone, joined, judged_by_drafter
from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import Chain
from dflash_local.engine.accept import accept

MS = 1e-3
MOST, BLOCK = 63, 15
WRONG = 200_000


Machine = Callable[[], Costs]


def machine(steps: dict[int, float], switch: float, draft: float) -> Machine:
    """Milliseconds of a pass by rows, of a change of their number, and of a draft."""
    seconds = {4: {n: ms * MS for n, ms in steps.items()}}
    more = {"host_s": 0.02 * MS, "draft_host_s": 0.1 * MS, "inject_s": 0.01 * MS}
    return lambda: Costs(seconds, {4: {1: draft * MS}}, switch_s=switch * MS, **more)


MACHINES = {
    # Qwen3-8B on an H200
    "gpu": machine(
        {1: 3.83, 2: 4.35, 4: 5.73, 8: 8.5, 9: 7.9, 16: 8.3, 32: 10.2, 64: 15.0}, 1.0, 2.0
    ),
    # A mixture of experts: more rows read more experts.
    "experts": machine({1: 2.0, 2: 2.9, 4: 4.2, 8: 6.2, 16: 8.5, 32: 11.0, 64: 15.0}, 0.8, 1.6),
    # The tiny pair on two CPU cores
    "cpu": machine({1: 1.36, 2: 3.0, 4: 3.6, 8: 4.6, 16: 7.2, 32: 12.5, 64: 24.0}, 0.05, 1.5),
}


def source(random: Random, n: int) -> list[int]:
    """A text of words that come again and again, as those of a program do."""
    words = [[random.randrange(3000) for _ in range(random.randint(1, 5))] for _ in range(400)]
    text: list[int] = []
    while len(text) < n:
        text += words[min(int(random.expovariate(0.01)), 399)]
    return text[:n]


def edited(random: Random, text: list[int], every: int) -> list[int]:
    """Tokens replaced, inserted and deleted: an edit in so many tokens."""
    new: list[int] = []
    i = 0
    while i < len(text):
        if random.random() < 1 / every:
            new += [random.randrange(3000) for _ in range(random.randint(0, 3))]
            i += random.randint(0, 3)
        else:
            new.append(text[i])
            i += 1
    return new


def drafted(random: Random, left: list[int], surety: float) -> Draft:
    """A chain of a drafter that is as often right as it says, `surety` in the mean."""
    tokens, logprobs, is_right = [], [], True
    for token in left[:BLOCK]:
        chance = random.betavariate(2 * surety, 2 * (1 - surety))
        is_right = is_right and random.random() < chance
        tokens.append(token if is_right else WRONG)
        logprobs.append(math.log(max(chance, 1e-4)))
    return Draft.chain(tokens, logprobs)


def found(
    copier: Copier, prompt: list[int], tokens: list[int], n: int, controller: Controller, n_own: int
) -> list[Copy]:
    """The copies that are worth a look: if no drafter drafts, those that may pay."""
    if n_own:
        return copies_of(copier, prompt, tokens, n)
    pays = copier.finds(prompt, tokens, n, controller.least_copied(1))
    copies = copier.offers()
    if copies and not pays:  # nothing is lost by not looking at them
        assert controller.rows([copy_alone(copies)[1]], drafted=False) == [1]
    return copies if pays else []


def seconds_of(
    costs: Machine,
    prompt: list[int],
    answer: list[int],
    prior: CopyPrior | None,
    controller: Controller | None = None,
    surety: float = 0.0,
) -> float:
    """The seconds of an answer's rounds; without a prior there are no copies, and without a
    `controller`, one of a drafter of this `surety`, no drafts."""
    there, now, random = costs(), 0.0, Random(len(prompt))
    controller = controller or Controller(costs(), 1, n_copied=MOST)
    policy = controller.open(shapes=[Chain(BLOCK)])
    copier = Copier(prior) if prior else None
    tokens, last = answer[:1], 1
    while len(tokens) < len(answer):
        left = answer[len(tokens) :]
        limit = min(MOST, len(left) - 1)
        (n,) = controller.n_drafts([policy], [limit])
        copies = found(copier, prompt, tokens, limit, controller, n) if copier else []
        if copies:
            (n,) = controller.skip_drafter_for_sure_copies([policy], [n], [copy_alone(copies)[1]])
        own = drafted(random, left, surety).clip(limit) if n else Draft.chain([])
        draft, (chances,) = own, controller.judge([policy], [own])
        if own and copies and copier:
            copies = judged_by_drafter(own, copies, copier.chances)
            copier.take_kinds(copies)
            draft, chances = joined(own, chances, copies, n_nodes=limit, n_leaves=1)
        elif copies:
            draft, chances = copy_alone(copies)
        if draft:
            (width,) = controller.rows([chances], drafted=n > 0)
            draft = draft.clip(width - 1)
        coming = iter(left)
        verdict = accept(draft, lambda _row, coming=coming: next(coming), lambda _token: False)
        n_rows = 1 + len(draft)
        draft_s = there.draft_s(1, 0) if n else 0.0
        step_s = there.step_s(n_rows, len(prompt)) + (there.switch_s if n_rows != last else 0.0)
        host_s = there.host_s + (there.draft_host_s if n else 0.0)
        if draft:
            controller.observe(policy, draft, verdict.tokens)
        controller.observe_round(n_rows, "chain", bool(n), len(prompt), draft_s, step_s, host_s)
        now += draft_s + step_s + host_s
        tokens, last = tokens + verdict.tokens, n_rows
    return now


def gains(name: str, every: int | None, seed: int) -> list[float]:
    """Of several requests, one after the other: the speed-up over plain decoding."""
    random, prior, costs = Random(seed), CopyPrior(), MACHINES[name]
    found = []
    for _ in range(3):
        prompt = source(random, 1500)
        other = [random.randrange(100_000) for _ in range(1000)]
        answer = other if every is None else edited(random, prompt, every)[:1000]
        plain = seconds_of(costs, prompt, answer, None)
        found.append(plain / seconds_of(costs, prompt, answer, prior))
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "every", "least"),
    [("gpu", 40, 3.0), ("gpu", 15, 2.0), ("experts", 40, 2.0), ("cpu", 40, 1.3), ("cpu", 8, 0.98)],
)
def test_edits_gain(name: str, every: int, least: float, seed: int) -> None:
    found = gains(name, every, seed)
    assert sum(found) / len(found) > least


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_is_lost_where_nothing_repeats(name: str) -> None:
    assert min(gains(name, None, 0)) > 0.99


@pytest.mark.parametrize("name", MACHINES)
def test_little_is_lost_where_repetitions_mislead(name: str) -> None:
    """Words come again, but never the same ones after them; the request before copied all."""
    random, prior, costs = Random(1), CopyPrior(), MACHINES[name]
    whole = source(random, 1500)
    seconds_of(costs, whole, whole[:1000], prior)
    text = source(random, 2500)
    prompt, answer = text[:1500], text[1500:]
    plain = seconds_of(costs, prompt, answer, None)
    assert plain / seconds_of(costs, prompt, answer, prior) > 0.97


@pytest.mark.one_in(12)
@pytest.mark.parametrize("surety", [0.5, 0.78])
@pytest.mark.parametrize(
    ("name", "every", "least"),
    [
        ("gpu", 40, 1.6),
        ("experts", 40, 1.6),
        ("cpu", 40, 1.3),
        *((n, None, 0.98) for n in MACHINES),
    ],
)
def test_drafts_and_copies_gain_over_drafts_alone(
    name: str, every: int | None, least: float, surety: float
) -> None:
    random, prior, costs = Random(3), CopyPrior(), MACHINES[name]
    with_copies, without = (Controller(costs(), 1 + BLOCK, n_copied=MOST) for _ in range(2))
    seconds = [0.0, 0.0]
    for _ in range(3):
        prompt = source(random, 1500)
        answer = [random.randrange(100_000) for _ in range(600)]
        if every is not None:
            answer = edited(random, prompt, every)[:600]
        seconds[0] += seconds_of(costs, prompt, answer, None, without, surety)
        seconds[1] += seconds_of(costs, prompt, answer, prior, with_copies, surety)
    assert seconds[0] / seconds[1] > least


@pytest.mark.parametrize("name", ["gpu", "experts"])
def test_the_drafter_is_left_out_only_for_copies_that_are_verified(name: str) -> None:
    """Else the round would be a plain one, with neither."""
    controller = Controller(MACHINES[name](), 1 + BLOCK, n_copied=MOST)
    policy = controller.open(shapes=[Chain(BLOCK)])
    (n,) = controller.n_drafts([policy], [MOST])
    assert n
    left_out = []
    for chance in (0.3, 0.5, 0.7, 0.9, 0.99):
        for n_copied in (2, 5, 15, 40):
            curve = list(accumulate([chance] * n_copied, mul))
            if controller.skip_drafter_for_sure_copies([policy], [n], [curve]) == [0]:
                left_out.append(controller.rows([curve], drafted=False))
    assert left_out
    assert [1] not in left_out
