"""The shipped texts: readable, with their licences, and what their categories promise."""

import re
from itertools import pairwise

from lab.replay import SHIPPED
from lab.replay.answers import read_replay

SHORT = ("function", "file", "refactoring", "rename", "json", "quote", "prose", "session")


def test_every_category_is_there() -> None:
    found = dict.fromkeys(prompt.category for prompt in read_replay(SHIPPED))
    assert tuple(found) == (*SHORT, "long-file", "long-session")
    assert SHIPPED.stat().st_size < 200_000


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
