"""The source of the files to convert: a local folder, or a hub repository at one commit."""

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import FileError, InputError
from dflash_local.hub.download import fetch, progress_bars
from dflash_local.hub.repository import ask, repository_of
from dflash_local.hub.trouble import one_line, transfer_errors, why_unreachable

from .checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, read_index
from .reading import regular_size

CONFIG = "config.json"
CARD = "README.md"
MASK_EMBEDDING = "mask_embedding.pt"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "tiktoken.model",
)  # fmt: skip

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CARD_LIMIT = 1 << 20  # bytes
# "It must be used in conjunction with the target model `Qwen/Qwen3-4B`."
_CARD_TARGET = re.compile(r"target model\b[\s:|*_`\[(]*([\w-][\w.-]*/[\w.-]*\w)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Files of a model, in a local folder."""

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
    return _from_hub(str(source), revision, _drafter_files, Checkpoint.open, accept)


def fetch_target(target: str | os.PathLike[str]) -> Path | Source:
    """The path of a GGUF target, or a Source with a target's config and tokenizer.

    Its weights are fetched by `fetch_tensors`. Raises InputError as `fetch_drafter` does.
    """
    path = Path(target)
    if path.is_file() or str(target).endswith(".gguf"):
        if not path.is_file():
            raise FileError(f"{path}: no such file")
        return path
    folder = _local_folder(target, None)
    if folder is None:
        return _from_hub(str(target), None, _target_files, None)
    if not (folder / CONFIG).is_file():
        models = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f"; did you mean {folder / models[0]}?" if models else ""
        raise FileError(f"{folder}: holds no {CONFIG}, expected the folder of a model{advice}")
    return _source(folder)


def fetch_tensors(source: Source, names: Collection[str]) -> Checkpoint:
    """The tensors `names` of `source`; from the hub, only the files that hold them are fetched.

    Raises FileError when a tensor is not there, and InputError as `fetch_drafter` does.
    """
    commit = source.revision
    try:
        return Checkpoint.open(source.folder, only=names)
    except FileError:
        if commit is None:
            raise
    with one_line(source.name, commit):
        listed = _list_files(source.name, commit)[1]
        wanted = [SINGLE_NAME]
        if SINGLE_NAME not in listed and INDEX_NAME in listed:
            index = read_index(fetch(source.name, INDEX_NAME, commit))
            wanted = sorted({index[name] for name in names if name in index})
        for name in wanted:
            fetch(source.name, name, commit)
    return Checkpoint.open(source.folder, only=names)


def target_hint(source: Source, config: dict[str, Any]) -> str | None:
    """The hub id of the target that a drafter is for, as its config or card says; else None."""
    layout = config.get("speculators_config")
    verifier = layout.get("verifier") if isinstance(layout, dict) else None
    dflash = config.get("dflash_config")
    candidates = [verifier.get("name_or_path")] if isinstance(verifier, dict) else []
    for fields in (dflash, config):
        if isinstance(fields, dict):
            candidates += [fields.get(key) for key in _TARGET_FIELDS]
    candidates += _CARD_TARGET.findall(_card_text(source.folder))
    base = source.card.get("base_model")
    bases = base if isinstance(base, list) else [base]
    # a base may be another drafter, and of several bases nothing says which is the target
    bases = [
        name
        for name in bases
        if isinstance(name, str) and not re.search("dflash|dspark", name, re.IGNORECASE)
    ]
    candidates += bases if len(bases) == 1 else []
    for name in candidates:
        if isinstance(name, str) and _HUB_ID.fullmatch(name) and name != source.name:
            return name
    return None


_TARGET_FIELDS = (
    "target_model", "target_model_id", "target_model_name", "target_model_name_or_path",
    "target_name_or_path", "target_model_path", "base_model", "base_model_name_or_path",
)  # fmt: skip


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
    if not isinstance(source, str) or not _HUB_ID.fullmatch(text):
        raise InputError(f"{text[:100]!r}: no such folder, and no hub id such as owner/name")
    return None


def _source(folder: Path) -> Source:
    # .../models--owner--name/snapshots/<commit>, in the hub client's cache
    place = folder.resolve()
    repo = repository_of(place) if _COMMIT.fullmatch(place.name) else None
    return Source(folder, repo or place.name, repo and place.name, _read_card(folder))


def _from_hub(
    repo: str,
    revision: str | None,
    select: Callable[[str, list[str], str], Iterator[str]],
    check: Callable[[Path], object] | None,
    accept: Callable[[Path], object] | None = None,
) -> Source:
    """The files of `repo` that `select` yields; `check` says whether cached ones are complete."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    with one_line(repo, revision):
        try:
            commit, listed = _list_files(repo, revision)
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise
            folder = _cached(repo, revision, check, error)
        except transfer_errors() as error:
            folder = _cached(repo, revision, check, error)
        else:
            if CONFIG not in listed:
                raise InputError(_no_config(repo, listed))
            # by the branch's name, so that the client finds the commit when it is offline
            with progress_bars(False):
                config = hub.hf_hub_download(repo, CONFIG, revision=revision)
            if Path(config).parent.name != commit:
                config = str(fetch(repo, CONFIG, commit))
            if accept is not None:
                accept(Path(config))
            for name in select(repo, listed, commit):
                fetch(repo, name, commit)
            folder = Path(config).parent
    return Source(folder, repo, folder.name, _read_card(folder))


def _list_files(repo: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit that `revision` is now, and the names of the files at its top."""
    there = ask(repo, revision)
    return there.commit, [name for name in there.sizes if re.fullmatch(r"[\w.-]+", name)]


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


def _target_files(repo: str, listed: list[str], commit: str) -> Iterator[str]:
    yield from (name for name in (CARD, *TOKENIZER_FILES) if name in listed)


def _no_config(repo: str, listed: list[str]) -> str:
    models = [name for name in listed if name.endswith(".gguf")]
    if models:
        return (
            f"{repo}: holds {models[0]} and no {CONFIG}; download a GGUF file and give its path,"
            " or give the id of the model that it was made from"
        )
    return f"{repo}: holds no {CONFIG}, expected a model's repository"


def _cached(
    repo: str, revision: str | None, check: Callable[[Path], object] | None, error: Exception
) -> Path:
    """The client's folder of an earlier download. Raises InputError unless it is complete."""
    import huggingface_hub as hub

    config = hub.try_to_load_from_cache(repo, CONFIG, revision=revision)
    if not isinstance(config, str):
        at = f" at revision {revision}" if revision else ""
        raise InputError(f"{repo}: {why_unreachable(error)}, and it is not cached{at}") from None
    folder = Path(config).parent
    if check is not None:
        try:
            check(folder)
        except FileError as incomplete:
            raise InputError(
                f"{repo}: {why_unreachable(error)}, and the cache is not complete: {incomplete}"
            ) from None
    return folder


def _read_card(folder: Path) -> dict[str, Any]:
    """The front matter, empty if it cannot be read: nothing needs it."""
    import yaml  # type: ignore[import-untyped]

    text = _card_text(folder)
    match = re.match(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", text, re.DOTALL)
    try:
        card = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        card = None
    return card if isinstance(card, dict) else {}


def _card_text(folder: Path) -> str:
    try:
        regular_size(folder / CARD)
        with (folder / CARD).open("rb") as file:
            return file.read(_CARD_LIMIT).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except (FileError, OSError):
        return ""
