"""The dialect of a model, as its chat template shows it.

The template writes answers with known calls, and these are compared: their common parts are the
form.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import ToolCallArguments, ToolCallStart
from dflash_local.chat.form import (
    CDATA,
    ID,
    PYTHON,
    THINK,
    Form,
    Marks,
    Tags,
    common_end,
    common_start,
    marks_of,
)
from dflash_local.chat.harmony import MARKS as HARMONY_MARKS
from dflash_local.chat.harmony import Harmony
from dflash_local.chat.parsing.answer import AnswerParser
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool

NAMED = {
    "<|tool_call|>": Form(
        "<|tool_call|>[", '{"name": "', '", "arguments": ', "}", ", ", "]", ("name", "arguments")
    ),
    "List of tools: ": Form(
        "<|tool_call_start|>[", middle="(", between=", ", tail="]<|tool_call_end|>", quote=PYTHON
    ),
}
"""Forms of models whose templates write no calls, by a text in the template: Granite 3, LFM2."""

_MOST_SECONDS = 10.0
"""For all renderings of a template: a dozen, of some milliseconds each."""

_TOOL, _OTHER = "probe_alpha", "probe_beta"
_KEY, _KEY_2 = "colour", "shape"
_TEXT, _TEXT_2 = "Vermilion", "Octagon"
_IDS = ("callAbc01", "callAbc02")
"""Of nine letters and digits, which Mistral's templates ask for."""
_SAID, _THOUGHT = "Zounds", "Quaint"
_ASKED = {"role": "user", "content": "Do it."}
_TYPED: Mapping[str, tuple[Any, str]] = {
    "string": (_TEXT, _TEXT),
    "integer": (7531, "7531"),
    "number": (2.5, "2.5"),
    "boolean": (True, "[Tt]rue"),
    "null": (None, "null|None"),
    "array": ([7531], r"\[7531\]"),
    "object": ({"deep": 7531}, r"\{\W*deep\W*7531\}"),
}
"""A value of each type, and how it may be written, as a regular expression."""
_DESCRIBED = {"type": "string", "description": "A key."}
_PROPERTIES = {_KEY: _DESCRIBED, _KEY_2: _DESCRIBED}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": []}
_TOOLS = {name: Tool(name, "A probe.", _PARAMETERS) for name in (_TOOL, _OTHER)}
_DECODER = json.JSONDecoder(strict=False)
_FAULTS = (ValueError, IndexError)  # InputError is the former


class _Unknown(ValueError):
    """The template's calls have none of the known forms."""


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
    thinking: Marks | None = None
    form: Form | None = None
    marks: tuple[str, ...] = ()
    # Whoever renders a template that fails says so.
    if "tool" in source or "functions" in source:
        with suppress(*_FAULTS):
            probe = _Probe(ChatTemplate(source, bos="", eos=""))
            with suppress(*_FAULTS):
                thinking = _reasoning(probe)
            with suppress(*_FAULTS):
                marks = _wrapping(probe, thinking or ())
            form = _form(probe)
        if form is None:
            form = next((form for text, form in NAMED.items() if text in source), None)
    tag = "<|python_tag|>" if form and form.is_bare and "<|start_header_id|>" in source else ""
    thinking = thinking or (THINK if any(mark in source for mark in THINK) else None)
    if form and thinking:
        # Where the model may reason, its calls need no empty reasoning before them.
        form = replace(form, head=form.head.lstrip().removeprefix("".join(thinking)))
    silent = {*marks} - {*form.openings} if form else ()
    return Dialect(form, thinking, tag, tuple(sorted(silent)), special=bool(tag))


class _Probe:
    """Renders answers with `template`, all in `_MOST_SECONDS`."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._until = time.monotonic() + _MOST_SECONDS
        self._before = ""
        self._before = self.behind([_ASKED])
        self.plain = self.answer(content=_SAID)

    def answer(self, *calls: dict[str, Any], content: str = "", reasoning: str = "") -> str:
        """The text behind the user's message, with `ID` for the ids of calls."""
        called = [
            {"id": id_, "type": "function", "function": call}
            for id_, call in zip(_IDS, calls, strict=False)
        ]
        said = {"content": content, "reasoning_content": reasoning, "tool_calls": called}
        text = self.behind([_ASKED, {"role": "assistant", **said}])
        return text.replace(_IDS[0], ID).replace(_IDS[1], ID)

    def behind(self, messages: list[dict[str, Any]], *, begin_answer: bool = False) -> str:
        """The text that the template writes behind the user's message."""
        if time.monotonic() > self._until:
            raise _Unknown
        text = self._template.render(messages, begin_answer, tools=[*_TOOLS.values()])
        return text[len(common_start(text, self._before)) :]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


_CALLS = _call(_TOOL, colour=_TEXT), _call(_OTHER, colour=_TEXT_2)


def _reasoning(probe: _Probe) -> Marks | None:
    said = probe.answer(content=_SAID, reasoning=_THOUGHT).partition(_THOUGHT)
    called = probe.answer(_CALLS[0], reasoning=_THOUGHT).partition(_THOUGHT)
    before = said[0] if said[1] else called[0]
    opening = before[len(common_start(before, probe.plain)) :].strip()
    endings = [said[2].partition(_SAID)[0], called[2].partition(_TOOL)[0]]
    closing = common_start(*endings) if all(endings) else "".join(marks_of("".join(endings))[:1])
    is_known = (said[1] or called[1]) and opening[:1] in ("<", "[") and closing.strip()
    return (opening, closing.strip()) if is_known else None


def _wrapping(probe: _Probe, thinking: Sequence[str]) -> tuple[str, ...]:
    before, _, behind = probe.plain.partition(_SAID)
    prompt = probe.behind([_ASKED], begin_answer=True)
    before = before[len(common_start(before, prompt)) :]
    for mark in thinking:
        before = before.replace(mark, "")
    before = before.strip()
    return (before, *marks_of(behind)[:1]) if before else ()


def _form(probe: _Probe) -> Form:
    one = probe.answer(_CALLS[0])
    begin = len(common_start(one, probe.plain))
    one, two = one[begin:], probe.answer(*_CALLS)[begin:]
    if one.count(_TOOL) != 1 or two.count(_OTHER) != 1:
        raise _Unknown
    turn_end = common_end(probe.plain, one)
    found = _json_form(one, two) or _tagged_form(probe, begin, one, two)
    found = replace(found, tail=found.tail.removesuffix(turn_end))
    parser = AnswerParser(found, _TOOLS)
    events = parser.feed(two.replace(ID, _IDS[0]), is_last=True)
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(each.text) for each in events if isinstance(each, ToolCallArguments)]
    if list(zip(names, arguments, strict=False)) != [(c["name"], c["arguments"]) for c in _CALLS]:
        raise _Unknown
    return found


def _json_form(one: str, two: str) -> Form | None:
    """The arguments are a JSON object, perhaps in another one that has the name, too."""
    try:
        head, middle, tail = _around(one, _TOOL)
        before, again, _ = _around(two, _OTHER)
        between = _around(before, _TOOL)[2]
    except ValueError:
        return None
    start, stop, keys = _object(one) or (len(head), len(one) - len(tail), None)
    begin, end = head[start:], one[len(one) - len(tail) : stop]
    if not keys and not head.strip():  # nothing tells a call from content
        raise _Unknown
    n = len(between) - len(begin)
    begin, middle = _unnumbered(begin, between[n:]), _unnumbered(middle, again)
    return Form(head[:start], begin, middle, end, between[len(end) : n], tail[len(end) :], keys)


def _around(text: str, name: str) -> tuple[str, str, str]:
    """The texts before a name, between it and its arguments in JSON, and behind these."""
    begin, _, rest = text.partition(name)
    at = rest.index("{")
    value, stop = _DECODER.raw_decode(rest, at)
    if _KEY not in value:
        raise _Unknown
    return begin, rest[:at], rest[stop:]


def _object(text: str) -> tuple[int, int, tuple[str, str]] | None:
    """The place of a call's object, and its keys of name and arguments."""
    for found in re.finditer("{", text[: text.index(_TOOL)]):
        with suppress(ValueError):
            value, stop = _DECODER.raw_decode(text, found.start())
            names = [key for key, each in value.items() if each == _TOOL]
            inner = [key for key, each in value.items() if isinstance(each, dict) and _KEY in each]
            if names and inner:
                return found.start(), stop, (names[0], inner[0])
    return None


def _tagged_form(probe: _Probe, begin: int, one: str, two: str) -> Form:
    """Each argument is an element of its own, or written as in Python."""
    head, _, _ = one.partition(_TOOL)
    several = probe.answer(_call(_TOOL, colour=_TEXT, shape=_TEXT_2))[begin:]
    parts = f"(.*?){_KEY}(.*?){_TEXT}(.*){_KEY_2}(.*?){_TEXT_2}(.*)"
    found = re.fullmatch(parts, several.partition(_TOOL)[2], re.DOTALL)
    if found is None or found[2] != found[4] or _KEY in found[3]:
        raise _Unknown
    first, value, behind, _, last = found.groups()
    between, _, second = two.partition(_TOOL)[2].partition(_TEXT)[2].rpartition(_OTHER)
    values = {kind: start for kind in _TYPED if (start := _value_start(probe, kind)) is not None}
    quote = value.removeprefix(values.get("integer", value))
    if quote and quote != value and last.startswith(quote):
        is_python = quote in "'\""
        n = last.index(")" if is_python else "}", len(quote)) + 1
        middle, quote = (first, PYTHON) if is_python else (first.rstrip("{"), quote)
        return Form(head, middle=middle, between=between[n:], tail=last[n:], quote=quote)
    none = probe.answer(_call(_TOOL))[begin:].partition(_TOOL)[2]
    middle, closing = common_start(first, none), common_start(behind, last)
    opening = first[len(middle) :]
    between, last = between[len(closing) :], last[len(closing) :]
    end = common_start(last, between).rstrip()
    if not all(map(str.strip, (opening, closing, end))):
        raise _Unknown
    second = second.partition(_KEY)[0].removesuffix(opening)
    values = {"": value} if {*values.values()} == {value} else values
    cdata = CDATA in probe.answer(_call(_TOOL, colour="<Ruby>\n&"))
    middle, tags = _unnumbered(middle, second), Tags(opening, values, closing, cdata)
    return Form(head, "", middle, end, between[len(end) :], last[len(end) :], tags=tags)


def _value_start(probe: _Probe, kind: str) -> str | None:
    """The text between a key and a value of a type; None if the template leaves it out."""
    value, shown = _TYPED[kind]
    text = probe.answer(_call(_TOOL, colour=value)).rpartition(_KEY)[2]
    *_, last = [None, *re.finditer(shown, text)]
    return None if last is None else text[: last.start()]


def _unnumbered(text: str, other: str) -> str:
    """The text of two calls, with `ID` for the numbers in which they differ."""
    if text == other:
        return text
    found = re.sub(r"[0-9]+", ID, text)
    if found != re.sub(r"[0-9]+", ID, other):
        raise _Unknown
    return found
