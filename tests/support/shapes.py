"""Small pairs for each shape of drafts, where answers are plain decoding's token by token.

Chains: in Q8_0 with a q8_0 KV cache, to the bit. The cells of a tree lie in another order than
those of plain decoding, so that sums round otherwise, and whatever rounds to few bits makes much of
that. So trees: weights and KV cache in F32, and no flash attention, which would round keys and
values to f16. The rest moves a logit by less than 1e-5: answers part where the top two are closer
than that, draws as seldom.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mini_pair
import tiny_coder
from dflash_local import Model, Result, load
from dflash_local.draft.shape import DraftShape
from dflash_local.sampling.params import TokenLogprob
from dflash_local.stats import Stats
from dflash_local.target_model.cells import branches_of_each
from dflash_local.target_model.target import Target
from gguf_files import dequantised
from pair_engine import open_target

SHAPES: tuple[DraftShape, ...] = ("chain", "tree")
NOISE = 1e-4
"""More than rounding moves a log-probability where trees are compared."""
_EXACT: dict[str, dict[str, Any]] = {
    "chain": {"kv_type": "q8_0"},
    "tree": {"kv_type": "f32", "flash_attn": False},
}


@pytest.fixture(scope="session")
def f32_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with its weights in F32."""
    return dequantised(tiny_coder.pair()[0], tmp_path_factory.mktemp("f32") / "tiny-coder-f32.gguf")


@pytest.fixture(scope="session")
def chain_model() -> Iterator[Model]:
    """The tiny pair, all drafts chains."""
    with exact_model("chain", tiny_coder.pair()[0], n_ctx=2048) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def tree_model(f32_target: Path) -> Iterator[Model]:
    """The tiny pair, all drafts trees."""
    with exact_model("tree", f32_target, n_ctx=2048) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> DraftShape:
    """First the one, then the other."""
    drafts: DraftShape = request.param
    return drafts


@pytest.fixture(scope="module")
def either_model(shape: DraftShape) -> Iterator[Model]:
    """The mini pair for drafts of this shape."""
    with exact_model(shape, n_ctx=2048) as loaded:
        yield loaded


def of_both_shapes(names: str, chain: Iterable[Any], tree: Iterable[Any]) -> pytest.MarkDecorator:
    """A test of either shape and of the values of `names`, tuples if these are several. Fewer are
    for trees: if theirs are compared, a step takes longer."""
    cases = [
        (shape, *(values if isinstance(values, tuple) else (values,)))
        for shape, found in (("chain", chain), ("tree", tree))
        for values in found
    ]
    return pytest.mark.parametrize(
        ["shape", *names.split(", ")], cases, indirect=["shape"], scope="module"
    )


@contextmanager
def exact_model(shape: DraftShape, target: Path | None = None, **options: Any) -> Iterator[Model]:
    """The mini pair, or another target with its drafter, on the CPU; each request drafts up to 15
    tokens."""
    target = target or exact_file(shape)
    on_cpu: dict[str, Any] = {"n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    draft = mini_pair.drafter_of(target)
    with load(target, draft, draft_shape=shape, **on_cpu, **_EXACT[shape], **options) as loaded:
        # Left to itself it would draft only where that pays, which says nothing about drafts.
        loaded.draft_width = loaded.engine.max_width
        yield loaded


@contextmanager
def exact_target(shape: DraftShape, target: Path | None = None, **options: Any) -> Iterator[Target]:
    """The same as a bare target; options are those of `open_target`."""
    n_branches = branches_of_each(options.get("n_seq", 1), options.get("n_batch", 512))
    forks = {"n_branches": n_branches} if shape == "tree" else {}
    path = target or exact_file(shape)
    with open_target(path, **_EXACT[shape], **forks, **options) as opened:
        yield opened


def exact_file(shape: DraftShape) -> Path:
    """The mini target for drafts of a shape."""
    return mini_pair.pair("F32" if shape == "tree" else "Q8_0")[0]


def assert_equal(drafted: Result, plain: Result) -> None:
    """Fail unless these are one answer. Of their log-probabilities trees may move the last bits."""
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason
    if drafted.stats.tree_rounds:
        assert_close(drafted.logprobs, plain.logprobs)
    else:
        assert drafted.logprobs == plain.logprobs


def assert_as_well_drafted(ours: Stats, theirs: Stats) -> None:
    """Fail unless two answers came in as many rounds. The drafter computes with eight bits, so that
    rounding may bring another node into a tree now and then."""
    if not ours.tree_rounds:
        assert ours.accepted_lengths == theirs.accepted_lengths
    else:
        assert abs(ours.rounds - theirs.rounds) <= 1 + theirs.rounds // 8


def assert_close(ours: list[TokenLogprob], theirs: list[TokenLogprob]) -> None:
    """Fail unless these are the same but for rounding."""
    assert [entry.token for entry in ours] == [entry.token for entry in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=NOISE)
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=NOISE)
