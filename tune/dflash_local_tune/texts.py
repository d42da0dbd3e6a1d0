"""From a user's texts to prompts: some to learn from, the others held out to be measured on.

A folder gives pieces of its files, to be continued, filled in and written on in a chat, as far as
the model does these. A JSON Lines file gives its own prompts: see `bench.prompts.read_prompts`.
"""

import json
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from dflash_local.bench.prompts.prompt import BenchPrompt, read_prompts
from dflash_local.errors import InputError

Form = Literal["continue", "infill", "chat"]

_PIECE = 2400
"""Characters of a piece: some 600 tokens, of which a prompt shows a part."""
_LEAST = 200
_BEGUN = 200
"""Characters at the end of a prompt by which a chat template begins the answer, at most."""
_LEAST_SAME = 16
"""Characters that say that two prompts belong together."""
_NEAR = 50
"""Prompts, in their order, among which those that go on from one are looked for."""
_MOST_BYTES = 1 << 20
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "build", "dist"})
_HELD_SHARE = 0.2
_LEAST_FILES = 3
"""One to learn from, to watch and to test by."""
_GENERAL_SHARE = 0.25
"""Of the prompts. Without them chat lost 4 % where code gained 37 %."""
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_QUESTIONS = Path(__file__).with_name("questions.json")
_ASKED = "Write a Python function `{}`. {}", "Implement `{}` in Python: {}"
_DOCUMENTED = re.compile(
    r'^ *def ([a-z]\w*)\([^)]*\)[^\n]*:\n +r?"""([^"]{20,200}?)(?:\n\s*\n|\s*""")', re.MULTILINE
)
"""A Python function's name, and the first paragraph of its docstring."""

T = TypeVar("T")


@dataclass(frozen=True)
class Texts:
    """Prompts by their use. No file, no line and no conversation is in two of them."""

    tune: list[BenchPrompt]
    draw: Callable[[random.Random], BenchPrompt] = field(compare=False)
    """A prompt to learn from: one of `tune`, or one made from a piece that begins at any line of
    their files. Of the same pieces a drafter learns the answers by heart."""
    watch: list[BenchPrompt]
    """Held out, to see during the training when it is enough."""
    test: list[BenchPrompt]
    """Held out, to compare the drafters before and after. Nothing is chosen by them."""


def read_texts(
    path: Path, forms: Sequence[Form], *, names: Sequence[str] = (), seed: int = 0
) -> Texts:
    """The prompts of a folder or of a JSON Lines file, for a model that does `forms` and goes by
    `names`. Of requests that a server recorded for several models only its own are read. Raises
    InputError: nothing to read, or too little to hold some of it out."""
    if not path.is_dir():
        groups = conversations(_of_model(read_prompts(path), names, path))
        what = f"{path}: holds {len(groups)} different prompts or conversations"
        tune, watch, test = (_mixed(part, seed) for part in _split(groups, what, seed))
        return Texts(tune, lambda rng: rng.choice(tune), watch, test)
    files = dict(files_of(path))
    what = f"{path}: holds {len(files)} text files of {_LEAST} characters or more"
    pieces = {name: _pieces(text, forms, f"{seed} {name}") for name, text in files.items()}
    names_of = _split([name for name in files if pieces[name]], what, seed)
    tune, watch, test = (_mixed([pieces[name] for name in part], seed) for part in names_of)
    mine = [files[name] for name in names_of[0]]
    return Texts(tune, lambda rng: _cut_anywhere(mine, forms, rng), watch, test)


def conversations(prompts: Sequence[BenchPrompt]) -> list[list[BenchPrompt]]:
    """The different prompts, together with those that go on from them: a request repeats the turns
    before it, and an editor asks again after each key."""
    by_text = {_whole(prompt): prompt for prompt in prompts}
    texts = sorted(by_text)
    group = list(range(len(texts)))

    def first_of(i: int) -> int:
        while group[i] != i:
            group[i] = i = group[group[i]]
        return i

    for i, text in enumerate(texts):
        after = range(i + 1, min(len(texts), i + 1 + _NEAR))
        before = range(i - 1, max(-1, i - 1 - _NEAR), -1)
        for near in (after, before):
            for j in near:
                same = _shared(text, texts[j])
                if _goes_on(text, texts[j], same) or _goes_on(texts[j], text, same):
                    group[first_of(j)] = first_of(i)
                if same < len(text) - _BEGUN:
                    break
    found: dict[int, list[BenchPrompt]] = {}
    for i, text in enumerate(texts):
        found.setdefault(first_of(i), []).append(by_text[text])
    return list(found.values())


def _whole(prompt: BenchPrompt) -> str:
    if prompt.messages:
        return json.dumps(prompt.messages)
    return prompt.text if prompt.text is not None else "\0".join(prompt.infill or ())


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _goes_on(text: str, longer: str, same: int) -> bool:
    """Whether `longer` is `text` with something put in, at its end or before the last marks.
    `same`: characters that both begin with."""
    return _LEAST_SAME <= len(text) <= len(longer) and longer.endswith(text[same:])


def _of_model(
    prompts: Sequence[BenchPrompt], names: Sequence[str], path: Path
) -> Sequence[BenchPrompt]:
    """Without the requests that a server recorded for other models."""
    served = {prompt.category for prompt in prompts if not prompt.add_special}
    if len(served) < 2:
        return prompts
    if not served & set(names):
        raise InputError(
            f"{path}: holds requests to {', '.join(sorted(served))}, and none to "
            f"{' or '.join(names)}; keep the lines of one model"
        )
    return [prompt for prompt in prompts if prompt.add_special or prompt.category in names]


def _split(sources: Sequence[T], what: str, seed: int) -> tuple[list[T], list[T], list[T]]:
    """Those to learn from, to watch and to test by: a fifth of them is held out, at least two."""
    if len(sources) < _LEAST_FILES:
        least = f"expected at least {_LEAST_FILES}, as some are held out to measure on"
        raise InputError(f"{what}; {least}")
    order = random.Random(seed).sample(list(sources), len(sources))
    n_held = max(2, round(_HELD_SHARE * len(order)))
    held, tune = order[:n_held], order[n_held:]
    return tune, held[0::2], held[1::2]


def general(forms: Sequence[Form], *, seed: int = 0) -> Texts:
    """General prompts, against forgetting, and to learn from where a user has no texts: questions
    and tasks, pieces of the files of Python's standard library, and the functions that these
    document. None of them is among those of `bench`."""
    files = ((path.name, _text(path)) for path in sorted(_LIBRARY.glob("*.py")))
    library = {name: text for name, text in files if text is not None}
    if len(library) < _LEAST_FILES:
        raise InputError(
            f"{_LIBRARY}: this Python has no library files there, of which tune makes general "
            "prompts; use one that has them, such as your system's or python.org's"
        )
    plain: list[Form] = [form for form in forms if form != "chat"]
    questions, tasks = (_questions(), _tasks(library)) if "chat" in forms else ([], {})
    parts = _split(list(library), "general texts", seed)
    asked = _split(questions, "general texts", seed) if questions else ([], [], [])
    tune, watch, test = (
        _mixed(
            [
                part,
                *(_pieces(library[name], plain, f"{seed} {name}")[:2] for name in names),
                *(tasks.get(name, [])[:2] for name in names),
            ],
            seed,
        )
        for names, part in zip(parts, asked, strict=True)
    )
    mine = [library[name] for name in parts[0]]
    to_write = [task for name in parts[0] for task in tasks.get(name, [])]

    def draw(rng: random.Random) -> BenchPrompt:
        form = rng.choice(forms)
        if form == "chat":
            return rng.choice(rng.choice([asked[0], to_write or asked[0]]))
        return _cut_anywhere(mine, [form], rng)

    return Texts(tune, draw, watch, test)


def _questions() -> list[BenchPrompt]:
    kinds = json.loads(_QUESTIONS.read_text(encoding="utf-8"))
    texts = [form.format(topic) for kind in kinds for form in kind["ask"] for topic in kind["of"]]
    return [BenchPrompt.question("general", text) for text in texts]


def _tasks(files: Mapping[str, str]) -> dict[str, list[BenchPrompt]]:
    """To write the functions that Python files document, one prompt for each, by file. A function
    in two files is that of the first."""
    known: set[tuple[str, str]] = set()
    found: dict[str, list[BenchPrompt]] = {name: [] for name in files}
    for file, text in files.items():
        for name, told in _DOCUMENTED.findall(text):
            told = " ".join(told.split())
            if (name, told) not in known:
                asked = _ASKED[len(known) % len(_ASKED)].format(name, told)
                found[file].append(BenchPrompt.question("general", asked))
                known.add((name, told))
    return found


def drawn(texts: Texts, others: Texts | None, rng: random.Random) -> BenchPrompt:
    """A prompt to learn from: one of the user's own `texts`, or of `others`, general ones."""
    if others is not None and rng.random() < _GENERAL_SHARE:
        return others.draw(rng)
    return texts.draw(rng)


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
    """None for data that are no text, or too short or too long to be one that somebody wrote."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text or len(text) < _LEAST else text


def _pieces(text: str, forms: Sequence[Form], seed: str) -> list[BenchPrompt]:
    """A prompt for each piece of a text, in the forms by turns."""
    rng = random.Random(os.fsencode(seed))  # it has the name of a file
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


def _cut_anywhere(texts: Sequence[str], forms: Sequence[Form], rng: random.Random) -> BenchPrompt:
    """A prompt of a piece that begins at any line of these texts."""
    text = rng.choices(texts, [len(text) for text in texts])[0]
    begin = text.find("\n", rng.randrange(len(text) - _LEAST + 1)) + 1  # 0: no line ends after it
    begin = min(begin, len(text) - _LEAST)
    return _prompt(text[begin : begin + _PIECE], rng.choice(forms), rng)


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
