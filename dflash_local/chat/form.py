"""The form of a model's tool calls, as a chat template shows it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

ID = "\0"
"""Stands in a form's texts where a call has its id or its number."""

CDATA = "<![CDATA["
PYTHON = "'"
Marks = tuple[str, str]
THINK = "<think>", "</think>"

_MARK = re.compile(r"<[^<>]*>?|\[/?[A-Z_ ]+\]|\0|[^<\[\s\0]+|\[")


def marks_of(text: str) -> list[str]:
    """The marks in a text, such as `<tool_call>`, and what is between them, without white space."""
    return [found.rstrip() for found in _MARK.findall(text)]


@dataclass(frozen=True)
class Tags:
    """Arguments that are one element each, such as `<parameter=KEY>VALUE</parameter>`.

    `opening` comes before a key. `values` has what comes between a key and a value, by the value's
    JSON type, where types differ; "" is any other type. `closing` comes behind a value. Texts may
    be `cdata`, as in XML.
    """

    opening: str
    values: Mapping[str, str]
    closing: str
    cdata: bool = False


@dataclass(frozen=True)
class Form:
    """Calls are written `head` call (`between` call)* `tail`.

    A call is `begin` NAME `middle` ARGUMENTS `end`. Where it is a JSON object, `keys` are those of
    its name and its arguments, and it may be written with other white space and in another order.

    Arguments are a JSON object, unless they are `tags`. With a `quote` they are an object whose
    texts have this one, and whose keys have none; if it is `PYTHON`, they are a call's in Python.
    """

    head: str = ""
    begin: str = ""
    middle: str = ""
    end: str = ""
    between: str = ""
    tail: str = ""
    keys: tuple[str, str] | None = None
    tags: Tags | None = None
    quote: str | None = None

    @property
    def again(self) -> str:
        """The part of `between` that begins a call: `head` ends with it."""
        return common_end(self.head, self.between)

    @property
    def openings(self) -> dict[str, str]:
        """The marks that may begin a call, with what comes between each and the call. A model now
        and then forgets the outer ones."""
        found: dict[str, str] = {}
        for text in (self.head, self.again):
            at = 0
            for mark in marks_of(text):
                at = text.index(mark, at) + len(mark)
                if mark[0] == "<" or not text[: at - len(mark)].strip():
                    found.setdefault(mark, text[at:])
        return found

    @property
    def closings(self) -> frozenset[str]:
        """Marks that belong to the calls where they come behind one."""
        between = self.between.removesuffix(self.again)
        ends = [*marks_of(between), *marks_of(self.tail)]
        if self.tags:
            ends += marks_of(self.end)
        return frozenset(mark for mark in ends if mark != ID)

    @property
    def is_bare(self) -> bool:
        """Whether no mark tells a call from content."""
        return not self.head.strip()


def shared_start(*texts: str) -> str:
    """The beginning of all texts."""
    differ = (i for i, each in enumerate(zip(*texts, strict=False)) if len({*each}) > 1)
    return texts[0][: next(differ, min(map(len, texts)))]


def common_start(a: str, b: str) -> str:
    """The beginning of both texts, in whole marks."""
    start = shared_start(a, b)
    begun = start.rfind("<")
    return start if begun <= start.rfind(">") else start[:begun]


def common_end(a: str, b: str) -> str:
    """The end of both texts, in whole marks."""
    end = shared_start(a[::-1], b[::-1])[::-1]
    begun, close = end.find("<"), end.find(">")
    return end[close + 1 :] if close >= 0 and not 0 <= begun < close else end
