"""Several sequences at once, some of width "auto": they join and leave, and each answer is its own.

Batches of several sequences round otherwise than single steps, so answers are compared by the gap
rule: those of chains with the noise of joint steps of some widths, those of trees where sums hardly
round.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from add_up import LOT, N_NODES, add_up
from adversarial import ScriptedDrafter
from dflash_local.draft.draft import Draft
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence as Answer
from dflash_local.stats import Stats
from dflash_local.target_model.target import Target
from elsewhere import DECIDERS, Fickle, controller
from gap_rule import joint_noise
from pair_engine import fused_drafter, prefill, request
from plain_answer import PlainAnswer
from shapes import NOISE, exact_target, of_both_shapes

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")
N = 32
N_SEQ = 4


class Bench:
    """A target with room for four sequences, and plain answers to some prompts."""

    def __init__(self, target: Target, drafter: FusedDrafter, shape: DraftShape) -> None:
        """`shape` is what requests ask for that say nothing else."""
        self.target, self.drafter, self.shape = target, drafter, shape
        self.n_nodes = 0 if shape == "chain" else N_NODES
        known = tiny_coder.prompts()
        texts = [*known["code"][:3], *known["chat"][:3]]
        self.plain = [PlainAnswer(target, text, N) for text in texts]
        four = self.plain[1:5]
        self.noise = NOISE
        if shape == "chain":
            self.noise = max(
                joint_noise(target, [p.prompt for p in four], [p.tokens for p in four], widths)
                for widths in ([16] * 4, [9, 2, 5, 1])
            )

    def engine(self, decider: str | Fickle) -> Engine:
        chosen = controller(decider, self.n_nodes) if isinstance(decider, str) else decider
        engine = Engine(self.target, self.drafter, N_SEQ, chosen)
        engine.slots.forget_all()
        return engine

    def begin(self, engine: Engine) -> list[Answer]:
        """Three requests that leave all to the controller."""
        prompts = [plain.prompt for plain in self.plain[:3]]
        return [engine.begin(request(each, "auto", N, shape=self.shape)) for each in prompts]

    def check(self, engine: Engine, which: int, found: Answer) -> None:
        """Equal as far as it went, with stats that add up and caches in step."""
        plain = self.plain[which]
        tokens = found.tokens
        n = len(tokens)
        if plain.equals(tokens, self.noise):
            whole = n == len(plain.tokens)
            assert found.finish_reason == (plain.finish_reason if whole else found.finish_reason)
        if found.policy is not None:
            add_up(found)
        assert found.stats.emitted == n == 1 + found.stats.rounds + found.stats.accepted
        slot = found.slot
        assert not slot.pending
        assert slot.cached == [*found.request.prompt, *tokens][:-1]
        held = self.drafter.length(slot.seq)
        if found.request.drafts and not slot.gave_up:
            assert held == len(slot.cached)
        else:
            assert held <= len(slot.cached)


@pytest.fixture(scope="module")
def bench(shape: DraftShape) -> Iterator[Bench]:
    """A bench; the controller may choose trees, if there are any."""
    with exact_target(shape, n_ctx=1024, n_seq=N_SEQ) as target:
        yield Bench(target, fused_drafter(target), "auto" if shape == "tree" else "chain")


Order = tuple[int, Any, int, int] | tuple[int, Any, int, int, DraftShape]
"""A request: prompt, width, tokens, step at which it comes, and if it asks for one, shape."""


def play(bench: Bench, engine: Engine, orders: Sequence[Order]) -> list[Answer]:
    """Requests, each in the next slot that is free; each answer is checked as it leaves."""
    waiting, working, done = list(orders), [], []
    step = 0
    while waiting or working:
        for order in [each for each in waiting if each[3] <= step][: N_SEQ - len(working)]:
            which, width, n, _, *shapes = order
            waiting.remove(order)
            prompt, shape = bench.plain[which].prompt, shapes[0] if shapes else bench.shape
            working.append((which, engine.begin(request(prompt, width, n, shape=shape))))
        engine.step([sequence for _, sequence in working])
        step += 1
        for which, sequence in [each for each in working if each[1].finish_reason]:
            working.remove((which, sequence))
            engine.end(sequence)
            bench.check(engine, which, sequence)
            done.append(sequence)
    return done


MIXED: list[Order] = [
    (0, "auto", N, 0),
    (1, 16, 25, 0),
    (2, 0, 29, 1),
    (3, "auto", 12, 3),
    (4, "auto", N, 5),
    (5, 5, N, 5),
    (2, "auto", N, 9),
    (1, 0, 9, 9),
    (0, "auto", 1, 10),
    (3, "auto", N, 11),
]
OF_ALL_SHAPES: list[Order] = [
    (0, "auto", N, 0, "auto"),
    (1, 16, 25, 0, "tree"),
    (2, 0, 29, 1, "tree"),
    (3, "auto", 12, 3, "tree"),
    (4, 48, N, 5, "auto"),
    (5, 5, N, 5, "chain"),
    (2, "auto", N, 9, "auto"),
    (1, 4, 9, 9, "tree"),
    (0, "auto", 1, 10, "tree"),
    (3, "auto", N, 11, "auto"),
    (0, "auto", N, 12, "chain"),
]


ALIKE: list[Order] = [(i, "auto", N, 0) for i in range(4)]


@pytest.mark.one_in(3)
@of_both_shapes(
    "decider, orders",
    [(decider, ALIKE) for decider in DECIDERS]
    + [(decider, MIXED) for decider in ("cheap", "even", "resigning", "by lot")],
    [("cheap", ALIKE), *((decider, OF_ALL_SHAPES) for decider in ("cheap", "by lot"))],
)
def test_auto_fixed_and_plain_ones_join_and_leave(
    bench: Bench, decider: str, orders: list[Order]
) -> None:
    done = play(bench, bench.engine(decider), orders)
    assert len(done) == len(orders)
    for sequence in done:
        width = sequence.request.draft_width
        assert width == "auto" or (sequence.stats.drafted > 0) == (width > 0)
        assert not sequence.stats.tree_rounds or sequence.request.draft_shape != "chain"
    total = Stats.sum(sequence.stats for sequence in done)
    assert total.drafted > 0 or decider == "hopeless"
    assert total.tree_rounds < total.rounds or orders is ALIKE
    assert (total.tree_rounds > 0) == (bench.n_nodes > 0)


@of_both_shapes("decider", ["cheap", "even", "hopeless", "by lot"], LOT)
def test_one_that_is_cancelled_leaves_the_others_alone(bench: Bench, decider: str) -> None:
    engine = bench.engine(decider)
    sequences = bench.begin(engine)
    while any(sequence.finish_reason is None for sequence in sequences):
        if len(sequences[1].tokens) > 5:
            sequences[1].cancelled.set()
        engine.step([sequence for sequence in sequences if sequence.finish_reason is None])
    assert any(sequence.stats.tree_rounds for sequence in sequences) == (bench.n_nodes > 0)
    for i, sequence in enumerate(sequences):
        engine.end(sequence)
        bench.check(engine, i, sequence)
    assert [s.finish_reason == "cancelled" for s in sequences] == [False, True, False]


class Listener(ScriptedDrafter):
    """Keeps all that is injected; its drafts are as good as none."""

    def __init__(self) -> None:
        super().__init__(lambda *_: Draft.chain([5, 6, 7]), n_seq=N_SEQ)
        self.rows: list[list[NDArray[np.float32]]] = [[] for _ in range(N_SEQ)]

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        super().inject(seq, features)
        self.rows[seq].append(np.asarray(features).copy())


@of_both_shapes("seed", range(3), [11])
def test_the_drafter_hears_of_every_row_of_its_sequence(bench: Bench, seed: int) -> None:
    """Once and in order, whether drafted, decoded ahead or among those of other sequences."""
    drafter = Listener()
    engine = Engine(bench.target, drafter, N_SEQ, Fickle(seed, n_nodes=bench.n_nodes))
    engine.slots.forget_all()
    sequences = bench.begin(engine)
    engine.run(sequences)
    assert any(sequence.stats.tree_rounds for sequence in sequences) == (bench.n_nodes > 0)
    for slot in engine.slots:
        assert len(slot.cached) == drafter.length(slot.seq)
    texts = {s.slot.seq: [*s.request.prompt, *s.tokens][:-1] for s in sequences}
    engine.slots.forget_all()
    for seq, text in texts.items():
        heard, told = np.concatenate(drafter.rows[seq]), prefill(bench.target, text)
        bench.target.clear(0)
        # Batches round otherwise; another row's states have nothing in common with these.
        apart = np.linalg.norm(heard - told, axis=1) / np.linalg.norm(told, axis=1)
        assert apart.max() < 0.1


@of_both_shapes("decider", ["cheap", "even", "hopeless", "by lot"], LOT)
def test_a_context_that_fills_up_ends_answers_for_their_length(
    shape: DraftShape, decider: str
) -> None:
    """Each with as many tokens as there was room for; none is wrong."""
    asked, n_nodes = ("auto", N_NODES) if shape == "tree" else (shape, 0)
    with exact_target(shape, n_ctx=256, n_seq=2) as target:
        engine = Engine(target, fused_drafter(target), 2, controller(decider, n_nodes))
        text = target.vocabulary.tokenize("\n".join(tiny_coder.prompts()["code"]))
        sequences = [
            engine.begin(request(text[i : i + 90], "auto", None, shape=asked)) for i in (0, 40)
        ]
        engine.run(sequences)
        assert any(sequence.stats.tree_rounds for sequence in sequences) == (n_nodes > 0)
        for sequence in sequences:
            assert sequence.finish_reason in ("length", "stop")
            add_up(sequence)
            assert sequence.slot.cached == [*sequence.request.prompt, *sequence.tokens][:-1]
        used = sum(len(sequence.slot.cached) for sequence in sequences)
        ended = [sequence.finish_reason for sequence in sequences]
        assert used == 256 or "stop" in ended
