"""Prompts as text: the built-in ones, and those of a file of the user's own; some with answers."""

from __future__ import annotations

import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local import demo
from dflash_local.errors import InputError
from dflash_local.text_file import read_text

CATEGORIES = ("chat", "code", "fim", "long")
"""Of the built-in prompts; `fim` is fill-in-the-middle."""

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
    `suffix` (a gap to fill), and may name a `category`. `add_special` is false beside a raw text
    that is whole, as `serve --record` writes them. Raises InputError, OSError.
    """
    lines = _lines(path, lambda raw, _number: [_parsed(raw)])
    if not lines:
        raise InputError(f'{path}: no prompts; expected lines such as {{"prompt": "Once upon"}}')
    return _limited(lines, limit)


def read_replay(
    path: str | os.PathLike[str], *, categories: Sequence[str] = (), limit: int | None = None
) -> list[BenchPrompt]:
    """Prompts with the answers that shall come out, of a JSON Lines file: at most `limit` lines of
    each category, of `categories` alone if any are named.

    A line has a prompt in one of the forms of `read_prompts`, and its `answer`. A conversation has
    no `answer`: each message of the assistant is one, to the messages before it. Raises InputError,
    OSError.
    """
    seen: dict[str, tuple[int, str | None]] = {}

    def parsed(raw: Any, number: int) -> list[BenchPrompt]:
        found = list(_answered(raw))
        for prompt in found:
            asked = json.dumps([prompt.text, prompt.messages, prompt.infill])
            line, answer = seen.setdefault(asked, (number, prompt.answer))
            if answer != prompt.answer:
                raise ValueError(f"the prompt of line {line} again, with another answer")
        return found

    lines = _lines(path, parsed)
    if not lines:
        raise InputError(
            f'{path}: no answers; expected lines such as {{"prompt": "Once upon", "answer": " a"}}'
        )
    known = dict.fromkeys(line[0].category for line in lines)
    unknown = [name for name in categories if name not in known]
    if unknown:
        raise InputError(f"{path}: no category {unknown[0]!r}; expected one of {', '.join(known)}")
    prompts = _limited(lines, limit)
    return [prompt for prompt in prompts if not categories or prompt.category in categories]


def _lines(
    path: str | os.PathLike[str], parse: Callable[[Any, int], list[BenchPrompt]]
) -> list[list[BenchPrompt]]:
    """What `parse` makes of the object, and the number, of each line of a JSON Lines file. Raises
    InputError, OSError."""
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


def _limited(lines: list[list[BenchPrompt]], limit: int | None) -> list[BenchPrompt]:
    """The prompts of at most `limit` lines of each category."""
    counts: Counter[str] = Counter()
    prompts: list[BenchPrompt] = []
    for line in lines:
        counts[line[0].category] += 1
        if limit is None or counts[line[0].category] <= limit:
            prompts += line
    return prompts


def _check_whole(raw: Any) -> None:
    """Raises ValueError for what JSON can say and no tokenizer can read."""
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair, which is not Unicode text; remove it") from None


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
        add_special = raw.get("add_special", True)
        if not isinstance(add_special, bool):
            raise TypeError(f"add_special is {add_special!r}; expected true or false")
        return BenchPrompt(category, text=_text(raw, "prompt"), add_special=add_special)
    return BenchPrompt(category, infill=(_text(raw, "prefix"), _text(raw, "suffix")))


def _answered(raw: Any) -> Iterator[BenchPrompt]:
    """The prompts of one line of a replay, at least one."""
    prompt = _parsed(raw)
    if not prompt.messages:
        answer = _text(raw, "answer")
        if not answer:
            raise ValueError("answer is empty")
        yield replace(prompt, answer=answer)
        return
    if "answer" in raw:
        raise ValueError("messages with an answer; expected it as the last message")
    n_answers = 0
    for i, message in enumerate(prompt.messages):
        if not isinstance(message, dict):
            raise TypeError(f"message {i + 1} is not an object with role and content")
        role, content = _text(message, "role"), _text(message, "content")
        if role == "assistant" and content:
            if not i:
                raise ValueError("the first message is the assistant's; expected what it answers")
            yield replace(prompt, messages=prompt.messages[:i], answer=content)
            n_answers += 1
    if not n_answers:
        raise ValueError('no message with the role "assistant", which is an answer')


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {reprlib.repr(value)}; expected a text")
    return value
