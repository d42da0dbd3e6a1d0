"""A load on its way: it tells how far it is, and whoever hears that can end it."""

import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from dflash_local import load
from dflash_local.controller.costs import Costs
from dflash_local.draft.shape import DraftShape
from dflash_local.errors import ContextFullError, FileError
from dflash_local.fit.options import MAX_OUTPUT_ROWS, LoadOptions, LoadSettings
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import best_gain
from dflash_local.trial.drafter import try_drafter
from gguf_files import UINT32, Value, changed

OPTIONS = {"n_ctx": 512, "n_gpu_layers": 0, "n_threads": 1}


class Enough(Exception):
    """An error of a listener."""


def test_a_load_tells_how_far_it_is(pair: tuple[Path, Path]) -> None:
    parts: list[float] = []
    with load(*pair, **OPTIONS, quiet=True, progress=parts.append) as model:
        assert model.generate("def f(", max_tokens=2).tokens
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert any(0 < part < 1 for part in parts)


@pytest.mark.parametrize("end", [0.0, 0.5, 1.0])
def test_what_the_listener_raises_ends_a_load(pair: tuple[Path, Path], end: float) -> None:
    def hear(part: float) -> None:
        if part >= end:
            raise Enough

    with pytest.raises(Enough):
        load(*pair, **OPTIONS, quiet=True, progress=hear)
    with load(*pair, **OPTIONS, quiet=True) as model:  # nothing of it is in the way
        assert model.generate("def f(", max_tokens=2).tokens


def test_what_is_refused_is_not_measured(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path))
    long = [400] * OPTIONS["n_ctx"] * 2
    with pytest.raises(ContextFullError):
        load(*pair, **OPTIONS, quiet=True, check=lambda model: model.stream(long))
    assert not (tmp_path / "costs").exists()
    with load(*pair, **OPTIONS, quiet=True, check=lambda model: model.stream("def f(")) as model:
        assert model.engine.controller is not None
        assert model.generate("def f(", max_tokens=4).stats.drafting
    assert (tmp_path / "costs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_files_need_not_be_utf8(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    files = [folder / path.name for path in pair]
    for path, file in zip(pair, files, strict=True):
        file.symlink_to(path)
    tried = try_drafter(files[1], read_drafter(GgufFile.open(files[1])), files[0])
    assert "the fused graph drafts a block" in tried.passed
    with load(*files, **OPTIONS, quiet=True) as model:
        assert model.generate("def f(", max_tokens=8, draft_width=8).stats.drafted


def test_on_a_cpu_drafts_are_chains(pair: tuple[Path, Path]) -> None:
    with load(*pair, **OPTIONS, quiet=True) as model:
        assert (model.draft_shape, model.target.options.n_branches) == ("chain", 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_block_wider_than_a_verify_pass_drafts_as_far_as_one_goes(
    pair: tuple[Path, Path], tmp_path: Path, shape: DraftShape
) -> None:
    keys: dict[str, Value | None] = {"dflash.block_size": (128, UINT32, None)}
    drafter = changed(pair[1], tmp_path / "wide.gguf", keys=keys)
    with load(pair[0], drafter, **OPTIONS, kv_type="q8_0", quiet=True, draft_shape=shape) as model:
        assert model.engine.max_width == MAX_OUTPUT_ROWS
        plain = model.generate("def f(", max_tokens=24, draft_width=0)
        for width in ("auto", MAX_OUTPUT_ROWS):
            model.forget()
            drafted = model.generate("def f(", max_tokens=24, draft_width=width)
            assert drafted.tokens == plain.tokens
        assert drafted.stats.drafted


def test_a_file_to_draft_from(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its text is copied, and the answer stays the same."""
    prompt = "def mean(values):"
    options = {"max_tokens": 24, "draft_width": 8}
    with load(pair[0], **OPTIONS, kv_type="q8_0", quiet=True) as model:
        plain = model.generate(prompt, max_tokens=24, draft_width=0)
        alone = model.generate(prompt, **options)
    file = tmp_path / "before.txt"
    file.write_text(prompt + plain.text + "\n", encoding="utf-8")
    with load(pair[0], **OPTIONS, kv_type="q8_0", draft_from=file, quiet=True) as model:
        found = model.generate(prompt, **options)
    assert found.tokens == alone.tokens == plain.tokens
    assert found.stats.copied_accepted > alone.stats.copied_accepted


@pytest.mark.parametrize(
    "content, told", [(None, "no text to draft from: "), (b"\xff\xfe\x00", "not UTF-8")]
)
def test_a_file_to_draft_from_that_has_no_text(
    pair: tuple[Path, Path], tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "before.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FileError, match=f"before.txt.*{told}"):
        load(pair[0], draft_from=file, quiet=True)


def test_what_was_learnt_of_copies_is_there_after_a_restart(pair: tuple[Path, Path]) -> None:
    with load(pair[0], **OPTIONS, quiet=True) as model:
        model.generate([400, 401] * 8, max_tokens=32, logit_bias={400: 60.0, 401: 60.0})
        assert model.engine.copies is not None
        learnt = model.engine.copies.as_dict()
    with load(pair[0], **OPTIONS, quiet=True) as model:
        assert model.engine.copies is not None
        assert model.engine.copies.as_dict() == learnt != {}


def test_each_setting_of_a_load_has_a_default() -> None:
    defaults = {field.name: field.type for field in fields(LoadOptions)}
    settings = {name: hint.__forward_arg__ for name, hint in LoadSettings.__annotations__.items()}
    assert settings == defaults


def test_the_best_gain_is_that_of_whole_drafts() -> None:
    dear = Costs({8: {1: 0.01, 2: 0.02, 8: 0.08}}, {8: {1: 0.001}})
    assert best_gain(dear, 7, 1) < 1
    cheap = Costs({8: {1: 0.01, 8: 0.01}}, {8: {1: 0.01}})
    assert best_gain(cheap, 7, 1) == pytest.approx(4)
    assert best_gain(cheap, 3, 1) == pytest.approx(2)
    # Where one sequence gains nothing, two may.
    shared = Costs({8: {1: 0.01, 2: 0.02, 4: 0.02}}, {8: {1: 0.015, 2: 0.0}})
    assert best_gain(shared, 1, 1) < 1 < best_gain(shared, 1, 2)
    steps, drafts = {8: {1: 0.01, 2: 0.01, 8: 0.09}}, {8: {1: 0.04}}
    assert best_gain(Costs(steps, drafts), 7, 1) < 1
    assert best_gain(Costs(steps, drafts, token_share=0.14), 7, 1) > 1.2  # a draft of one token
