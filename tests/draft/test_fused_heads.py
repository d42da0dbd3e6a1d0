"""The heads of a target's own file in one graph of ours: drafts are those of llama.cpp's context
for them, whatever came before. Answers are in `test_heads_drafter`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny_coder
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import LEAST_CHANCE, HeadsDrafter
from dflash_local.errors import BackendError, ContextFullError, FileError, InputError
from dflash_local.fit.pairing import check_heads
from dflash_local.gguf.drafter_spec import HeadLayerSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import open_heads
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from gguf_files import FLOAT32, STRING, Tensor, changed
from heads import (
    fused_heads,
    heads_drafter,
    target_with_heads,
)
from hybrid import N_LAYER, write_hybrid
from long_text import PYTHON_SOURCE

N_SEQ, N_TEXT = 4, 60
TARGETS = {
    "dense": ("qwen35", 0.5),
    "experts": ("qwen35moe", 0.5),
    "next": ("qwen3next", 0.5),
    "glm": ("glm4moe", 0.5),
}
CLOSE = 1e-2
"""Log-probabilities differ by rounding: attention sums halves, in the order of the cells."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fused_heads")
    source = tiny_coder.pair()[0]
    return {
        name: write_hybrid(folder / f"{name}.gguf", architecture, source, quant="F32", head=added)
        for name, (architecture, added) in TARGETS.items()
    }


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Target]:
    with target_with_heads(files[request.param], n_seq=N_SEQ, kv_type="f16") as opened:
        yield opened


@pytest.fixture(scope="module")
def texts(target: Target) -> list[StoredFeatures]:
    """A text for each sequence, with the target's states after its tokens."""
    tokens = target.vocabulary.tokenize(PYTHON_SOURCE)[: N_SEQ * N_TEXT]
    found = []
    for seq in range(N_SEQ):
        text = tokens[seq * N_TEXT :][:N_TEXT]
        target.decode(text, range(N_TEXT), [seq] * N_TEXT, [False] * N_TEXT)
        found.append(StoredFeatures(target, list(target.feature_rows), text))
    return found


@pytest.fixture
def ours(target: Target) -> Iterator[FusedHeads]:
    drafter = fused_heads(target)
    yield drafter
    drafter.close()


@pytest.fixture
def theirs(target: Target) -> Iterator[HeadsDrafter]:
    drafter = heads_drafter(target)
    yield drafter
    drafter.close()


def part(text: StoredFeatures, begin: int, end: int) -> StoredFeatures:
    return StoredFeatures(text.target, text.rows[begin:end], text.tokens[begin:end])


def request(seq: int, anchor: int, features: StoredFeatures, n: int = 6) -> DraftRequest:
    return DraftRequest(seq, anchor, features, n, whole=True)


def compare(ours: FusedHeads, theirs: HeadsDrafter, requests: list[DraftRequest]) -> Counter[str]:
    """Check drafts of both, and count them. They may part where two tokens are as likely, and in a
    mixture where two experts are."""
    layer = ours.spec.layer
    routes = isinstance(layer, HeadLayerSpec) and layer.n_expert_used > 0
    counts: Counter[str] = Counter()
    for one, other in zip(ours.draft(requests), theirs.draft(requests), strict=True):
        assert len(one.tokens) == len(other.tokens)
        close = np.isclose(one.logprobs, other.logprobs, rtol=0, atol=CLOSE)
        equal = np.equal(one.tokens, other.tokens) & (close if routes else True)
        n = len(equal) if equal.all() else int(equal.argmin()) + 1
        assert routes or close[:n].all()
        counts += Counter(drafts=1, tokens=n, parted=not equal.all())
    return counts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_many_rounds(
    target: Target, ours: FusedHeads, theirs: HeadsDrafter, texts: list[StoredFeatures], seed: int
) -> None:
    """Any sequences at once, some or no new rows, drafts of any length, texts that are cut, moved,
    saved and read again."""
    random = np.random.default_rng(seed)
    at = [0] * N_SEQ
    owner = list(range(N_SEQ))
    counts: Counter[str] = Counter()
    for _ in range(60):
        chosen = random.permutation(N_SEQ)[: random.integers(1, N_SEQ + 1)]
        requests = []
        for seq in map(int, chosen):
            text = texts[owner[seq]]
            n = int(random.integers(0, 8))
            end = min(at[seq] + n, N_TEXT)
            features, at[seq] = part(text, at[seq], end), end
            anchor = text.tokens[end] if end < N_TEXT else 300
            if random.random() < 0.3:  # what was drafted was rejected
                anchor = int(random.integers(target.n_vocab))
            if random.random() < 0.2:
                ours.inject(seq, features)
                theirs.inject(seq, features)
                features = part(text, 0, 0)
            requests.append(request(seq, anchor, features, int(random.integers(1, 7))))
        counts += compare(ours, theirs, requests)
        seq, other = map(int, random.permutation(N_SEQ)[:2])
        what = random.integers(6)
        length = int(random.integers(at[seq] + 1))
        for drafter in (ours, theirs):
            if what == 0:
                drafter.truncate(seq, length)
            elif what == 1:
                drafter.copy(seq, other, length)
            elif what == 2:
                drafter.truncate(other, 0)
                drafter.restore(other, drafter.save(seq))
        if what == 0:
            at[seq] = length
        elif what in (1, 2):
            at[other], owner[other] = (length if what == 1 else at[seq]), owner[seq]
        lengths = [drafter.length(seq) for drafter in (ours, theirs) for seq in range(N_SEQ)]
        assert lengths == at * 2
    assert counts["tokens"] > 300
    assert counts["parted"] <= counts["drafts"] / 20


def test_a_long_text(files: dict[str, Path]) -> None:
    """It is read in several graphs, and the cache grows under it."""
    with target_with_heads(files["dense"], n_ctx=4096, n_batch=2048, kv_type="f16") as target:
        text = target.vocabulary.tokenize(PYTHON_SOURCE * 8)[:1500]
        target.decode(text, range(len(text)), [0] * len(text), [False] * len(text))
        features = StoredFeatures(target, list(target.feature_rows), text)
        ours, theirs = fused_heads(target), heads_drafter(target)
        for begin, end in ((0, 200), (200, 1499), (1499, 1500)):
            found = compare(ours, theirs, [request(0, text[end % 100], part(features, begin, end))])
            assert not found["parted"]
        ours.close()
        theirs.close()


def test_a_draft_ends_where_it_has_become_unlikely(
    ours: FusedHeads, texts: list[StoredFeatures]
) -> None:
    """These heads are not sure of a single token. A shorter draft is the beginning of a longer."""
    ours.inject(0, texts[0])
    none = part(texts[0], 0, 0)
    whole = ours.draft([request(0, 300, none)])[0]
    assert whole.logprobs[0] < np.log(LEAST_CHANCE)
    (draft,) = ours.draft([replace(request(0, 300, none), whole=False)])
    assert draft.tokens == whole.tokens[:1]
    for n in (1, 3, 5):
        assert ours.draft([request(0, 300, none, n)])[0].tokens == whole.tokens[:n]


def test_states_that_are_no_numbers(files: dict[str, Path]) -> None:
    """They are told, and later texts are not spoilt by them."""
    with target_with_heads(files["dense"], kv_type="f16") as target:
        text = target.vocabulary.tokenize(PYTHON_SOURCE)[:40]
        target.decode(text, range(40), [0] * 40, [False] * 40)
        features = StoredFeatures(target, list(target.feature_rows), text)
        ours = fused_heads(target)
        (expected,) = ours.draft([request(0, 300, features)])
        saved = ours.save(0)
        spoilt = saved.copy()
        spoilt[: 4 * target.n_embd].view(np.float32)[:] = np.nan
        ours.restore(0, spoilt)
        with pytest.raises(BackendError, match="not a number"):
            ours.draft([request(0, 300, part(features, 0, 0))])
        assert ours.length(0) == 0
        (found,) = ours.draft([request(0, 300, features)])
        assert found.tokens == expected.tokens
        ours.close()


def test_what_cannot_be_is_refused(
    target: Target, ours: FusedHeads, texts: list[StoredFeatures]
) -> None:
    text = texts[0]
    ours.inject(0, text)
    none = part(text, 0, 0)
    for wrong, message in (
        ([request(0, 300, none, 7)], "cannot draft 7 tokens"),
        ([request(0, 300, none, 0)], "cannot draft 0 tokens"),
        ([request(0, -1, none)], "token -1 is not in"),
        ([request(0, target.n_vocab, none)], "is not in 0"),
        ([request(N_SEQ, 300, none)], "sequence 4 is not in"),
        ([request(0, 300, none), request(0, 300, none)], "twice"),
        ([request(0, 300, StoredFeatures(target, [1 << 40], [5]))], "are not there"),
        ([request(0, 300, StoredFeatures(target, text.rows[:2], [5]))], "one token and one state"),
        ([request(0, 300, np.zeros((1, target.n_embd), np.float32))], "in the store"),
    ):
        with pytest.raises(InputError, match=message):
            ours.draft(wrong)
    for saved in (np.zeros(3, np.uint8), ours.save(0)[:-1]):
        with pytest.raises(InputError, match="bytes are"):
            ours.restore(1, saved)
    assert ours.draft([]) == []
    assert [ours.length(seq) for seq in range(N_SEQ)] == [N_TEXT, 0, 0, 0]


def test_a_full_context(target: Target, texts: list[StoredFeatures]) -> None:
    spec = check_heads(GgufFile.open(target.path))
    assert isinstance(spec.layer, HeadLayerSpec)
    small = FusedHeads(target, spec, spec.layer, n_seq=1, n_ctx=N_TEXT)
    small.inject(0, texts[0])
    assert len(small.draft([request(0, 300, part(texts[0], 0, 0))])[0].tokens) == 6
    with pytest.raises(ContextFullError, match="holds 60 rows, asked for 61"):
        small.draft([request(0, 300, part(texts[0], 0, 1))])
    assert small.length(0) == N_TEXT
    small.close()


def test_sizes_that_the_file_has_not(target: Target) -> None:
    spec = check_heads(GgufFile.open(target.path))
    assert isinstance(spec.layer, HeadLayerSpec)
    good = spec.layer

    def opened(layer: HeadLayerSpec) -> None:
        FusedHeads(target, spec, layer, n_seq=1, n_ctx=64).close()

    opened(good)
    for wrong in (
        replace(good, n_head=4),
        replace(good, n_head_kv=2),
        replace(good, n_embd=32),
        replace(good, layer=good.layer - 1),
        replace(good, layer=good.layer + 1),
        replace(good, n_expert_used=0 if good.n_expert_used else 2),
    ):
        with pytest.raises(FileError):
            opened(wrong)
    for wrong in (
        replace(good, n_head=0),
        replace(good, n_head=1 << 25),
        replace(good, n_head=3, n_head_kv=2),
        replace(good, rope=replace(good.rope, n_dims=3)),
    ):
        with pytest.raises(InputError):
            opened(wrong)


def test_other_heads_are_left_to_llama_cpp(files: dict[str, Path], tmp_path: Path) -> None:
    file = GgufFile.open(files["dense"])
    scaled = changed(
        file.path,
        tmp_path / "scaled.gguf",
        keys={
            "qwen35.rope.scaling.type": ("linear", STRING, None),
            "qwen35.rope.scaling.factor": (2.0, FLOAT32, None),
        },
    )

    def fuse(tensors: dict[str, Tensor]) -> None:
        parts = [tensors.pop(f"blk.{N_LAYER}.attn_{name}.weight") for name in "qkv"]
        fused = np.concatenate([values for values, _ in parts])
        tensors[f"blk.{N_LAYER}.attn_qkv.weight"] = fused, parts[0][1]

    fused = changed(file.path, tmp_path / "fused.gguf", tensors=fuse)
    stretched = {"rope_scaling": "linear", "rope_scale": 2.0}
    for path, options, why in (
        (file.path, {}, None),
        (scaled, {}, "positions are scaled"),
        (fused, {}, "have blk.6.attn_qkv.weight, which is not known here"),
        (file.path, stretched, "positions are stretched"),
    ):
        said: list[str] = []
        with target_with_heads(path, kv_type="f16", **options) as target:
            spec = check_heads(GgufFile.open(path))
            drafter = open_heads(target, spec, n_seq=1, n_ctx=256, say=said.append)
            assert type(drafter) is (HeadsDrafter if why else FusedHeads)
            drafter.close()
        assert bool(said) == bool(why)
        assert all("in llama.cpp's context: " in line and str(why) in line for line in said)
