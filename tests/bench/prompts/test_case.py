"""Prompts of the benchmark: every category in the model's own tokens, files of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local import InputError, Model, demo
from dflash_local.bench.prompts.case import (
    DEPTHS,
    Prompt,
    built_in,
    infill_tokens,
    long_cases,
    random_cases,
    read_by,
    read_prompts,
)


def test_shipped_prompts_are_those_of_the_demo(model: Model) -> None:
    prompts = built_in(("chat",), limit=3, shipped=True)
    cases, notes = read_by(model, prompts, room=16)
    assert [case.tokens for case in cases] == [
        model.tokenize(text) for text in demo.prompts()["chat"][:3]
    ]
    assert notes == []


def test_chat_prompts_of_other_models_go_through_their_template(model: Model) -> None:
    prompts = built_in(("chat", "code"), limit=2, shipped=False)
    cases, _ = read_by(model, prompts, room=16)
    assert [case.category for case in cases] == ["chat", "chat", "code", "code"]
    start = model.tokenize("<|im_start|>user\n")
    assert all(case.tokens[: len(start)] == start for case in cases)


def test_gaps_are_filled_between_the_models_own_marks(model: Model) -> None:
    marks = infill_tokens(model)
    assert marks is not None
    names = [model.target.vocabulary.name(token) for token in marks]
    assert names == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    (case,), _ = read_by(model, [Prompt("fim", infill=("a = <|im_end|>", "\nb"))], room=16)
    assert (case.tokens[0], case.tokens[-1]) == (marks[0], marks[2])
    assert marks[1] in case.tokens
    # Names of special tokens in the user's own code are text.
    assert not any(model.target.vocabulary.ends_text(token) for token in case.tokens)


def test_what_does_not_fit_the_context_is_left_out_and_told(model: Model) -> None:
    prompts = [Prompt("own", text="a" * 40000), Prompt("own", text="b")]
    cases, notes = read_by(model, prompts, room=16)
    assert len(cases) == 1
    assert notes == ["own: 1 left out, prompt and answer exceed the context of 2048 tokens"]


def test_answers_to_long_prompts_end_at_their_depth(model: Model) -> None:
    cases, notes = long_cases(model, DEPTHS, limit=2, room=64)
    assert [case.category for case in cases] == ["1k", "1k"]
    assert all(1024 - 128 < len(case.tokens) < 1024 - 64 for case in cases)
    assert cases[0].tokens[:8] != cases[1].tokens[:8]
    assert [note.split(":")[0] for note in notes] == ["8k", "32k"]


def test_drawn_tokens_are_the_same_every_time() -> None:
    cases = random_cases(1000, {"random": 32, "1k": 900}, limit=2)
    assert [(case.category, len(case.tokens)) for case in cases] == [
        ("random", 32),
        ("random", 32),
        ("1k", 900),
        ("1k", 900),
    ]
    assert cases == random_cases(1000, {"random": 32, "1k": 900}, limit=2)
    assert all(0 <= token < 1000 for case in cases for token in case.tokens)


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
    cases, notes = read_by(model, prompts, room=16)
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
