"""Drafters of every layout: the tiny target writes the same with them as alone.

Drafted by chains and by trees, one sequence and four, where answers are token by token those of
plain decoding: in F32, see `shapes`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_drafters
import tiny_coder
from dflash_local.convert.config.drafter_config import read_config
from dflash_local.convert.files.checkpoint import TensorEntry
from dflash_local.convert.tensors.names import plan_tensors
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.shape import ShapeName
from dflash_local.engine.engine import Engine
from dflash_local.loading import open_drafter
from gguf_files import parts
from hf_keys import EXPECTED
from pair_engine import request
from plain_answer import PlainAnswer
from shapes import exact_target
from shipped_layouts import LAYOUTS, in_layout

N = 20
# Whose drafts the target does not follow: trained with each position beside those after it, and to
# draft from the masks on.
UNTRAINED = {
    "causal",
    "DSpark from the anchor",
    "DSpark of Gemma 4",
    "DSpark of Nemotron",
    "from the anchor",
    "Gemma 4",
    "MiMo",
}


@pytest.fixture(scope="module")
def plain(f32_target: Path) -> Iterator[list[PlainAnswer]]:
    texts = tiny_coder.prompts()
    with exact_target("tree", f32_target, n_ctx=1024, n_seq=4) as target:
        yield [PlainAnswer(target, text, N) for text in [*texts["code"][:2], *texts["chat"][1:3]]]


def test_each_key_of_published_drafters_is_in_a_layout() -> None:
    published = {f"dflash.{key}" for keys in EXPECTED.values() for key in keys}
    tested = set(parts(tiny_coder.pair()[1])[0]).union(*(keys for keys, _ in LAYOUTS.values()))
    assert published - tested == set()


def test_each_tensor_of_published_drafters_is_in_a_layout() -> None:
    tested: set[str] = set()
    for _, change in LAYOUTS.values():
        tensors = dict(parts(tiny_coder.pair()[1])[1])
        change(tensors)
        tested |= set(tensors)
    published: set[str] = set()
    for name in hf_drafters.VARIANTS:
        config = read_config(hf_drafters.config(name), target=hf_drafters.target_facts(name))
        found = {
            key: TensorEntry(key, "BF16", shape, Path("model.safetensors"), 0, 0)
            for key, shape in hf_drafters.shapes(name).items()
        }
        published |= {plan.name for plan in plan_tensors(config, found)}
    assert published - tested == set()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_plain_decoding(
    layout: str, plain: list[PlainAnswer], tmp_path: Path
) -> None:
    path = in_layout(layout, tmp_path / "drafter.gguf")
    target = plain[0].target
    drafter = open_drafter(path, target, n_seq=4, n_ctx=1024, n_threads=1, for_trees=True)
    assert isinstance(drafter, FusedDrafter) and drafter.top_k > 1
    engine = Engine(target, drafter, 4)
    ways: list[tuple[ShapeName, int]] = [("chain", 8), ("tree", 16)]
    try:
        for shape, width in ways:
            engine.slots.forget_all()
            one = plain[0].asked(engine, width, shape=shape)
            assert (one.stats.tree_rounds > 0) == (shape == "tree")
            if layout not in UNTRAINED:
                assert one.stats.emitted / one.stats.rounds > 1.7
        engine.slots.forget_all()
        four = [
            engine.begin(request(each.prompt, width, N, shape=shape))
            for each, (shape, width) in zip(plain, ways * 2, strict=True)
        ]
        engine.run(four)
        assert [sequence.tokens for sequence in four] == [each.tokens for each in plain]
    finally:
        engine.slots.forget_all()
        drafter.close()
