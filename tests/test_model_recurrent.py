"""Loaded models with recurrent layers: they draft where rejected rows can be taken back by replay
or by llama.cpp's snapshots, and say so."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from dflash_local import Model, load, loading
from dflash_local.controller.calibration import budget_s
from dflash_local.controller.costs import Costs
from dflash_local.errors import BackendError, InputError
from dflash_local.fit.architectures import CELLS, TAPPED_ARCHITECTURES, WayBack
from dflash_local.fit.options import LoadOptions
from dflash_local.llama.runtime import Device
from dflash_local.pair import open_pair
from dflash_local.setup import Setup
from dflash_local.target_model.target import Target
from hybrid import REPLAYED, TAPPED, TAPS, write_hybrid
from lab.shapes.shape import DrafterShape, Experts, Heads
from lab.shapes.writer import write_pair
from mini_shapes import SHORT_CONV
from shapes import assert_equal
from synthetic import Markov, write_drafter

N = 24
OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "kv_type": "q8_0",
    "n_gpu_layers": 0,
    "quiet": True,
}
DRAFTING = OPTIONS | {"draft_width": 8}  # whether it pays on this machine or not
PROMPTS = ["def read(path):", "Say something about trees, and about", "x"]
KINDS: dict[str, dict[str, Any]] = {"fused": {}, "llama.cpp": {"markov": Markov()}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """A target of an architecture, and a drafter for it that runs in the engine of that name."""
    folder = tmp_path_factory.mktemp("hybrid")

    def find(architecture: str, kind: str) -> tuple[Path, Path]:
        target, draft = folder / f"{architecture}.gguf", folder / f"{architecture}-{kind}.gguf"
        if not target.exists():
            # With seed 0 its first answer has no text to stop at.
            seed = 1 if architecture == "qwen3next" else 0
            write_hybrid(target, architecture, tiny_coder.pair()[0], seed=seed)
        if kind == "copies":
            return target, Path(kind)
        if not draft.exists():
            write_drafter(draft, target, target_layers=TAPS, **KINDS[kind])
        return target, draft

    return find


@pytest.fixture(
    scope="module",
    params=[
        ("qwen35", "fused"),
        ("qwen3next", "fused"),
        ("lfm2moe", "fused"),
        ("lfm2", "llama.cpp"),
        ("qwen35moe", "fused"),
        ("nemotron_h", "copies"),
    ],
    ids="-".join,
)
def models(
    request: pytest.FixtureRequest, files: Callable[[str, str], tuple[Path, Path]]
) -> Iterator[tuple[Model, Model]]:
    """One that drafts, and one that decodes the same target plainly."""
    target, draft = files(*request.param)
    with load(target, draft, n_seq=2, **DRAFTING) as drafting, load(target, **OPTIONS) as plain:
        yield drafting, plain


GRAMMAR = 'root ::= "[" ([0-9] ", ")* "]"'
WAYS: list[tuple[str, dict[str, Any]]] = [
    *product(PROMPTS, ({}, {"temperature": 0.9, "seed": 3})),
    # The grammar allows little, so that copies come true, too.
    *product(
        ["[1, 2, 3, 1, 2, 3, 1, 2, 3, ]\n"],
        ({"grammar": GRAMMAR}, {"logprobs": 3}, {"grammar": GRAMMAR, "logprobs": 1}),
    ),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("width", [2, 8, "auto"])
def test_answers_are_those_of_plain_decoding(models: tuple[Model, Model], width: Any) -> None:
    drafting, plain = models
    for prompt, params in WAYS:
        drafting.forget()
        plain.forget()
        found = drafting.generate(prompt, max_tokens=N, draft_width=width, **params)
        assert_equal(found, plain.generate(prompt, max_tokens=N, **params))
        if width != "auto" and drafting.drafter is not None and prompt in PROMPTS:
            assert found.stats.drafted > 0


@pytest.fixture
def no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Windows: llama.cpp does not allow replay."""
    monkeypatch.setattr("dflash_local.target_model.replay.native.can_replay", lambda *_: False)


@pytest.mark.usefixtures("no_replay")
def test_the_plan_counts_the_snapshots(
    files: Callable[[str, str], tuple[Path, Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    target, draft = files("lfm2", "fused")
    with load(target, draft, **DRAFTING | {"quiet": False}, draft_shape="tree") as model:
        said = capfd.readouterr().err
        assert model.engine.max_width == 8
    assert "for recurrent states, 7 snapshots of each" in said
    assert "drafts are chains: the target has recurrent layers" in said


@pytest.mark.one_in(12)
@pytest.mark.parametrize("architecture", [a for a in REPLAYED if a in TAPPED_ARCHITECTURES])
def test_replay_takes_no_snapshots(
    architecture: str,
    files: Callable[[str, str], tuple[Path, Path]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    target, draft = files(architecture, "fused")
    with load(target, draft, **DRAFTING | {"quiet": False}) as model:
        assert "recurrent states, rejected drafts of up to 7 tokens are replayed" in (
            capfd.readouterr().err
        )
        assert model.target.way_back == WayBack("replay", 7)
        assert model.engine.max_width == 8 and model.plan is not None
        n_states = model.plan.state_bytes
    with load(target, **OPTIONS) as plain:
        assert plain.plan is not None and plain.plan.state_bytes == n_states


@pytest.mark.usefixtures("no_replay")
def test_where_llama_cpp_does_not_allow_replay(
    files: Callable[[str, str], tuple[Path, Path]],
) -> None:
    """There are snapshots, or no drafts."""
    with load(*files("qwen35", "fused"), **DRAFTING) as model:
        assert model.target.way_back == WayBack("snapshots", 7)
    with load(*files("qwen3next", "fused"), n_seq=2, **OPTIONS) as model:
        assert (model.target.way_back, model.target.max_width, model.drafter) == (CELLS, 1, None)
        stats = model.generate(PROMPTS[0], max_tokens=8, draft_width=8).stats
        assert stats.drafted == 0 and "cannot be taken back here" in (stats.drafting or "")
    with pytest.raises(InputError, match="draft_width is 8, and drafting is off: the target has"):
        load(*files("qwen3next", "fused"), **DRAFTING)


def test_without_a_way_back_copies_are_off(
    files: Callable[[str, str], tuple[Path, Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    with load(*files("mamba2", "copies"), **OPTIONS | {"quiet": False}) as model:
        assert capfd.readouterr().err.count("cannot be taken back here") == 1
        assert (model.target.max_width, model.engine.copies) == (1, None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["nemotron_h", "granitehybrid"])
def test_where_a_pass_cannot_be_replayed_after_all(
    architecture: str,
    files: Callable[[str, str], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is seen in the first pass, whose graph here has nothing that replay knows."""
    name = "dflash_local.target_model.replay.REPLAY_ARCHITECTURES"
    monkeypatch.setattr(name, frozenset({architecture}))
    target, draft = files(architecture, "copies")
    with load(target, **OPTIONS) as plain:
        right = [plain.generate(prompt, max_tokens=N).tokens for prompt in PROMPTS]
    with load(target, draft, n_seq=2, **OPTIONS | {"quiet": False}) as model:
        said = capfd.readouterr().err
        assert "cannot replay the recurrent state" in said
        way_back = WayBack("snapshots", 15) if architecture == "nemotron_h" else CELLS
        assert ("cannot be taken back" in said) == (way_back == CELLS)
        assert model.target.way_back == way_back and model.target.max_width == 1 + way_back.rows
        found = [model.generate(prompt, max_tokens=N, draft_width=8) for prompt in PROMPTS]
    assert [answer.tokens for answer in found] == right
    with load(target, draft, draft_width=0, **OPTIONS) as model:
        assert model.drafter is None and model.target.max_width == 1


def test_a_target_that_the_memory_does_not_hold_twice_is_loaded_alone(
    files: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows cannot be replayed after all, another way back is tried beside the loaded one."""
    ensure_loadable = loading.ensure_loadable

    def short(*args: Any, **kwargs: Any) -> WayBack:
        if kwargs["way_back"].kind != "replay":
            raise BackendError("the trial load in a child process failed (load): no memory")
        return ensure_loadable(*args, **kwargs)

    target, draft = files("qwen35", "fused")
    with load(target, "none", **OPTIONS) as plain:
        right = plain.generate(PROMPTS[0], max_tokens=N).tokens
    monkeypatch.setattr(loading, "ensure_loadable", short)
    monkeypatch.setattr(loading, "takes_back", lambda _: False)
    said: list[str] = []
    with load(target, draft, say=said.append, **OPTIONS) as model:
        assert model.drafter is None and model.target.way_back == CELLS
        found = model.generate(PROMPTS[0], max_tokens=N)
    assert found.tokens == right and "no memory" in (found.stats.drafting or "")
    assert sum("drafting is off" in line for line in said) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_replay")
def test_there_are_as_many_snapshots_as_llama_cpp_has_room_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of a deep model are more nodes than its graph can have, which would end the process."""
    few = {"n_embd": 64, "n_ff": 64, "heads": Heads(2, 1, 32)}
    small = replace(SHORT_CONV, experts=Experts(4, 2, 64, n_dense=2), **few)
    deep = replace(small, n_layer=16, drafter=DrafterShape(1, 64, block_size=32))
    pair = write_pair(deep, "Q8_0", tmp_path)
    with load(*pair, **DRAFTING | {"quiet": False}) as model:
        said = capfd.readouterr().err
        assert "31 snapshots of each" in said and "15 snapshots of each" in said
        assert (model.target.way_back.rows, model.engine.max_width) == (15, 16)
        assert model.generate(PROMPTS[0], max_tokens=4).stats.drafted > 0
    with (
        pytest.warns(UserWarning, match="has room for 15 snapshots .*, not 31: so many"),
        Target.load(pair[0], n_ctx=512, n_threads=1, way_back=WayBack("snapshots", 31)) as target,
    ):
        assert target.way_back.rows == 15


def test_where_layers_are_on_both_sides_there_are_snapshots(
    files: Callable[[str, str], tuple[Path, Path]],
) -> None:
    """The inputs of a layer may then be on another device than its state."""
    target, draft = files("qwen35", "fused")
    pair, gpu = open_pair(target, draft), Device("CUDA0", "", "gpu", 8 << 30, 8 << 30, "0")
    cpu = Device("CPU", "", "cpu", 8 << 30, 8 << 30)
    for n_layers, kind in ((0, "replay"), (2, "snapshots"), (6, "replay"), (-1, "replay")):
        setup = Setup(pair, LoadOptions(n_ctx=512, n_gpu_layers=n_layers), [gpu, cpu])
        assert setup.plan.way_back == WayBack(kind, 7)
    other = replace(gpu, name="Vulkan0")
    setup = Setup(pair, LoadOptions(n_ctx=512), [other, cpu])
    assert setup.plan.way_back == WayBack("snapshots", 7)
    # Those of qwen3next could not be taken back.
    pair = open_pair(*files("qwen3next", "fused"))
    for n_layers, drafts in ((0, True), (2, False)):
        setup = Setup(pair, LoadOptions(n_ctx=512, n_gpu_layers=n_layers), [gpu, cpu])
        assert (setup.pair.draft is not None) == drafts == (setup.plain_because is None)


@pytest.mark.usefixtures("no_replay")
def test_where_drafting_cannot_pay_there_are_no_snapshots(
    files: Callable[[str, str], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path))
    target, draft = files("lfm2", "fused")
    options = OPTIONS | {"quiet": False}
    with load(target, draft, draft_width=8, **options) as model:
        right = model.generate(PROMPTS[0], max_tokens=N).tokens
        assert model.engine.controller is not None
        # Kept for the next load: a draft costs more than all that it could bring.
        steps, drafts = {8: {1: 0.01, 8: 0.02}}, {8: {1: 0.07}}
        model.engine.controller.costs = Costs(steps, drafts, budget_s=budget_s())
    capfd.readouterr()
    with load(target, draft, **options) as model:
        assert capfd.readouterr().err.count("could not pay here") == 1
        assert (model.target.way_back, model.drafter) == (CELLS, None)
        assert model.plan is not None and model.plan.way_back == CELLS
        for width in (None, 8):
            model.forget()
            found = model.generate(PROMPTS[0], max_tokens=N, draft_width=width)
            assert (found.tokens, found.stats.drafted) == (right, 0)
            assert "could not pay here" in (found.stats.drafting or "")
        with pytest.raises(InputError, match="expected a whole number"):
            model.generate(PROMPTS[0], draft_width=-1)
    with load(target, draft, draft_width=8, **options) as model:
        assert model.generate(PROMPTS[0], max_tokens=N).stats.drafted > 0


@pytest.mark.usefixtures("no_replay")
def test_a_width_of_plain_decoding_needs_no_snapshots(
    files: Callable[[str, str], tuple[Path, Path]],
) -> None:
    target, draft = files("lfm2", "fused")
    with load(target, draft, draft_width=0, **OPTIONS) as model:
        assert (model.target.way_back, model.drafter) == (CELLS, None)
        assert model.generate(PROMPTS[0], max_tokens=4).stats.drafting is None
        found = model.generate(PROMPTS[0], max_tokens=4, draft_width=8)
        assert "draft width was 0 at the load" in (found.stats.drafting or "")


def test_where_drafts_cost_a_plain_step_nothing_they_can_be_asked_for(
    files: Callable[[str, str], tuple[Path, Path]],
) -> None:
    for pair in (tiny_coder.pair(), files("qwen35", "fused")):
        with load(*pair, draft_width=0, **OPTIONS) as model:
            assert model.drafter is not None and model.draft_width == 0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("architecture", TAPPED)
def test_exactness_is_told_of_them(
    architecture: str,
    files: Callable[[str, str], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The passes that are compared begin with the same state."""
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path))
    monkeypatch.setattr("dflash_local.target_model.exactness._MOST_ROWS", 32)
    with load(files(architecture, "fused")[0], **OPTIONS) as model:
        assert model.exactness().exact_width(32) == 16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["qwen35", "qwen3next"])
def test_a_conversation_goes_on_after_a_restart(
    architecture: str, files: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    target, draft = files(architecture, "fused")
    prompt = "\n".join(tiny_coder.prompts()["chat"])[:900]
    following = prompt + " And now?"
    kept = {"cache_mb": 64, "cache_dir": tmp_path, **DRAFTING}
    with load(target, **OPTIONS) as plain:
        right = plain.generate(following, max_tokens=N).tokens
    with load(target, draft, **kept) as model:
        n = model.generate(prompt, max_tokens=N, draft_width=8).stats.prompt_tokens
        assert n > 96
    with load(target, draft, **kept) as model:
        found = model.generate(following, max_tokens=N, draft_width=8)
        assert found.stats.cached_tokens == n - 32
        assert found.tokens == right and found.stats.drafted > 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("architecture", ["lfm2", "nemotron_h", "qwen3next", "kimi-linear"])
def test_copies_are_asked_for(tmp_path: Path, architecture: str) -> None:
    """By themselves they would slow down every step, or take memory for states."""
    path = write_hybrid(tmp_path / "target.gguf", architecture, tiny_coder.pair()[0])
    prompt = [400, 401] * 8
    few: dict[str, Any] = {"max_tokens": N, "logit_bias": {400: 60.0, 401: 60.0}}
    with load(path, **OPTIONS) as plain:
        assert plain.draft_width == 0 and plain.target.max_width == 1
        expected = plain.generate(prompt, **few)
        assert expected.stats.drafted == 0
    with load(path, "copies", **DRAFTING) as copying:
        found = copying.generate(prompt, **few)
        assert found.tokens == expected.tokens
        assert found.stats.copied == found.stats.drafted > 0
        assert found.stats.accepted > 0
