"""Files of prompts with the answers that shall come out."""

from pathlib import Path

import pytest

from dflash_local import Model
from dflash_local.bench.prompts.case import tokenized
from dflash_local.errors import InputError
from lab.replay.answers import read_replay


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
