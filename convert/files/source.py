"""The source of the files to convert: a local folder, or a hub repository at one commit."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import FileError, InputError
from dflash_local.hub.download import fetch, progress_bars
from dflash_local.hub.repository import ask, cached, repository_of
from dflash_local.hub.trouble import one_line, transfer_errors, why_unreachable

from .checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, read_index
from .reading import regular_size

CONFIG = "config.json"
CARD = "README.md"
MASK_EMBEDDING = "mask_embedding.pt"

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CARD_LIMIT = 1 << 20  # bytes


@dataclass(frozen=True)
class Source:
    """A drafter's files, in a local folder."""

    folder: Path
    name: str
    """The hub id, or the folder's name."""
    revision: str | None
    """The commit, when the files are a hub's."""
    card: dict[str, Any]
    """The YAML front matter of README.md, {} where there is none."""


def fetch_drafter(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    accept: Callable[[Path], object] | None = None,
) -> Source:
    """A drafter's config, weights, card and mask embedding.

    `source` is a local folder, if there is one of that name, or a hub id; `revision` a branch, tag
    or commit of the latter. `accept` gets the path of the config before weights are fetched from
    the hub, and may refuse it by an InputError. Raises InputError: nothing there, no access, or no
    network and nothing cached.
    """
    folder = _local_folder(source, revision)
    if folder is not None:
        if not (folder / CONFIG).is_file():
            raise FileError(f"{folder}: holds no {CONFIG}, expected the folder of a drafter")
        return _source(folder)
    return _from_hub(str(source), revision, accept)


def _local_folder(source: str | os.PathLike[str], revision: str | None) -> Path | None:
    """The folder `source`, or None when it can only be a hub id. Raises InputError if neither."""
    text, path = os.fspath(source), Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{text[:100]!r}: neither a folder nor a hub id: {error}") from None
    if is_folder:
        if revision is not None:
            raise InputError(f"{path}: a local folder has no revision {revision}; leave it out")
        return path
    if exists:
        raise InputError(f"{path}: a file, expected a folder or a hub id such as owner/name")
    if not isinstance(source, str) or not HUB_ID.fullmatch(text):
        raise InputError(f"{text[:100]!r}: no such folder, and no hub id such as owner/name")
    return None


def _source(folder: Path) -> Source:
    # .../models--owner--name/snapshots/<commit>, in the hub client's cache
    place = folder.resolve()
    repo = repository_of(place) if _COMMIT.fullmatch(place.name) else None
    return Source(folder, repo or place.name, repo and place.name, _read_card(folder))


def _from_hub(repo: str, revision: str | None, accept: Callable[[Path], object] | None) -> Source:
    import huggingface_hub as hub
    from huggingface_hub import errors

    with one_line(repo, revision):
        try:
            there = ask(repo, revision)
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise
            folder = _held(repo, revision, error)
        except transfer_errors() as error:
            folder = _held(repo, revision, error)
        else:
            commit = there.commit
            listed = [name for name in there.sizes if re.fullmatch(r"[\w.-]+", name)]  # at its top
            if CONFIG not in listed:
                raise InputError(f"{repo}: holds no {CONFIG}, expected a drafter's repository")
            # by the branch's name, so that the client finds the commit when it is offline
            with progress_bars(False):
                config = hub.hf_hub_download(repo, CONFIG, revision=revision)
            if Path(config).parent.name != commit:
                config = str(fetch(repo, CONFIG, commit))
            if accept is not None:
                accept(Path(config))
            for name in _drafter_files(repo, listed, commit):
                fetch(repo, name, commit)
            folder = Path(config).parent
    return Source(folder, repo, folder.name, _read_card(folder))


def _drafter_files(repo: str, listed: list[str], commit: str) -> Iterator[str]:
    weights = [name for name in listed if name.endswith(".safetensors")]
    if not weights:
        pickles = [name for name in listed if name.endswith((".bin", ".pt", ".pth"))]
        found = f"; {pickles[0]} is a pickle, which may run code and is not read" if pickles else ""
        raise InputError(f"{repo}: holds no safetensors file{found}")
    yield from (name for name in (CARD, MASK_EMBEDDING) if name in listed)
    if INDEX_NAME in listed:
        yield INDEX_NAME
        # the repository may hold weights of other models
        named = set(read_index(fetch(repo, INDEX_NAME, commit)).values())
        weights = [name for name in weights if name in named]
    if SINGLE_NAME in listed:
        weights = [SINGLE_NAME]
    yield from weights


def _held(repo: str, revision: str | None, error: Exception) -> Path:
    """The client's folder of an earlier download. Raises InputError unless it is complete."""
    held = [each.folder for each in cached(repo, revision) if CONFIG in each.sizes]
    if not held or held[0] is None:
        at = f" at revision {revision}" if revision else ""
        raise InputError(f"{repo}: {why_unreachable(error)}, and it is not cached{at}") from None
    try:
        Checkpoint.open(held[0])
    except FileError as incomplete:
        raise InputError(
            f"{repo}: {why_unreachable(error)}, and the cache is not complete: {incomplete}"
        ) from None
    return held[0]


def _read_card(folder: Path) -> dict[str, Any]:
    """The front matter, empty if it cannot be read: nothing needs it."""
    import yaml  # type: ignore[import-untyped]

    text = card_text(folder)
    match = re.match(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", text, re.DOTALL)
    try:
        card = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        card = None
    return card if isinstance(card, dict) else {}


def card_text(folder: Path) -> str:
    """The README.md of a model, empty if it cannot be read."""
    try:
        regular_size(folder / CARD)
        with (folder / CARD).open("rb") as file:
            return file.read(_CARD_LIMIT).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except (FileError, OSError):
        return ""
