"""Prompts of a file of the user's own, in all forms."""

from pathlib import Path

import pytest

from dflash_local import InputError, Model
from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import read_prompts


def test_a_file_may_hold_all_forms(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "def f(", "category": "raw"}\n'
        "\n"
        '{"messages": [{"role": "user", "content": "Hi"}]}\n'
        '{"prefix": "a", "suffix": "b"}\n'
        '{"prompt": "x"}\n'
    )
    prompts = read_prompts(file)
    assert [prompt.category for prompt in prompts] == ["raw", "own", "own", "own"]
    cases, notes = tokenized(model, prompts, room=16)
    assert [case.index for case in cases] == [0, 0, 1, 2]
    assert notes == []
    assert len(read_prompts(file, limit=1)) == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no prompts"),
        ("[1]", "line 1: not a JSON object"),
        ('{"prompt": "a"}\n{', "line 2"),
        ('{"prompt": 3}', "prompt is 3; expected a text"),
        ('{"prefix": "a"}', "suffix is None"),
        ('{"prompt": "a", "messages": []}', "expected one of"),
        ('{"messages": []}', "messages is not a list"),
        ('{"prompt": "a", "category": ""}', "category is ''"),
        ('{"prompt": "a", "add_special": 0}', "add_special is 0"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=fault) as caught:
        read_prompts(file)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="UTF-8"):
        read_prompts(file)
