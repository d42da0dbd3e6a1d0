"""From texts to prompts: what is held out is never learnt from, and what is no text is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.bench.prompts.prompt import built_in
from dflash_local.errors import InputError
from dflash_local.tune.texts import Form, files_of, general, read_texts

FORMS: tuple[Form, ...] = ("continue", "infill", "chat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(10):
        lines = [f"value_{i}_{line} = {line}  # of file {i}\n" for line in range(300)]
        (tmp_path / f"file{i}.py").write_text("".join(lines))
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2" * 500)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "log").write_text("secret\n" * 100)
    return tmp_path


def of_files(prompts: object) -> set[str]:
    text = repr(prompts)
    return {f"value_{i}_" for i in range(10) if f"value_{i}_" in text}


def test_a_file_is_either_learnt_from_or_held_out(folder: Path) -> None:
    found = read_texts(folder, FORMS)
    parts = [of_files(part) for part in (found.tune, found.watch, found.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 10
    assert read_texts(folder, FORMS) == found


def test_prompts_come_in_all_forms_and_say_less_than_the_file(folder: Path) -> None:
    found = read_texts(folder, FORMS).tune
    kinds = {("text" if p.text else "infill" if p.infill else "chat") for p in found}
    assert kinds == {"text", "infill", "chat"}
    assert all(p.text for p in read_texts(folder, ("continue",)).tune)


def test_only_texts_are_read(folder: Path) -> None:
    assert [name for name, _ in files_of(folder)] == [f"file{i}.py" for i in range(10)]


def test_a_file_of_prompts_gives_these(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)))
    found = read_texts(path, FORMS)
    texts = [p.text for part in (found.tune, found.watch, found.test) for p in part]
    assert sorted(texts, key=str) == sorted((f"number {i}" for i in range(20)), key=str)


@pytest.mark.parametrize("n", [0, 2])
def test_too_little_text_is_refused(tmp_path: Path, n: int) -> None:
    for i in range(n):
        (tmp_path / f"{i}.txt").write_text("a line of text\n" * 40)
    with pytest.raises(InputError, match="expected at least 3"):
        read_texts(tmp_path, FORMS)


def test_no_general_prompt_is_one_that_is_measured_on() -> None:
    found = general(FORMS)
    measured = built_in(("chat", "code", "fim"), limit=99, shipped=False)
    assert len(found) > 200
    assert not {repr(each.messages) for each in found if each.messages} & {
        repr(each.messages) for each in measured if each.messages
    }
