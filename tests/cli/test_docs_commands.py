"""The commands in the documentation: each is one that this program understands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import tiny_coder
from dflash_local.cli.main import NAME, group

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "docs", "examples", "tune")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
_FILE = str(tiny_coder.pair()[0])
_PLACES = {"N": "4", "FILE": _FILE, "TARGET": _FILE, "MODEL": _FILE}
"""The place of a word of the reader's own in a page, and such a word."""
_ENDS = {"|", "||", "&&", ";", ">", "<", "2>", "&", ">>"}


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call in a block of shell commands, and in a line of prose."""
    for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL):
        for line in map(str.strip, block.replace("\\\n", " ").splitlines()):
            if re.match(rf"(?:\S+=\S+ |\$ |.*\| )*(?:\S*/)?{NAME}\s", line):
                yield arguments(line)
    for call in re.findall(rf"`{NAME} ([^`\n]+)`", text):
        if " " in call and not re.search(r"\.\.\.|…", call):
            yield arguments(f"{NAME} {call}")


def arguments(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    begin = next(i for i, word in enumerate(words) if word.rpartition("/")[2] == NAME)
    rest = words[begin + 1 :]
    end = next((i for i, word in enumerate(rest) if word in _ENDS), len(rest))
    return rest[:end]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_of_a_page_is_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_given(_: click.Path, value: Any, *__: Any) -> Any:
        return value  # the files of the examples are not here

    monkeypatch.setattr(click.Path, "convert", as_given)
    for given in commands(page.read_text(encoding="utf-8")):
        if given[0].startswith("-"):
            continue
        context = click.Context(group, info_name=NAME, **group.context_settings)
        name, command, rest = group.resolve_command(context, list(given))
        assert command is not None and name is not None, given
        if {"-h", "--help"} & set(rest):
            continue
        values = [_PLACES.get(word, word) for word in rest]
        try:
            command.make_context(name, values, parent=context)
        except click.ClickException as error:
            raise AssertionError(f"{page.name}: {NAME} {shlex.join(given)}: {error}") from None


def test_each_request_of_a_page_says_that_it_is_json() -> None:
    """The server refuses others, except for Ollama's."""
    found = [call for page in PAGES for call in curls(page.read_text(encoding="utf-8"))]
    assert len(found) > 2
    for call in found:
        if "-d" in call and not any("/api/" in word for word in call):
            assert "Content-Type: application/json" in call
            json.loads(call[call.index("-d") + 1])


def curls(text: str) -> Iterator[list[str]]:
    """The words of each call of curl in a block of shell commands."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        if block.startswith("curl "):
            yield shlex.split(block)


def test_options_that_are_said_to_be_llama_server_s_are_here() -> None:
    """Of each row of the table that begins with "the same", all names."""
    serve = group.commands["serve"]
    known = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    known |= {"-h", "--version"}
    rows = (ROOT / "docs/llama-server-options.md").read_text(encoding="utf-8").splitlines()
    same = [row.split(" | ")[0] for row in rows if " | the same" in row]
    names = [name for row in same for name in re.findall(r"`(-[\w-]+)", row)]
    assert len(names) > 80
    assert not set(names) - known
