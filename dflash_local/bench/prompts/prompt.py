"""Prompts as text: the built-in ones, and those of a file of the user's own."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local import demo
from dflash_local.errors import InputError

CATEGORIES = ("chat", "code", "fim", "long")
"""Of the built-in prompts; `fim` is fill-in-the-middle."""

_FILE = Path(__file__).resolve().parent / "prompts.json"


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt in one of three forms: a raw text with special tokens in place, the messages of a
    conversation, or the prefix and suffix of a gap to fill."""

    category: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    infill: tuple[str, str] | None = None

    @classmethod
    def question(cls, category: str, text: str) -> BenchPrompt:
        """A conversation of one message, the user's."""
        return cls(category, messages=({"role": "user", "content": text},))


def built_in(categories: Sequence[str], *, limit: int, shipped: bool) -> list[BenchPrompt]:
    """At most `limit` prompts of each category except `long`, which `case.long_cases` makes.

    `shipped`: those on which the shipped pair was trained, not those of a general model.
    """
    general = json.loads(_FILE.read_text(encoding="utf-8"))
    found = {
        "chat": [BenchPrompt.question("chat", text) for text in general["chat"]],
        "code": [BenchPrompt.question("code", text) for text in general["code"]],
        "fim": [BenchPrompt("fim", infill=(prefix, suffix)) for prefix, suffix in general["fim"]],
    }
    if shipped:
        for category, texts in demo.prompts().items():
            kept = [text for text in texts if "<|fim_" not in text]
            found[category] = [BenchPrompt(category, text=text) for text in kept]
    return [
        prompt for category in categories for prompt in found.get(category, [])[: max(0, limit)]
    ]


def read_prompts(path: str | os.PathLike[str], *, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON Lines file, at most `limit` of each category.

    A line is an object with one of `prompt` (raw text), `messages` (of a chat) or `prefix` and
    `suffix` (a gap to fill), and may name a `category`. Raises InputError, OSError.
    """
    prompts: list[BenchPrompt] = []
    counts: dict[str, int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; expected a JSON object on each line") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parsed(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if limit is None or counts[prompt.category] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise InputError(f'{path}: no prompts; expected lines such as {{"prompt": "Once upon"}}')
    return prompts


def _parsed(raw: Any) -> BenchPrompt:
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
        return BenchPrompt(category, text=_text(raw, "prompt"))
    return BenchPrompt(category, infill=(_text(raw, "prefix"), _text(raw, "suffix")))


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {reprlib.repr(value)}; expected a text")
    return value
