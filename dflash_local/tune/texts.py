"""From a user's texts to prompts: some to learn from, the others held out to be measured on.

A folder gives pieces of its files, to be continued, filled in and written on in a chat, as far as
the model does these. A JSON Lines file gives its own prompts: see `bench.prompts.read_prompts`.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from dflash_local.bench.prompts.prompt import BenchPrompt, read_prompts
from dflash_local.errors import InputError

Form = Literal["continue", "infill", "chat"]

_PIECE = 2400
"""Characters of a piece: some 600 tokens, of which a prompt shows a part."""
_LEAST = 200
_MOST_BYTES = 1 << 20
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "build", "dist"})
_HELD_SHARE = 0.2
_GENERAL_FILES = 48
_QUESTIONS = Path(__file__).with_name("questions.json")

T = TypeVar("T")


@dataclass(frozen=True)
class Texts:
    """Prompts by their use. No file, and no line, is in two of them."""

    tune: list[BenchPrompt]
    watch: list[BenchPrompt]
    """Held out, to see during the training when it is enough."""
    test: list[BenchPrompt]
    """Held out, to compare the drafters before and after. Nothing is chosen by them."""


def read_texts(path: Path, forms: Sequence[Form], *, seed: int = 0) -> Texts:
    """The prompts of a folder or of a JSON Lines file, for a model that does `forms`. Raises
    InputError: nothing to read, or too little to hold some of it out."""
    if path.is_dir():
        sources = [_pieces(text, forms, f"{seed} {name}") for name, text in files_of(path)]
        what = f"{path}: holds {len(sources)} text files of {_LEAST} characters or more"
    else:
        sources = [[prompt] for prompt in read_prompts(path)]
        what = f"{path}: holds {len(sources)} prompts"
    sources = [source for source in sources if source]
    if len(sources) < 3:
        raise InputError(f"{what}; expected at least 3, as some are held out to measure on")
    return split(sources, seed)


def split(sources: Sequence[list[BenchPrompt]], seed: int) -> Texts:
    """Hold a fifth of the sources out, at least two."""
    order = random.Random(seed).sample(list(sources), len(sources))
    n_held = max(2, round(_HELD_SHARE * len(order)))
    held, tune = order[:n_held], order[n_held:]
    return Texts(_mixed(tune, seed), _mixed(held[0::2], seed), _mixed(held[1::2], seed))


def general(forms: Sequence[Form], *, seed: int = 0) -> list[BenchPrompt]:
    """General prompts, against forgetting: questions and tasks, and pieces of Python's standard
    library. None of them is among those of `bench`."""
    rng = random.Random(seed)
    found: list[BenchPrompt] = []
    if "chat" in forms:
        asked = json.loads(_QUESTIONS.read_text(encoding="utf-8"))
        texts = [
            form.format(topic) for kind in asked for form in kind["ask"] for topic in kind["of"]
        ]
        found += [BenchPrompt.question("general", text) for text in texts]
    plain: list[Form] = [form for form in forms if form != "chat"]
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in rng.sample(library, min(_GENERAL_FILES, len(library))):
        text = _text(path)
        if text is not None:
            found += _pieces(text, plain, f"{seed} {path.name}")[:4]
    rng.shuffle(found)
    return found


def files_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and content of the text files below a folder, hidden and generated ones left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part in _SKIPPED for part in parts) or not path.is_file():
            continue
        text = _text(path)
        if text is not None:
            yield str(path.relative_to(folder)), text


def _text(path: Path) -> str | None:
    """None for what is no text, or too short or too long to be one that somebody wrote."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text or len(text) < _LEAST else text


def _pieces(text: str, forms: Sequence[Form], seed: str) -> list[BenchPrompt]:
    """A prompt for each piece of a text, in the forms by turns."""
    rng = random.Random(seed)
    lines, piece = text.splitlines(keepends=True), ""
    found: list[BenchPrompt] = []
    first = rng.randrange(len(forms))
    for i, line in enumerate(lines):
        piece += line
        if len(piece) >= _PIECE or (i == len(lines) - 1 and len(piece) >= _LEAST):
            found.append(
                _prompt(piece[: 2 * _PIECE], forms[(first + len(found)) % len(forms)], rng)
            )
            piece = ""
    return found


def _prompt(piece: str, form: Form, rng: random.Random) -> BenchPrompt:
    at = rng.randint(len(piece) // 4, 3 * len(piece) // 4)
    if form == "infill":
        end = min(len(piece), at + rng.randint(80, 400))
        return BenchPrompt("own", infill=(piece[:at], piece[end:]))
    if form == "continue":
        return BenchPrompt("own", text=piece[:at])
    asked = "Continue this text exactly where it ends. Write only what follows.\n\n"
    return BenchPrompt.question("own", f"{asked}```\n{piece[:at]}\n```")


def _mixed(sources: Sequence[list[T]], seed: int) -> list[T]:
    found = [each for source in sources for each in source]
    random.Random(seed).shuffle(found)
    return found
