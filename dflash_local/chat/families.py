"""Which dialect a model speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.form import PYTHON, THINK, Form
from dflash_local.chat.harmony import MARKS as HARMONY_MARKS
from dflash_local.chat.harmony import Harmony
from dflash_local.chat.probe import learned
from dflash_local.chat.template import ChatTemplate
from dflash_local.errors import InputError

NAMED = {
    "<|tool_call|>": Form(
        head="<|tool_call|>[",
        begin='{"name": "',
        middle='", "arguments": ',
        end="}",
        between=", ",
        tail="]",
        keys=("name", "arguments"),
    ),
    "List of tools: ": Form(
        head="<|tool_call_start|>[",
        middle="(",
        between=", ",
        tail="]<|tool_call_end|>",
        quote=PYTHON,
    ),
}
"""Forms of models whose templates write no calls, by a text in the template: Granite 3, LFM2."""


def dialect_of(
    template: str | None, control_names: Callable[[str], Iterator[object]] | None = None
) -> Dialect:
    """The dialect of a model with this chat template, None for a model without one.

    `control_names` finds names of control tokens in a text: where calls are written with such, the
    answer's text must have them.
    """
    found = _learned(template or "")
    if control_names and any(control_names(repr(found))):  # it has all marks as they are
        return replace(found, special=True)
    return found


@lru_cache(64)
def _learned(source: str) -> Dialect:
    if all(part in source for part in HARMONY_MARKS):
        return Harmony()
    thinks = THINK if any(mark in source for mark in THINK) else None
    if "tool" not in source and "functions" not in source:
        return Dialect(thinking=thinks)
    try:
        template = ChatTemplate(source, bos="", eos="")
    except InputError:  # whoever renders it says so
        return Dialect(thinking=thinks)
    form, thinking, marks = learned(template)
    if form is None:
        form = next((form for text, form in NAMED.items() if text in source), None)
    tag = "<|python_tag|>" if form and form.is_bare and "<|start_header_id|>" in source else ""
    thinking = thinking or thinks
    if form and thinking:
        # Where the model may reason, its calls need no empty reasoning before them.
        form = replace(form, head=form.head.lstrip().removeprefix("".join(thinking)))
    silent = {*marks} - {*form.openings} if form else ()
    return Dialect(form, thinking, tag, tuple(sorted(silent)), special=bool(tag))
