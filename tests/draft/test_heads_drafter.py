"""The heads of a target's own file as a drafter: answers are those of plain decoding, and drafts
those that llama.cpp makes with the same heads."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import NoReturn

import gguf
import numpy as np
import pytest

import tiny_coder
from dflash_local import load, loading
from dflash_local.draft.assistant_drafter import AssistantDrafter
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import HeadsDrafter
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, FileError, InputError, PairError
from dflash_local.fit.architectures import GRAPHED_HEADS
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.pairing import check_heads, check_pair
from dflash_local.gguf.drafter_spec import HeadsSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from dflash_local.pair import Pair, open_pair
from dflash_local.prefixes.store import PrefixStore
from dflash_local.setup import Setup
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from elsewhere import MACHINES, Elsewhere
from gguf_files import UINT32, Tensor, changed, edited
from heads import (
    TARGETS,
    Files,
    N,
    assistant_of,
    check_four_at_once,
    check_one_answer,
    drafter_of,
    drafts,
    drafts_of_llama_cpp,
    read,
    target_with_any_heads,
    target_with_heads,
)
from long_text import PYTHON_SOURCE
from pair_engine import answer, consistent
from pairwise import pairwise_cases
from plain_answer import PlainAnswer

SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}
WAYS = {"greedy": {}, "seeded": SEEDED}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module", params=TARGETS)
def target(files: Files, request: pytest.FixtureRequest) -> Iterator[Target]:
    with target_with_any_heads(files[request.param], n_seq=4) as opened:
        yield opened


@pytest.fixture
def graphed() -> bool:
    """Whether a graph of ours drafts, or llama.cpp's context for heads."""
    return False


@pytest.fixture
def engine(target: Target, graphed: bool) -> Iterator[Engine]:
    drafter = drafter_of(target, graphed)
    opened = Engine(target, drafter, 4)
    opened.slots.forget_all()
    yield opened
    opened.slots.forget_all()
    drafter.close()


ENGINES = [
    (name, graphed)
    for name, (architecture, _) in TARGETS.items()
    for graphed in (False, True)[: 1 + (architecture in GRAPHED_HEADS)]
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("target", "graphed", "way", "width"),
    [(*who, way, n) for who, way, n in pairwise_cases(ENGINES, list(WAYS), (3, 7, "auto"))],
    indirect=["target"],
    scope="module",
)
def test_one_answer(target: Target, engine: Engine, way: str, width: int | str) -> None:
    check_one_answer(engine, width, **WAYS[way])  # type: ignore[arg-type]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("target", "graphed", "way"),
    [(*who, way) for who, way in zip(ENGINES, cycle(WAYS), strict=False)],
    indirect=["target"],
    scope="module",
)
def test_four_at_once(target: Target, engine: Engine, way: str) -> None:
    check_four_at_once(engine, **WAYS[way])


def share_accepted(engine: Engine) -> float:
    """Of the drafts in some answers."""
    stats = [answer(engine, [t, t + 1, t + 2], 7, N).stats for t in range(1000, 5000, 500)]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats)


@pytest.mark.slow
def test_heads_that_are_right_are_accepted(files: Files) -> None:
    for name in TARGETS:
        with target_with_any_heads(files[name]) as target:
            share = share_accepted(Engine(target, drafter_of(target)))
        # Behind the end of an answer nothing is accepted.
        assert (share > 0.9) == ("always" in name) and (share < 0.1) == ("never" in name), name


@pytest.mark.one_in(3)
def test_drafts_are_llama_cpp_s(engine: Engine) -> None:
    """They are llama.cpp's, with the whole text at once, in pieces, and after drafts that were
    rejected. An assistant's window is shorter than the text."""
    target, drafter = engine.target, engine.drafter
    assert drafter
    assistant = assistant_of(target.path)
    text = target.vocabulary.tokenize(PYTHON_SOURCE)[:50]
    features = read(engine, text)
    states = np.asarray(features)
    expected = drafts_of_llama_cpp(target, [*text, 300], states, 6, assistant)
    assert drafts(drafter, 300, features) == expected
    assert drafts(drafter, 300, StoredFeatures(target, [])) == expected
    other = drafts_of_llama_cpp(target, [*text, 301], states, 6, assistant)
    assert drafts(drafter, 301, StoredFeatures(target, [])) == other
    drafter.truncate(0, 0)
    for begin, end in ((0, 1), (1, 30), (30, 44)):
        drafter.inject(0, StoredFeatures(target, features.rows[begin:end], text[begin:end]))
    rest = StoredFeatures(target, features.rows[44:], text[44:])
    assert drafts(drafter, 300, rest) == expected
    assert drafter.length(0) == len(text)


@pytest.mark.one_in(3)
def test_shared_and_saved_texts(engine: Engine) -> None:
    """Copied to another sequence, saved, and restored in a third, a text has the same drafts."""
    target, drafter = engine.target, engine.drafter
    assert isinstance(drafter, AssistantDrafter | HeadsDrafter)
    text = target.vocabulary.tokenize(PYTHON_SOURCE)[:40]
    expected = drafts(drafter, 300, read(engine, text))
    none = StoredFeatures(target, [])
    for seq in (2, 3) if isinstance(drafter, AssistantDrafter) else ():
        target.copy(0, seq, len(text))  # whose cells it reads
    drafter.copy(0, 2, len(text))
    assert drafts(drafter, 300, none, 2) == expected
    saved = drafter.save(2)
    drafter.truncate(2, 0)
    drafter.truncate(0, 7)
    drafter.restore(3, saved)
    assert [drafter.length(seq) for seq in range(4)] == [7, 0, 0, len(text)]
    assert drafts(drafter, 300, none, 3) == expected


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("target", "graphed"), ENGINES, indirect=["target"], scope="module")
def test_a_text_goes_on_from_an_earlier_one(target: Target, engine: Engine) -> None:
    """In its slot, cut back in it, and after it has left the slot."""
    drafter = engine.drafter
    assert drafter
    engine = Engine(target, drafter, 1, store=PrefixStore(64 << 20))
    engine.slots.forget_all()
    first = PlainAnswer(target, PYTHON_SOURCE[:500], N)
    turn = target.vocabulary.tokenize("\n\ndef add(a, b):")
    second = PlainAnswer(target, [*first.text, *turn], N)
    third = PlainAnswer(target, [*first.prompt[:-9], *turn], N)
    engine.slots.forget_all()
    for plain in (first, second, third, second, first):
        found = answer(engine, plain.prompt, 7, N)
        # The last bits of a recurrent state may differ after a checkpoint.
        assert target.is_recurrent or found.tokens == plain.tokens
        assert found.error is None
        assert found.stats.drafted > 0
        consistent(engine, drafter, len(engine.slots[0].cached))


OPTIONS = {"n_ctx": 256, "n_threads": 1, "kv_type": "q8_0", "n_seq": 2}


ITS_OWN = "always right", FusedHeads, "the target's heads", "the target's own heads, on CPU"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("word", "name", "kind", "called", "told"),
    [
        (None, *ITS_OWN),
        ("mtp", *ITS_OWN),
        (None, "an assistant, always right", AssistantDrafter, "the assistant", ""),
    ],
)
def test_loaded_by_default_by_the_word_and_by_the_file(
    files: Files, word: str | None, name: str, kind: type[Drafter], called: str, told: str
) -> None:
    said: list[str] = []
    path = files[name]
    file = assistant_of(path)
    with load(path, file or word, say=said.append, **OPTIONS) as model:
        assert isinstance(model.drafter, kind)
        begin = f"drafter: {file.name if file else told}"
        assert any(line.startswith(begin) for line in said)
        plain = model.generate("def add(", max_tokens=N, draft_width=0)
        model.forget()
        drafted = model.generate("def add(", max_tokens=N, draft_width=7)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.accepted > N / 4
        assert drafted.stats.accepted == drafted.stats.drafted or file
        assert drafted.stats.gained_by == f"by {called}"
        assert drafted.stats.as_dict()["drafter"] == called
    with load(path, "none", **OPTIONS, quiet=True) as model:
        assert model.drafter is None
        assert model.generate("def add(", max_tokens=N).tokens == plain.tokens


@pytest.mark.parametrize("name", ["never right", "an assistant, never right"])
def test_they_are_put_off_where_they_do_not_pay(files: Files, name: str) -> None:
    """Drafts that are never right, on a made-up machine: what this one takes for a pass depends on
    what else it does."""
    path, said = files[name], list[str]()
    with load(path, assistant_of(path), say=said.append, **OPTIONS) as model:
        plain = model.generate("def add(", max_tokens=3 * N, draft_width=0)
        model.engine.control(Elsewhere(MACHINES["even"], block_size=model.engine.max_width))
        drafted = []
        for _ in range(3):
            model.forget()
            found = model.generate("def add(", max_tokens=3 * N)
            assert found.tokens == plain.tokens
            drafted.append(found.stats.drafted)
        assert found.stats.drafting and found.stats.drafting.startswith("drafting is off")
        assert 0 < drafted[0] < N > 10 * drafted[2]
    assert any(line.startswith("drafting is off") for line in said)


def test_without_room_the_target_is_loaded_alone(files: Files) -> None:
    pair = open_pair(files["sometimes right"])
    assert pair.by_default and isinstance(pair.spec, HeadsSpec)
    options = LoadOptions(n_ctx=1024, n_gpu_layers=0)

    def planned(pair: Pair, free: int) -> Setup:
        cpu = Device("CPU", "", "cpu", free, free)
        return Setup(pair, options, [cpu]).fitting()

    with_heads = planned(pair, 1 << 40)
    alone = planned(open_pair(files["sometimes right"], "none"), 1 << 40)
    assert with_heads.pair == pair and alone.pair.draft is None
    least = with_heads.plan.host.needed + (with_heads.plan.host.free - with_heads.plan.host.usable)
    assert alone.plan.host.needed < with_heads.plan.host.needed
    assert planned(pair, least).pair.spec == pair.spec
    found = planned(pair, least - 1)
    assert found.pair.spec is None and found.plan.drafter_name is None
    assert "heads are not used: the memory does not hold them" in found.lines()[0]
    asked = open_pair(files["sometimes right"], "mtp")
    with pytest.raises(InputError, match="needs"):
        _ = planned(asked, least - 1).plan


def test_heads_that_llama_cpp_fails_on_are_left_out(files: Files, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        name = "blk.6.nextn.enorm.weight"  # ggml does not multiply with such numbers
        tensors[name] = (tensors[name][0].astype(np.int8), gguf.GGMLQuantizationType.I8)

    path = changed(files["always right"], tmp_path / "spoilt.gguf", tensors=spoil)
    said: list[str] = []
    with load(path, say=said.append, **OPTIONS) as model:
        assert model.drafter is None
        assert len(model.generate("def add(", max_tokens=N).tokens) == N
    assert any("heads are not used" in line and "draft with its heads" in line for line in said)
    with pytest.raises(FileError, match="draft with its heads"):
        load(path, "mtp", quiet=True, **OPTIONS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("architecture", ["always right", "no recurrent layers", "snapshots"])
@pytest.mark.parametrize("at", ["opened", "measured"])
def test_heads_that_fail_at_the_load_are_left_out(
    files: Files, architecture: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they were asked for."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise BackendError("no room for the heads")

    path, said = files[architecture], list[str]()
    with load(path, "none", quiet=True, **OPTIONS) as plain:
        expected = plain.generate("def add(", max_tokens=N).tokens
    if at == "opened":
        monkeypatch.setattr(loading, "open_heads", fail)
    else:
        for kind in (FusedHeads, HeadsDrafter):
            monkeypatch.setattr(kind, "draft", fail)
    with load(path, say=said.append, recalibrate=True, **OPTIONS) as model:
        assert model.drafter is None
        found = model.generate("def add(", max_tokens=N)
    line = "the target's own heads are not used: no room for the heads"
    assert said.count(line) == 1
    assert found.tokens == expected and found.stats.drafting == line
    with pytest.raises(BackendError, match="no room for the heads"):
        load(path, "mtp", quiet=True, recalibrate=True, **OPTIONS)


def test_a_key_may_take_the_heads_away(files: Files) -> None:
    """Then the target alone is loaded, as far as llama.cpp goes along."""
    path, said = files["always right"], list[str]()
    without = {"qwen35.nextn_predict_layers": 0}
    with pytest.raises(FileError, match="cannot load the model"):
        load(path, say=said.append, override_kv=without, **OPTIONS)
    assert sum("heads are not used" in line for line in said) == 1
    with pytest.raises(PairError, match="has no heads"):
        load(path, "mtp", quiet=True, override_kv=without, **OPTIONS)


def test_a_failure_puts_them_aside(files: Files) -> None:
    """With too small a context of their own they fail in the middle of an answer."""
    with target_with_heads(files["always right"], n_ctx=512) as target:
        prompt = target.vocabulary.tokenize(PYTHON_SOURCE)[:240]
        plain = PlainAnswer(target, prompt, N)
        drafter = HeadsDrafter(target, check_heads(GgufFile.open(target.path)), n_seq=1, n_ctx=200)
        engine = Engine(target, drafter)
        found = plain.asked(engine, 7)
        assert "the drafter failed: the heads have no room" in (found.stats.warning or "")
        engine.slots._back_at = 0.0
        engine.slots.forget_all()
        again = PlainAnswer(target, prompt[:20], N)
        assert again.asked(engine, 7).stats.accepted > 0


def test_heads_without_their_model(files: Files) -> None:
    whole = GgufFile.open(files["never right"])
    alone = edited(whole, tensors={"blk.0.attn_norm.weight": None})
    with pytest.raises(FileError, match="heads without their model"):
        check_pair(whole, alone)


def test_a_target_without_heads(files: Files) -> None:
    shipped = GgufFile.open(tiny_coder.pair()[0])
    with pytest.raises(PairError, match=r"has no heads to draft with: no qwen3\.nextn_predict"):
        check_heads(shipped)
    with pytest.raises(PairError, match="has no heads to draft with"):
        load(tiny_coder.pair()[0], "mtp", quiet=True)
    other = GgufFile.open(files["never right"])
    assert check_heads(other).n_draft == 6
    several = edited(other, keys={"qwen35.nextn_predict_layers": (2, UINT32, None)})
    assert check_heads(several).n_draft == 1
