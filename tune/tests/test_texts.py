"""From texts to prompts: held-out ones are never learnt, and files without text are left out."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from dflash_local.bench.prompts.prompt import BenchPrompt, built_in
from dflash_local.errors import InputError
from dflash_local_tune.texts import Form, conversations, drawn, files_of, general, read_texts

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


def kinds(prompts: list[BenchPrompt]) -> set[str]:
    return {("text" if p.text else "infill" if p.infill else "chat") for p in prompts}


def test_a_file_is_either_learnt_from_or_held_out(folder: Path) -> None:
    found = read_texts(folder, FORMS)
    parts = [of_files(part) for part in (found.tune, found.watch, found.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 10
    assert read_texts(folder, FORMS) == found


def test_prompts_come_in_all_forms_and_say_less_than_the_file(folder: Path) -> None:
    assert kinds(read_texts(folder, FORMS).tune) == {"text", "infill", "chat"}
    assert all(p.text for p in read_texts(folder, ("continue",)).tune)


def test_prompts_to_learn_from_are_drawn_without_an_end(folder: Path) -> None:
    found = read_texts(folder, FORMS)
    rng = random.Random(1)
    drawn = [found.draw(rng) for _ in range(100)]
    assert len({repr(each) for each in drawn}) == 100
    assert of_files(drawn) == of_files(found.tune)
    assert kinds(drawn) == {"text", "infill", "chat"}
    again = random.Random(1)
    assert [found.draw(again) for _ in range(100)] == drawn


def test_a_quarter_of_the_prompts_are_general(folder: Path) -> None:
    found, others = read_texts(folder, FORMS), general(FORMS)
    rng = random.Random(2)
    prompts = [drawn(found, others, rng) for _ in range(400)]
    assert 70 < sum(not of_files(prompt) for prompt in prompts) < 130
    assert of_files([drawn(found, None, rng) for _ in range(50)]) <= of_files(found.tune)


def test_general_prompts_are_drawn_in_all_forms_without_an_end() -> None:
    found, rng = general(FORMS), random.Random(1)
    prompts = [found.draw(rng) for _ in range(300)]
    assert len({repr(each) for each in prompts}) > 250
    assert kinds(prompts) == {"text", "infill", "chat"}
    plain = general(("continue",))
    assert all(p.text for p in [*plain.tune, *plain.watch, *plain.test, plain.draw(rng)])


def test_general_prompts_are_learnt_from_or_held_out() -> None:
    found = general(FORMS)
    assert general(FORMS) == found
    held = {repr(each) for each in [*found.watch, *found.test]}
    assert len(found.watch) > 24 and len(found.test) > 24
    assert not held & {repr(each) for each in found.tune}
    rng = random.Random(1)
    assert not held & {repr(found.draw(rng)) for _ in range(500)}


def test_short_texts_of_one_line_are_drawn_from(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"{i} and more " * 20)
    draw = read_texts(tmp_path, FORMS).draw
    assert all(repr(draw(random.Random(i))) for i in range(50))


def test_only_texts_are_read(folder: Path) -> None:
    assert [name for name, _ in files_of(folder)] == [f"file{i}.py" for i in range(10)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_files_need_not_be_utf8(folder: Path) -> None:
    before = len(read_texts(folder, FORMS).tune)
    os.rename(folder / "file3.py", folder / os.fsdecode(b"caf\xe9.py"))
    assert len(read_texts(folder, FORMS).tune) == before


def test_a_file_of_prompts_gives_these(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)))
    found = read_texts(path, FORMS)
    texts = [p.text for part in (found.tune, found.watch, found.test) for p in part]
    assert sorted(texts, key=str) == sorted((f"number {i}" for i in range(20)), key=str)
    assert all(found.draw(random.Random(i)) in found.tune for i in range(50))


@pytest.mark.parametrize("n", [0, 2])
def test_too_little_text_is_refused(tmp_path: Path, n: int) -> None:
    for i in range(n):
        (tmp_path / f"{i}.txt").write_text("a line of text\n" * 40)
    with pytest.raises(InputError, match="expected at least 3"):
        read_texts(tmp_path, FORMS)


def test_no_general_prompt_is_one_that_is_measured_on() -> None:
    found, rng = general(FORMS), random.Random(1)
    learnt = repr(found.tune + [found.draw(rng) for _ in range(2000)])
    for each in built_in(("chat", "code", "fim"), limit=99):
        asked = each.messages[-1]["content"] if each.messages else each.text
        assert asked is None or asked not in learnt


def turns(system: str, topic: str, n: int) -> list[str]:
    """The requests of a conversation, as a chat template writes them."""
    begun = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text, found = f"<|im_start|>system\n{system}<|im_end|>\n", []
    for i in range(n):
        text += f"<|im_start|>user\nTurn {i} about {topic}<|im_end|>\n"
        found.append(text + begun)
        text += f"<|im_start|>assistant\nI like {topic}. {i}<|im_end|>\n"
    return found


def test_a_conversation_is_either_learnt_from_or_held_out(tmp_path: Path) -> None:
    topics = [f"topic{i}." for i in range(9)]
    texts = [text for topic in topics for text in turns("Be brief. " * 200, topic, 4)]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*texts, *texts]))
    found = read_texts(path, FORMS)
    parts = [found.tune, found.watch, found.test]
    about = [{topic for topic in topics if topic in repr(part)} for part in parts]
    assert sum(map(len, about)) == len(set.union(*about)) == len(topics)
    assert sum(map(len, parts)) == len(texts)


def test_what_grows_in_an_editor_or_as_messages_stays_together() -> None:
    gaps = [BenchPrompt("own", infill=("def f(x"[:n], ":\n    return x")) for n in (5, 6, 7)]
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = [BenchPrompt("own", messages=(*asked * n, asked[0])) for n in range(3)]
    other = BenchPrompt("own", text="x = 1")
    assert sorted(map(len, conversations([*gaps, *chats, other]))) == [1, 3, 3]


def test_only_requests_to_the_tuned_model_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": f"{name} {topic}", "category": name, "add_special": False}
        for name in ("small", "large")
        for topic in ("sun", "moon", "star", "sea")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_texts(path, FORMS, names=["large"])
    assert "small" not in repr(found)
    with pytest.raises(InputError, match="requests to large, small, and none to other"):
        read_texts(path, FORMS, names=["other"])
