"""Prompts with the answers that shall come out, from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dflash_local.bench.prompts.prompt import BenchPrompt, limited, prompt_of, read_lines, text_of
from dflash_local.errors import InputError


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

    lines = read_lines(path, parsed)
    if not lines:
        raise InputError(
            f'{path}: no answers; expected lines such as {{"prompt": "Once upon", "answer": " a"}}'
        )
    known = dict.fromkeys(line[0].category for line in lines)
    unknown = [name for name in categories if name not in known]
    if unknown:
        raise InputError(f"{path}: no category {unknown[0]!r}; expected one of {', '.join(known)}")
    prompts = limited(lines, limit)
    return [prompt for prompt in prompts if not categories or prompt.category in categories]


def _answered(raw: Any) -> Iterator[BenchPrompt]:
    """The prompts of one line of a replay, at least one."""
    prompt = prompt_of(raw)
    if not prompt.messages:
        answer = text_of(raw, "answer")
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
        role, content = text_of(message, "role"), text_of(message, "content")
        if role == "assistant" and content:
            if not i:
                raise ValueError("the first message is the assistant's; expected what it answers")
            yield replace(prompt, messages=prompt.messages[:i], answer=content)
            n_answers += 1
    if not n_answers:
        raise ValueError('no message with the role "assistant", which is an answer')
