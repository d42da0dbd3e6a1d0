"""Heads that were trained a little, on the tiny drafter: ours accepts the same with them as the
reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tiny_coder
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from pair_engine import answer, open_target
from reference import Reference
from trained_heads import (
    Text,
    of_drafter,
    of_reference,
    prompts,
    train_markov,
    train_selector,
    write,
    written,
)

torch.set_num_threads(1)  # the products are small
N = 64  # tokens of an answer


@dataclass(frozen=True)
class Texts:
    """Texts of the target: to train on, and to be judged by."""

    target: Target
    trained: list[Text]
    held_out: list[Text]


@pytest.fixture(scope="module")
def texts() -> Iterator[Texts]:
    chosen = tiny_coder.prompts()
    with open_target(tiny_coder.pair()[0], n_ctx=1024, n_seq=4) as target:
        trained = written(target, prompts(24), N)
        held_out = written(target, [*chosen["code"][:3], *chosen["chat"][:3]], N)
        yield Texts(target, trained, held_out)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_the_accepted_length_is_that_of_the_reference(
    family: str, texts: Texts, tmp_path: Path
) -> None:
    heads = (
        train_markov(texts.trained, per_text=8, epochs=2)
        if family == "dspark"
        else train_selector(texts.trained, per_text=4, epochs=1)
    )
    path = write(tmp_path / "drafter.gguf", heads, "Q8_0")
    target = texts.target
    drafter = open_drafter(path, target, n_seq=1, n_ctx=1024, n_threads=1)
    assert drafter.spec.family == family
    expected = of_reference(Reference(path, tiny_coder.pair()[0]), texts.held_out)
    assert expected > 1.5  # so that there is something to compare
    assert of_drafter(drafter, texts.held_out) / expected == pytest.approx(1, abs=0.03)
    if family == "dspark":
        # As on a GPU, where the tokens before are guessed, in four rounds.
        for for_trees in (False, True):
            guessing = open_drafter(
                path, target, n_seq=1, n_ctx=1024, n_threads=1, for_trees=for_trees
            )
            assert isinstance(guessing, FusedDrafter)
            guessing._open.n_rounds = 4
            assert of_drafter(guessing, texts.held_out) / expected == pytest.approx(1, abs=0.03)
            guessing.close()

    # In the engine, whose answers are the texts, a round is what it was there.
    engine = Engine(target, drafter, 1)
    emitted = rounds = 0
    for text in texts.held_out:
        engine.slots.forget_all()
        sequence = answer(engine, text.tokens[: text.n_prompt], 16, N)
        assert sequence.tokens == text.tokens[text.n_prompt :]
        emitted += sequence.stats.emitted - 1  # the first token follows from the prompt
        rounds += sequence.stats.rounds
    engine.slots.forget_all()
    drafter.close()
    assert emitted / rounds / expected == pytest.approx(1, abs=0.03)
