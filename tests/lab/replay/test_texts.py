"""The shipped texts: readable, with their licences, and what their categories promise."""

import re
from itertools import pairwise

from dflash_local.bench.prompts.prompt import BenchPrompt
from lab.replay import SHIPPED
from lab.replay.answers import read_replay

SHORT = ("function", "file", "refactoring", "rename", "json", "quote", "prose", "session")


def texts(category: str) -> list[tuple[str, str]]:
    """Last message of the user, and answer."""
    found: list[BenchPrompt] = read_replay(SHIPPED, categories=[category])
    return [(str(each.messages[-1]["content"]), str(each.answer)) for each in found]


def threes(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return list(zip(words, words[1:], words[2:], strict=False))


def test_every_category_is_there() -> None:
    found = dict.fromkeys(prompt.category for prompt in read_replay(SHIPPED))
    assert tuple(found) == (*SHORT, "long-file", "long-session")
    assert SHIPPED.stat().st_size < 200_000


def test_edits_repeat_and_prose_does_not() -> None:
    for category in ("function", "file", "rename", "json", "quote", "long-file"):
        for before, after in texts(category):
            again = set(threes(before))
            assert sum(three in again for three in threes(after)) > 0.5 * len(threes(after))
    for question, answer in texts("prose"):
        assert not set(threes(question)) & set(threes(answer))
        repeated = len(threes(answer)) - len(set(threes(answer)))
        assert repeated <= 0.01 * len(threes(answer))  # across the ends of sentences


def test_one_value_of_json_changes_and_a_name_is_gone() -> None:
    for before, after in texts("json"):
        old, new = (re.findall(r"^ .*", text, re.MULTILINE) for text in (before, after))
        changed = set(new) - set(old)
        assert len(changed) == 1
    for question, answer in texts("rename"):
        old, new = re.findall(r"Rename `(\w+)` to `(\w+)`", question)[0]
        assert new in answer and not re.search(rf"\b{old}\b", answer)


def test_a_session_sends_files_again() -> None:
    prompts = read_replay(SHIPPED, categories=["session"])
    assert len(prompts) > 4
    for earlier, later in pairwise(prompts):
        assert later.messages[: len(earlier.messages)] == earlier.messages


def test_each_source_has_its_licence() -> None:
    readme = (SHIPPED.parent / "README.md").read_text(encoding="utf-8")
    licences = {file.stem for file in (SHIPPED.parent / "licences").iterdir()}
    named = re.findall(r"^\| (\w+) \| [\d.]+, ", readme, re.MULTILINE)
    assert licences == {name.lower() for name in named}
