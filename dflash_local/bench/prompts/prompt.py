"""Prompts as text: the built-in ones, and those of a file of the user's own; some with answers."""

from __future__ import annotations

import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import InputError
from dflash_local.text_file import read_text

CATEGORIES = ("chat", "code", "fim", "long")
"""Of the built-in prompts; `fim` is fill-in-the-middle."""

USUAL = ("chat", "code")
"""Those that are measured unless others are asked for."""

_FILE = Path(__file__).resolve().parent / "prompts.json"


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt in one of three forms: a raw text with special tokens in place, the messages of a
    conversation, or the prefix and suffix of a gap to fill. `answer` is for replays only.
    `add_special`: a raw text lacks the tokens that the model wants at the start of any text."""

    category: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    infill: tuple[str, str] | None = None
    answer: str | None = None
    add_special: bool = True

    @classmethod
    def question(cls, category: str, text: str) -> BenchPrompt:
        """A conversation of one message, the user's."""
        return cls(category, messages=({"role": "user", "content": text},))


def built_in(categories: Sequence[str], *, limit: int) -> list[BenchPrompt]:
    """At most `limit` prompts of each category except `long`, which `case.long_cases` makes."""
    general = json.loads(_FILE.read_text(encoding="utf-8"))
    found = {
        "chat": [BenchPrompt.question("chat", text) for text in general["chat"]],
        "code": [BenchPrompt.question("code", text) for text in general["code"]],
        "fim": [BenchPrompt("fim", infill=(prefix, suffix)) for prefix, suffix in general["fim"]],
    }
    return [
        prompt for category in categories for prompt in found.get(category, [])[: max(0, limit)]
    ]


def read_prompts(path: str | os.PathLike[str], *, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON Lines file, at most `limit` of each category.

    A line is an object with one of `prompt` (raw text), `messages` (of a chat) or `prefix` and
    `suffix` (a gap to fill), and may name a `category`. `add_special` is false beside a raw text
    that is whole, as `serve --record` writes them. Raises InputError, OSError.
    """
    lines = read_lines(path, lambda raw, _number: [prompt_of(raw)])
    if not lines:
        raise InputError(f'{path}: no prompts; expected lines such as {{"prompt": "Once upon"}}')
    return limited(lines, limit)


def read_lines(
    path: str | os.PathLike[str], parse: Callable[[Any, int], list[BenchPrompt]]
) -> list[list[BenchPrompt]]:
    """The prompts that `parse` makes of each line of a JSON Lines file: its object and number.
    Raises InputError, OSError."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            if "\\u" in line:
                _check_whole(raw)
            found.append(parse(raw, number))
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    return found


def limited(lines: list[list[BenchPrompt]], limit: int | None) -> list[BenchPrompt]:
    """The prompts of at most `limit` lines of each category."""
    counts: Counter[str] = Counter()
    prompts: list[BenchPrompt] = []
    for line in lines:
        counts[line[0].category] += 1
        if limit is None or counts[line[0].category] <= limit:
            prompts += line
    return prompts


def _check_whole(raw: Any) -> None:
    """Raises ValueError for text that JSON can hold and no tokenizer can read."""
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair, which is not Unicode text; remove it") from None


def prompt_of(raw: Any) -> BenchPrompt:
    if not isinstance(raw, dict):
        raise TypeError("not a JSON object")
    category = raw.get("category", "own")
    if not (isinstance(category, str) and category):
        raise TypeError(f"category is {category!r}; expected a name")
    forms = [form for form in ("prompt", "messages", "prefix") if form in raw]
    if len(forms) != 1:
        raise ValueError('expected one of "prompt", "messages", or "prefix" with "suffix"')
    if forms == ["messages"]:
        messages = raw["messages"]
        if not (isinstance(messages, list) and messages):
            raise TypeError("messages is not a list of objects with role and content")
        return BenchPrompt(category, messages=tuple(messages))
    if forms == ["prompt"]:
        add_special = raw.get("add_special", True)
        if not isinstance(add_special, bool):
            raise TypeError(f"add_special is {add_special!r}; expected true or false")
        return BenchPrompt(category, text=text_of(raw, "prompt"), add_special=add_special)
    return BenchPrompt(category, infill=(text_of(raw, "prefix"), text_of(raw, "suffix")))


def text_of(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {reprlib.repr(value)}; expected a text")
    return value
