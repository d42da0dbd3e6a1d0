"""The tuned drafter that a target uses, and the way back."""

import shutil
from pathlib import Path

import click
import pytest

import tiny_coder
from dflash_local.cli.loading import check_drafter
from dflash_local.errors import InputError
from dflash_local.pairs import tuned
from dflash_local.pairs.find import find_pair


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_LOCAL_TUNED", str(tmp_path / "data"))
    return Path(shutil.copy(tiny_coder.pair()[0], tmp_path / "t.gguf"))


def drafter(folder: Path, name: str) -> Path:
    return Path(shutil.copy(tiny_coder.pair()[1], folder / name))


def test_a_tuned_drafter_is_used_until_it_is_undone(target: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first, second = drafter(tmp_path, "1.gguf"), drafter(tmp_path, "2.gguf")
    assert find_pair(target, say=said.append).draft is None
    tuned.make_default(target, first, "org/one")
    tuned.make_default(target, second, "org/one")
    assert find_pair(target, say=said.append).draft == second
    assert "--undo" in said[-1]
    assert find_pair(target, tiny_coder.pair()[1], say=said.append).draft == tiny_coder.pair()[1]
    assert tuned.undo(target) == second
    assert find_pair(target, say=said.append).draft == first
    assert tuned.undo(target) == first
    assert find_pair(target, say=said.append).draft is None
    with pytest.raises(InputError, match="nothing to undo"):
        tuned.undo(target)


def test_a_tuned_drafter_that_is_gone_is_not_used(target: Path, tmp_path: Path) -> None:
    path = drafter(tmp_path, "1.gguf")
    tuned.make_default(target, path, "org/one")
    path.unlink()
    assert find_pair(target, say=print).draft is None


def test_a_damaged_list_is_told_in_one_line(target: Path) -> None:
    tuned.folder().mkdir()
    (tuned.folder() / "tuned.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        tuned.tuned_drafter(target)


def test_a_named_pair_keeps_its_drafter_where_another_one_was_tuned(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for name in ("one", "two"):
        path = drafter(tmp_path, f"{name}.gguf")
        tables.append(f'[{name}]\ngguf = "{target}"\ndrafter = "{path}"\n')
    monkeypatch.setenv("DFLASH_LOCAL_REGISTRY", str(tmp_path / "pairs.toml"))
    (tmp_path / "pairs.toml").write_text("\n".join(tables))
    better, source = drafter(tmp_path, "better.gguf"), str(tmp_path / "one.gguf")
    tuned.make_default(target, better, source)

    def used(name: str | Path) -> Path | None:
        return find_pair(name, say=print).draft

    assert used("two") == tmp_path / "two.gguf"
    assert used("one") == used(target) == better
    assert tuned.source_of(target, better) == source
    with pytest.raises(InputError, match="nothing to undo"):
        tuned.undo(target, str(tmp_path / "two.gguf"))
    assert tuned.undo(target, source) == better
    assert used("one") == tmp_path / "one.gguf"


def test_a_tuned_drafter_is_one_to_compare_with(target: Path, tmp_path: Path) -> None:
    values = {"target": str(target), "draft": None}
    with pytest.raises(click.UsageError, match="add --draft"):
        check_drafter(values, "needs a drafter")
    tuned.make_default(target, drafter(tmp_path, "1.gguf"), "org/one")
    check_drafter(values, "needs a drafter")
