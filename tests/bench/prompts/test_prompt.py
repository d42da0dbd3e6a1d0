"""Prompts of a file of the user's own, in all forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local import InputError, Model
from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import read_prompts, read_replay


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


# With answers


def test_each_message_of_the_assistant_is_an_answer(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text(
        '{"category": "talk", "messages": [{"role": "user", "content": "a"},'
        ' {"role": "assistant", "content": "<|im_end|> b"}, {"role": "user", "content": "c"},'
        ' {"role": "assistant", "content": "d"}]}\n'
        '{"category": "raw", "prompt": "def f(", "answer": "x):\\u2028"}\n'
        '{"category": "raw", "prefix": "a", "suffix": "b", "answer": "c"}\n',
        encoding="utf-8",
    )
    prompts = read_replay(file)
    assert [(p.category, len(p.messages), p.answer) for p in prompts] == [
        ("talk", 1, "<|im_end|> b"),
        ("talk", 3, "d"),
        ("raw", 0, "x):\u2028"),
        ("raw", 0, "c"),
    ]
    cases, notes = tokenized(model, prompts, room=1 << 20)
    assert notes == []
    for case, prompt in zip(cases, prompts, strict=True):
        assert case.answer is not None
        # Names of special tokens in an answer are text, so that no answer ends early.
        assert model.detokenize(case.answer) == prompt.answer
    assert len(read_replay(file, limit=1)) == 3  # a conversation is one line
    assert [p.category for p in read_replay(file, categories=["raw"])] == ["raw", "raw"]
    with pytest.raises(InputError, match="no category 'chat'; expected one of talk, raw"):
        read_replay(file, categories=["chat"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no answers"),
        ('{"prompt": "a"}', "line 1: answer is None; expected a text"),
        ('{"prompt": "a", "answer": ""}', "line 1: answer is empty"),
        ('{"prompt": "a", "answer": "b"}\n\n3', "line 3: not a JSON object"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "c"}', "line 2: the prompt of"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "which is an answer"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "expected what it answers"),
        ('{"messages": [{"role": "user"}]}', "content is None"),
        ('{"messages": ["a"]}', "message 1 is not an object"),
        ('{"prompt": "a", "answer": "\\udfff"}', "line 1: half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a"}], "answer": "b"}', "the last message"),
    ],
)
def test_bad_replays_are_refused_in_one_line(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=fault) as caught:
        read_replay(file)
    assert "\n" not in str(caught.value)
