"""Calls that the chat templates of many models write are read back as they were.

`templates.tar.xz` has the templates of llama.cpp's `models/templates` as llama-cpp-python 0.3.36 ships
them, with llama.cpp's MIT licence.
"""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from dflash_local.chat.form import common_start
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError

with tarfile.open(Path(__file__).parent / "templates.tar.xz") as packed:
    TEMPLATES = {
        Path(member.name).stem: file.read().decode()
        for member in packed
        if member.name.endswith(".jinja") and (file := packed.extractfile(member))
    }

WITHOUT_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""They show no tools to the model, and write no calls."""
REFUSED = {
    # Each value's element has the key as its name, and lists and objects are elements, too.
    "MiniMax-M3",
    # A call begins without a mark, by the name alone.
    "meetkai-functionary-medium-v3.2",
    # The name comes twice.
    "muse-glimmer",
}
WRITE_NO_CALLS = {
    "LFM2-8B-A1B": '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>',
    "LFM2.5-Instruct": '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>',
    "ibm-granite-granite-3.3-2B-Instruct": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    ),
}
"""They show tools, but leave calls of earlier answers out. What their models are told to write."""

DESCRIBED = {"type": "string", "description": "Any."}
PROPERTIES: dict[str, Any] = {
    "city": DESCRIBED,
    "days": {"type": "integer", "description": "Any."},
    "share": {"type": "number", "description": "Any."},
    "exact": {"type": "boolean", "description": "Any."},
    "names": {"type": "array", "items": DESCRIBED, "description": "Any."},
    "box": {
        "type": "object",
        "properties": {"a": DESCRIBED},
        "additionalProperties": DESCRIBED,
        "description": "Any.",
    },
}
TOOLS = [
    Tool(name, "A tool.", {"type": "object", "properties": PROPERTIES, "required": ["city"]})
    for name in ("get_weather", "get_weather_now")
]
ROME = ("get_weather", {"city": "Rome"})
EVERYTHING = (
    "get_weather_now",
    {
        "city": 'New "York" <b>\n\tis \\ {x} [y], né',
        "days": 3,
        "share": -0.5,
        "exact": True,
        "names": ["x", "y"],
        "box": {"a": "z"},
    },
)
Calls = list[tuple[str, dict[str, Any]]]
ANSWERS: list[tuple[Calls, str, str]] = [
    ([ROME], "", ""),
    ([EVERYTHING], "", ""),
    ([ROME, EVERYTHING, ROME], "", ""),
    ([("get_weather", {})], "", ""),
    ([ROME], "Let me look.", ""),
    ([EVERYTHING], "", "Hm."),
]
ASKED = {"role": "user", "content": "Question?"}


def written(source: str, calls: Calls, content: str, reasoning: str) -> tuple[str, bool]:
    """What a template writes behind its prompt, and whether that is inside of reasoning."""
    template = ChatTemplate(source, bos="", eos="")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message["tool_calls"] = [
        {"id": f"callAbc0{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    if reasoning:
        message["reasoning_content"] = reasoning
    prompt = template.render([ASKED], True, tools=TOOLS)
    whole = template.render([ASKED, message], False, tools=TOOLS)
    thinking = dialect_of(source).thinking
    is_open = thinking is not None and prompt.rstrip().endswith(thinking[0])
    text = whole[len(common_start(prompt, whole)) :]
    # Some templates leave out the reasoning that their prompt begins.
    is_open = is_open and whole.startswith(prompt) and thinking is not None and thinking[1] in text
    return text, is_open


def read(dialect: Dialect, pieces: Iterator[str] | list[str], *, is_open: bool) -> list[Event]:
    parser = dialect.parser(TOOLS, thinking_open=is_open)
    events = [event for piece in pieces for event in parser.feed(piece)]
    found = joined(events + parser.finish())
    return [
        ToolCallStart(event.index, "", event.name) if isinstance(event, ToolCallStart) else event
        for event in found
    ]


def calls_of(events: list[Event]) -> Calls:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [event.text for event in events if isinstance(event, ToolCallArguments)]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def test_what_is_refused_is_the_table() -> None:
    without = {name for name, text in TEMPLATES.items() if not dialect_of(text).has_calls}
    assert without == WITHOUT_TOOLS | REFUSED
    assert len(REFUSED) <= 0.05 * len(TEMPLATES.keys() - WITHOUT_TOOLS)


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


def test_a_template_that_hangs_or_fails_has_no_calls() -> None:
    hangs = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert not dialect_of(f"{hangs}{{{{ tools }}}}").has_calls
    assert not dialect_of("{{ raise_exception(tools) }}").has_calls
    with pytest.raises(InputError):
        ChatTemplate("{% if tools %}", bos="", eos="")
    assert not dialect_of("{% if tools %}").has_calls
