"""Makes the shipped texts of `bench --replay` from released versions of open packages.

    pip download --no-deps --no-binary :all: PACKAGE==VERSION    # both of each of PACKAGES
    for each in *.tar.gz; do tar xzf $each; done
    python -m lab.make_replay_texts FOLDER_WITH_THEM

Edits are those between two releases. Only the renamed identifiers, the changed JSON values and the
words around the texts are made here.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from lab.replay import SHIPPED

Line = dict[str, Any]

PACKAGES = {
    "attrs": ("attrs-22.1.0", "attrs-23.2.0", "LICENSE"),
    "click": ("click-8.1.3", "click-8.1.7", "LICENSE.rst"),
    "h11": ("h11-0.12.0", "h11-0.14.0", "LICENSE.txt"),
    "httpx": ("httpx-0.25.0", "httpx-0.27.0", "LICENSE.md"),
    "itsdangerous": ("itsdangerous-2.1.2", "itsdangerous-2.2.0", "LICENSE.txt"),
    "markupsafe": ("MarkupSafe-2.0.1", "MarkupSafe-2.1.5", "LICENSE.rst"),
    "packaging": ("packaging-21.3", "packaging-23.2", "LICENSE.BSD"),
    "sphinx": ("Sphinx-5.3.0", "sphinx-7.2.6", "LICENSE"),
    "starlette": ("starlette-0.27.0", "starlette-0.36.3", "LICENSE.md"),
}
"""Folders of the older and the newer release, and the file with the licence."""

FUNCTIONS = (
    ("click", "src/click/decorators.py", "make_pass_decorator"),
    ("httpx", "httpx/_decoders.py", "LineDecoder"),
    ("starlette", "starlette/responses.py", "Response.init_headers"),
    ("httpx", "httpx/_auth.py", "DigestAuth._build_auth_header"),
)
FILES = (
    ("markupsafe", "src/markupsafe/_native.py"),
    ("starlette", "starlette/convertors.py"),
    ("sphinx", "sphinx/themes/basic/static/sphinx_highlight.js"),
    ("attrs", "src/attr/filters.py"),
)
REFACTORINGS = (
    ("starlette", "starlette/middleware/exceptions.py", None),  # its core moved to another file
    ("h11", "h11/_events.py", "Request"),  # became a dataclass
    ("starlette", "starlette/middleware/__init__.py", None),  # became generic
)
RENAMES = (
    ("starlette", "starlette/background.py", "BackgroundTask", "DeferredCall"),
    ("itsdangerous", "src/itsdangerous/exc.py", "payload", "content"),
    ("httpx", "httpx/_transports/mock.py", "handler", "respond"),
)
JSON = (
    ("starlette", ("project", "requires-python"), ">=3.9"),
    ("attrs", ("tool", "towncrier", "filename"), "HISTORY.md"),
    ("httpx", ("tool", "hatch", "version", "path"), "httpx/version.py"),
)
QUOTES = (
    ("packaging", "docs/requirements.rst"),
    ("attrs", ".github/PULL_REQUEST_TEMPLATE.md"),
    ("markupsafe", "README.rst"),
)
PROSE = (
    ("attrs", "docs/why.md", "Why would I use a library for classes?"),
    ("click", "docs/why.rst", "What is the point of yet another library for command lines?"),
    ("attrs", "docs/hashing.md", "Tell me about the hashes of objects."),
    ("attrs", "docs/init.md", "How should a class be initialised?"),
)
SESSION = ("starlette", ("starlette/background.py", "starlette/middleware/authentication.py"))
LONG_FILES = (
    ("markupsafe", "src/markupsafe/_speedups.c"),
    ("httpx", "httpx/_main.py"),
)
LONG_SESSION = ("starlette", ("starlette/schemas.py", "starlette/endpoints.py"))
_LEAST_PROSE = 1500  # characters


class Sources:
    """The unpacked releases."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def both(self, package: str, path: str) -> tuple[str, str]:
        """A file before and after."""
        old, new, _ = PACKAGES[package]
        return self.read(old, path), self.read(new, path)

    def read(self, release: str, path: str) -> str:
        return (self._folder / release / path).read_text(encoding="utf-8")

    def licence(self, package: str) -> Path:
        _, new, name = PACKAGES[package]
        return self._folder / new / name


def lines(sources: Sources) -> Iterator[Line]:
    """All lines of the file."""
    for package, path, name in FUNCTIONS:
        yield released("function", sources, package, path, name)
    for package, path in FILES:
        yield released("file", sources, package, path)
    for package, path, part in REFACTORINGS:
        yield released("refactoring", sources, package, path, part)
    for package, path, old, new in RENAMES:
        text = sources.both(package, path)[1]
        renamed = re.sub(rf"\b{old}\b", new, text)
        yield edit("rename", path, text, renamed, f"Rename `{old}` to `{new}`.")
    for package, keys, value in JSON:
        yield changed_json(package, sources, keys, value)
    for package, path in QUOTES:
        yield released("quote", sources, package, path)
    for package, path, question in PROSE:
        text = without_repeats(sources.read(PACKAGES[package][1], path))
        yield talk("prose", question, text)
    yield session("session", sources, *SESSION)
    for package, path in LONG_FILES:
        yield released("long-file", sources, package, path)
    yield session("long-session", sources, *LONG_SESSION)


def talk(category: str, *contents: str) -> Line:
    """A conversation that the user begins."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"category": category, "messages": messages}


def released(
    category: str, sources: Sources, package: str, path: str, name: str | None = None
) -> Line:
    """A file, or one definition of it, as it became with the next release."""
    before, after = sources.both(package, path)
    if name is not None:
        before, after = definition(before, name), definition(after, name)
    return edit(category, path, before, after, f"Change it as in {PACKAGES[package][1]}.")


def edit(category: str, path: str, before: str, after: str, wish: str) -> Line:
    """One text asked for and given back with its changes."""
    question = f"{path}:\n\n{fenced(path, before)}\n{wish} Write all of it."
    return talk(category, question, fenced(path, after))


def fenced(path: str, text: str) -> str:
    kind = {".py": "python", ".js": "js", ".c": "c", ".json": "json"}.get(Path(path).suffix, "")
    return f"```{kind}\n{text.rstrip()}\n```\n"


def definition(text: str, name: str) -> str:
    """The source of a function or class, `A.b` for a method."""
    body, found = ast.parse(text).body, None
    for part in name.split("."):
        found = next(node for node in body if getattr(node, "name", None) == part)
        body = found.body  # type: ignore[attr-defined]
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    begin = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    return "".join(text.splitlines(keepends=True)[begin - 1 : found.end_lineno])


def changed_json(package: str, sources: Sources, keys: tuple[str, ...], value: Any) -> Line:
    """A settings file as JSON, and again with one value changed."""
    settings = tomllib.loads(sources.read(PACKAGES[package][1], "pyproject.toml"))
    if len(keys) > 2:  # the part of it that is concerned
        settings = {"tool": {keys[1]: settings["tool"][keys[1]]}}
    before = json.dumps(settings, indent=2)
    place = settings
    for key in keys[:-1]:
        place = place[key]
    assert place[keys[-1]] != value
    place[keys[-1]] = value
    wish = f"Set {'.'.join(keys)} to {json.dumps(value)}."
    return edit("json", "settings.json", before, json.dumps(settings, indent=2), wish)


def without_repeats(text: str) -> str:
    """Prose without mark-up and code. Sentences with three words in a row that were there before
    are left out."""
    found: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for part in re.sub(r"\n[=-]+\n", "\n\n", text).split("\n\n"):
        if (
            part.endswith("?")
            or not re.match(r"[A-Z][a-z' ]", part)
            or "::" in part
            or "```" in part
        ):
            continue
        plain = re.sub(r"{[a-z]+}|[`*_|]|\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", plain):
            words = re.findall(r"\w+", sentence.lower())
            threes = list(zip(words, words[1:], words[2:], strict=False))
            if len(threes) == len(set(threes)) and not seen & set(threes):
                found.append(sentence)
                seen |= set(threes)
        if len(" ".join(found)) > _LEAST_PROSE:
            break
    return " ".join(found) + "\n"


def session(category: str, sources: Sources, package: str, paths: tuple[str, ...]) -> Line:
    """An agent at work: it reads each file, replaces parts of it, and sees the file and the checks
    again. In the end it writes the last file as a whole."""
    told = "\n".join(paths)
    contents = [
        "You work on a repository with these tools: read PATH; replace PATH with blocks of SEARCH "
        "and REPLACE; write PATH with a whole file; check. Call one tool in each message. Bring "
        f"these files up to date:\n{told}"
    ]
    for path in paths:
        before, after = sources.both(package, path)
        contents += [f"read {path}", f"{path}:\n{fenced(path, before)}"]
        contents.append(f"replace {path}\n{blocks(before, after)}")
        contents.append(f"Done. {path}:\n{fenced(path, after)}")
        contents += ["check", f"{path}: no issues found\nAll checks passed."]
    after = sources.both(package, paths[-1])[1]
    contents += [f"write {paths[-1]}\n{fenced(paths[-1], after)}", "Written. Nothing has changed."]
    contents.append(f"These files are up to date, and all checks passed:\n{told}\n")
    return talk(category, *contents)


def blocks(before: str, after: str) -> str:
    """The changes with two lines around each, as many editors' agents write them."""
    a, b = before.splitlines(), after.splitlines()
    found = []
    for group in difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(2):
        old, new = a[group[0][1] : group[-1][2]], b[group[0][3] : group[-1][4]]
        found.append("\n".join(["<<<<<<< SEARCH", *old, "=======", *new, ">>>>>>> REPLACE"]))
    return "\n".join(found) + "\n"


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("folder", type=Path, help="with the unpacked releases")
    sources = Sources(parser.parse_args().folder)
    licences = SHIPPED.parent / "licences"
    licences.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        shutil.copyfile(sources.licence(package), licences / f"{package}.txt")
    made = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines(sources)]
    SHIPPED.write_text("".join(made), encoding="utf-8")
    print(f"{SHIPPED}: {len(made)} lines, {SHIPPED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
