"""Drafted answers of a mixture of experts are the plain ones, but where rounding chooses another
token or another expert: the gap rule with the noise of the row itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from gap_rule import equal_by_gap_rule, noise_of_row
from lab.shapes.writer import write_pair
from mini_shapes import EXPERTS
from pair_engine import answer, open_target

WIDTH = 8
N_VOCAB = EXPERTS.n_vocab


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random weights in BF16, whose products depend on the batch."""
    target, drafter = write_pair(EXPERTS, "BF16", tmp_path_factory.mktemp("experts"))
    spec = read_drafter(GgufFile.open(drafter))
    with open_target(target, kv_type="f16", tapped_layers=spec.target_layers) as opened:
        yield Engine(opened, FusedDrafter(drafter, opened, spec, n_seq=1, n_ctx=512))


def texts(n: int, length: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, N_VOCAB, length).tolist() for _ in range(n)]


def test_in_q8_0_drafted_answers_are_the_plain_ones_to_the_bit(tmp_path: Path) -> None:
    """The weights of routers are in F32 there, too, whose products would depend on the batch."""
    path, drafter = write_pair(EXPERTS, "Q8_0", tmp_path)
    routers = [t for name, t in GgufFile.open(path).tensors.items() if "gate_inp" in name]
    assert routers and all(tensor.type == GGMLQuantizationType.F32 for tensor in routers)
    spec = read_drafter(GgufFile.open(drafter))
    with open_target(path, kv_type="q8_0", tapped_layers=spec.target_layers) as target:
        engine = Engine(target, FusedDrafter(drafter, target, spec, n_seq=1, n_ctx=512))
        for seed, prompt in enumerate(texts(8, 40)):
            # Random drafts are mostly rejected: what is compared are the rows of wide passes.
            options = {"temperature": 0.8, "seed": seed, "logprobs": 2}
            plain, drafted = (answer(engine, prompt, n, 32, **options) for n in (0, WIDTH))
            assert drafted.tokens == plain.tokens
            assert drafted.logprobs == plain.logprobs
            engine.slots.forget_all()


@pytest.mark.slow
def test_drafted_answers_are_the_plain_ones_or_an_expert_differs(
    engine: Engine, record_property: Callable[[str, object], None]
) -> None:
    different, target = 0, engine.target
    for prompt in texts(6, 40):
        engine.slots.forget_all()
        plain = answer(engine, prompt, 0, 32, logprobs=2)
        engine.slots.forget_all()
        drafted = answer(engine, prompt, WIDTH, 32).tokens
        engine.slots.forget_all()
        different += not equal_by_gap_rule(
            plain.tokens,
            plain.logprobs,
            drafted,
            0.0,
            lambda at, p=prompt, t=plain.tokens: noise_of_row(target, p, t, at, (WIDTH, 3, 16)),
        )
    print(f"{different} of 6 answers differ")
    record_property("answers that differ", different)
