"""What is asked of the models: prompts by category, as token ids of the model at hand."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_local import demo
from dflash_local.errors import InputError

if TYPE_CHECKING:
    from dflash_local.model import Model

CATEGORIES = ("chat", "code", "fim", "long")
"""Of the built-in prompts; `fim` is fill-in-the-middle."""

DEPTHS = (1024, 8192, 32768)
"""Tokens after which the answers of long prompts end."""

_FOLDER = Path(__file__).resolve().parent
_SPARE_ROWS = 32  # between the end of an answer and its depth: room for a last draft


@dataclass(frozen=True)
class Prompt:
    """A prompt in one of four forms: a raw text with special tokens in place, the messages of a
    conversation, the prefix and suffix of a gap to fill, or token ids."""

    category: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    infill: tuple[str, str] | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A prompt as a model reads it. `index` counts within the category."""

    category: str
    index: int
    tokens: list[int]


def built_in(categories: Sequence[str], *, limit: int, shipped: bool) -> list[Prompt]:
    """At most `limit` prompts of each category but `long`, which `long_cases` makes.

    `shipped`: those on which the shipped pair was trained, not those of a general model.
    """
    general = json.loads((_FOLDER / "prompts.json").read_text(encoding="utf-8"))
    found: dict[str, list[Prompt]] = {
        "chat": [Prompt("chat", messages=_user(text)) for text in general["chat"]],
        "code": [Prompt("code", messages=_user(text)) for text in general["code"]],
        "fim": [Prompt("fim", infill=(prefix, suffix)) for prefix, suffix in general["fim"]],
    }
    if shipped:
        for category, texts in demo.prompts().items():
            kept = [text for text in texts if "<|fim_" not in text]
            found[category] = [Prompt(category, text=text) for text in kept]
    return [
        prompt for category in categories for prompt in found.get(category, [])[: max(0, limit)]
    ]


def read_prompts(path: str | os.PathLike[str], *, limit: int | None = None) -> list[Prompt]:
    """Prompts of a JSON Lines file, at most `limit` of each category.

    A line is an object with one of `prompt` (raw text), `messages` (of a chat) or `prefix` and
    `suffix` (a gap to fill), and may name a `category`. Raises InputError, OSError.
    """
    prompts: list[Prompt] = []
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


def _parsed(raw: Any) -> Prompt:
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
        return Prompt(category, messages=tuple(messages))
    if forms == ["prompt"]:
        return Prompt(category, text=_text(raw, "prompt"))
    return Prompt(category, infill=(_text(raw, "prefix"), _text(raw, "suffix")))


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {reprlib.repr(value)}; expected a text")
    return value


def _user(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


# Token ids


def read_by(
    model: Model, prompts: Sequence[Prompt], *, room: int, thinking: bool = False
) -> tuple[list[Case], list[str]]:
    """The prompts as `model` reads them, and a note for each kind that it cannot.

    `room` are the tokens of context that the answer needs; `thinking` leaves the reasoning of chat
    templates on, which most published drafters were not trained for. Raises InputError for
    messages that the model's template refuses.
    """
    cases: list[Case] = []
    counts: dict[str, int] = {}
    left_out: dict[tuple[str, str], int] = {}
    marks = infill_tokens(model)
    for prompt in prompts:
        tokens, fault = _tokens(model, prompt, marks, thinking), ""
        if prompt.infill is not None and marks is None:
            fault = "the model has no fill-in-the-middle tokens"
        elif prompt.messages and model.target.chat_template is None:
            fault = "the model has no chat template"
        elif len(tokens) + room > model.n_ctx:
            fault = f"prompt and answer exceed the context of {model.n_ctx} tokens"
        if fault:
            key = prompt.category, fault
            left_out[key] = left_out.get(key, 0) + 1
            continue
        index = counts.get(prompt.category, 0)
        counts[prompt.category] = index + 1
        cases.append(Case(prompt.category, index, tokens))
    notes = [f"{category}: {n} left out, {why}" for (category, why), n in left_out.items()]
    return cases, notes


def _tokens(
    model: Model, prompt: Prompt, marks: tuple[int, int, int] | None, thinking: bool
) -> list[int]:
    """Token ids, none where the model lacks what the prompt needs."""
    if prompt.tokens:
        return list(prompt.tokens)
    if prompt.text is not None:
        return model.tokenize(prompt.text)
    if prompt.messages:
        if model.target.chat_template is None:
            return []
        kwargs = {} if thinking else {"enable_thinking": False}
        return model.chat_prompt(prompt.messages, chat_template_kwargs=kwargs)
    if prompt.infill is None or marks is None:
        return []
    vocabulary = model.target.vocabulary
    begin, gap, middle = marks
    prefix, suffix = (
        vocabulary.tokenize(text, special=False, add_special=False) for text in prompt.infill
    )
    # What the model wants at the start of any text, less what it wants at the end of one.
    start = vocabulary.tokenize("", add_special=True)[:1]
    start = [token for token in start if not vocabulary.ends_text(token)]
    return [*start, begin, *prefix, gap, *suffix, middle]


def infill_tokens(model: Model) -> tuple[int, int, int] | None:
    """The tokens before prefix, suffix and middle of a gap; None where the model has none."""
    marks = model.target.vocabulary.infill
    return (marks.prefix, marks.suffix, marks.middle) if marks else None


def long_cases(
    model: Model, depths: Sequence[int], *, limit: int, room: int
) -> tuple[list[Case], list[str]]:
    """Long texts to go on with: `limit` prompts for each of `depths` that the context holds.

    A prompt ends so much before its depth that an answer of `room` tokens ends within it. The text
    is this package's own source code, which lies wherever the package does.
    """
    cases: list[Case] = []
    notes: list[str] = []
    text = _own_source()
    for depth in depths:
        name = depth_name(depth)
        n = depth - room - _SPARE_ROWS
        if depth > model.n_ctx:
            notes.append(f"{name}: left out, the context holds {model.n_ctx} tokens")
            continue
        if n < 1:
            notes.append(f"{name}: left out, an answer of {room} tokens leaves no room for it")
            continue
        # Another prompt begins elsewhere in the text, so that no cache has its beginning.
        tokens = model.tokenize(text)
        while len(tokens) < n:  # a tokeniser of few, long tokens
            tokens += tokens
        step = len(tokens) // max(1, limit)
        for index in range(limit):
            start = index * step
            cases.append(Case(name, index, [*tokens[start:], *tokens[:start]][:n]))
    return cases, notes


def random_cases(
    n_vocab: int, lengths: Mapping[str, int], *, limit: int, seed: int = 0
) -> list[Case]:
    """Drawn token ids, for models whose weights mean nothing; `lengths` by category, in tokens."""
    rng = np.random.default_rng(seed)
    # The first ids of most vocabularies are control tokens or bytes, the last ones control tokens.
    low, high = min(256, n_vocab // 4), max(n_vocab // 2, 1)
    return [
        Case(category, index, rng.integers(low, high, n).tolist())
        for category, n in lengths.items()
        for index in range(limit)
    ]


def depth_name(depth: int) -> str:
    """`1k` for 1024."""
    return f"{depth // 1024}k" if depth % 1024 == 0 else str(depth)


def _own_source() -> str:
    files = sorted(_FOLDER.parent.parent.glob("*.py"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
