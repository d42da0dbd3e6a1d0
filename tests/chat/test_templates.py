"""Calls that the chat templates of many models write are read back as they were."""

import json
import random
from collections.abc import Iterator

import pytest

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from dflash_local.chat.families import NAMED, dialect_of
from dflash_local.chat.template import ChatTemplate
from dflash_local.errors import InputError
from model_templates import (
    EVERYTHING,
    REFUSED,
    ROME,
    TEMPLATES,
    TOOLS,
    WITHOUT_TOOLS,
    WRITE_NO_CALLS,
    Calls,
    written,
)

ANSWERS: list[tuple[Calls, str, str]] = [
    ([ROME], "", ""),
    ([EVERYTHING], "", ""),
    ([ROME, EVERYTHING, ROME], "", ""),
    ([("get_weather", {})], "", ""),
    ([ROME], "Let me look.", ""),
    ([EVERYTHING], "", "Hm."),
]


def read(dialect: Dialect, pieces: Iterator[str] | list[str], *, is_open: bool) -> list[Event]:
    parser = dialect.parser(TOOLS, thinking_open=is_open)
    events = [event for piece in pieces for event in parser.feed(piece)]
    found = joined(events + parser.feed("", is_last=True))
    return [
        ToolCallStart(event.index, "", event.name) if isinstance(event, ToolCallStart) else event
        for event in found
    ]


def calls_of(events: list[Event]) -> Calls:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [event.text for event in events if isinstance(event, ToolCallArguments)]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def test_what_is_refused_is_the_table() -> None:
    without = {name for name, text in TEMPLATES.items() if dialect_of(text).form is None}
    assert without == WITHOUT_TOOLS | REFUSED
    assert len(REFUSED) <= 0.05 * len(TEMPLATES.keys() - WITHOUT_TOOLS)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - WITHOUT_TOOLS - REFUSED))
def test_calls_are_read_back(name: str) -> None:
    source, random_ = TEMPLATES[name], random.Random(name)
    dialect = dialect_of(source)
    n_read = 0
    for calls, content, reasoning in ANSWERS:
        text, is_open = written(source, calls, content, reasoning)
        if any(name not in text for name, _ in calls):  # it shows the content alone
            continue
        n_read += 1
        whole = read(dialect, [text], is_open=is_open)
        assert calls_of(whole) == calls, text
        said = "".join(event.text for event in whole if isinstance(event, Content))
        thought = "".join(event.text for event in whole if isinstance(event, Reasoning))
        assert content not in text or content in said + thought
        assert dialect.thinking is None or reasoning not in text or reasoning in thought
        assert read(dialect, list(text), is_open=is_open) == whole
        for _ in range(5):
            cuts = sorted(random_.choices(range(len(text) + 1), k=4))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert read(dialect, pieces, is_open=is_open) == whole
    assert n_read >= (0 if name in WRITE_NO_CALLS else 4)


@pytest.mark.parametrize("name", sorted(WRITE_NO_CALLS))
def test_a_named_form_is_read(name: str) -> None:
    dialect = dialect_of(TEMPLATES[name])
    events = read(dialect, list(WRITE_NO_CALLS[name]), is_open=False)
    assert calls_of(events) == [ROME] and len(events) == 2


def test_each_named_form_is_some_template_s() -> None:
    for text in NAMED:
        assert any(text in source for source in TEMPLATES.values())


@pytest.mark.slow
def test_a_template_that_hangs_or_fails_has_no_calls() -> None:
    hangs = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert dialect_of(f"{hangs}{{{{ tools }}}}").form is None
    assert dialect_of("{{ raise_exception(tools) }}").form is None
    with pytest.raises(InputError):
        ChatTemplate("{% if tools %}", bos="", eos="")
    assert dialect_of("{% if tools %}").form is None
