"""Writes Lark grammars for llguidance, as far as tool calls need them.

The syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from dflash_local.chat.form import ID, Marks
from dflash_local.sampling.json_schema import enforceable

IsToken = Callable[[str], bool]
"""Whether a text is the name of one control or user-defined token of the vocabulary."""

# The layout of Python's json.dumps, which templates show the models. If white space were free,
# small models would write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def literal(text: str) -> str:
    """`text` as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_rule(text: str, is_token: IsToken) -> str:
    """A text, in which the names of tokens are these tokens, and ids of calls are free."""
    parts, plain = [], ""
    # Other names have no syntax there. What is text comes in one literal: it is lexed as a whole.
    for piece in re.split(rf"(<[^<>\s]+>|{ID})", text):
        if piece == ID or (piece[:1] == "<" and is_token(piece)):
            parts += [literal(plain), "/[a-zA-Z0-9_-]{1,64}/" if piece == ID else piece]
            plain = ""
        else:
            plain += piece
    return " ".join(part for part in [*parts, literal(plain)] if part != literal(""))


def rules_up_to(mark: str, is_token: IsToken, name: str, repeat: str = "*") -> list[str]:
    """A rule `name` and what it needs: any character, repeated so often, and the first `mark`."""
    if is_token(mark.strip()):
        # No token can match within a terminal, so it ends before the mark by itself.
        terminal = name.upper()
        return [f"{name}: {terminal} {text_rule(mark, is_token)}", rf"{terminal}: /(.|\n){repeat}/"]
    plain = re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", mark).replace("\n", "\\n")
    return [rf"{name}[lazy]: /(.|\n){repeat}{plain}/"]


def json_rule(name: str, schema: Any, *, lenient: bool = True) -> str:
    """A rule for JSON text of `schema`, in the layout that models are shown.

    `lenient` ignores the parts of the schema that llguidance does not know; without it, such a
    schema is refused: GrammarError. The tools of editors use formats and keywords that OpenAI
    ignores too.
    """
    bound = enforceable(schema, lenient=lenient)
    bound = {**bound, "x-guidance": {**_LAYOUT, "lenient": lenient}}
    return f"{name}: %json {json.dumps(bound)}"


def reasoning_rules(is_token: IsToken, marks: Marks, gap: str, *, is_open: bool) -> list[str]:
    """Rules `reasoning` and what it needs: an optional reasoning part, or the rest of one, and the
    text `gap` behind it, or some line breaks."""
    opening, closing = marks
    thought = f"thought {text_rule(gap, is_token) or 'GAP'}"
    begun = thought if is_open else f"({text_rule(opening, is_token)} {thought})?"
    gaps = [f"reasoning: {begun}", r"GAP: /\n{0,2}/"]
    return [*gaps, *rules_up_to(closing, is_token, "thought")]


def any_of(names: Sequence[str]) -> str:
    return " | ".join(names)


def either(*grammars: str) -> str:
    """A grammar of the texts of all `grammars`."""
    names = [f"way{i}" for i in range(len(grammars))]
    rules = [f"{name}: %lark {{\n{text}\n}}" for name, text in zip(names, grammars, strict=True)]
    return "\n".join([f"start: {any_of(names)}", *rules])
