"""A user's word for a model: a file, a folder, a name, or a place on the hub."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_local.errors import FileError, InputError
from dflash_local.pairs import registry
from dflash_local.pairs.entry import Entry
from dflash_local.pairs.stores import stored, stored_models

_REPO = r"[\w-][\w.-]*/[\w-][\w.-]*"
_HUB = re.compile(
    r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://)?"
    rf"(?P<repo>{_REPO}?)(?:/(?:blob|resolve|tree)/(?P<revision>[^/]+)(?:/(?P<file>.+?))?)?"
    r"(?::(?P<quant>[\w.-]+))?(?:\?.*)?/?"
)


@dataclass(frozen=True)
class HubAddress:
    """A repository of the hub, and what of it: a quantisation, a file, a revision."""

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


@dataclass(frozen=True)
class NamedPair:
    """A pair of the registry, and the quantisation that was asked for."""

    entry: Entry
    quant: str | None = None

    def __str__(self) -> str:
        return self.entry.name if self.quant is None else f"{self.entry.name}:{self.quant}"


Address = Path | NamedPair | HubAddress


def read_address(given: str | os.PathLike[str]) -> Address:
    """Read a word for a model. A file or folder that is there comes first, then the registry's
    names, then those of models that ollama or LM Studio have here, then the hub. Raises InputError
    for what is none of these."""
    text = os.fspath(given)
    path = _existing(text)
    if path is not None:
        return path
    if not isinstance(given, str) or _looks_like_path(text):
        raise FileError(f"{text}: no such file, expected a GGUF model")
    found = registry.named(text)
    if found is not None:
        return NamedPair(*found)
    held = stored(text)
    if held is not None:
        return held
    match = _HUB.fullmatch(text)
    if match:
        file = match["file"]
        return HubAddress(
            match["repo"],
            match["quant"],
            file if file and file.endswith(".gguf") else None,
            None if match["revision"] == "main" else match["revision"],
        )
    if os.path.isdir(text):
        raise FileError(f"{text}: this folder holds no GGUF model")
    raise InputError(
        f"{text[:100]!r} is no file here, no name of a model, and no repository of the hub such as "
        f"Qwen/Qwen3-8B-GGUF; {registry.hint(text, [each.name for each in stored_models()])}"
    )


def _existing(text: str) -> Path | None:
    """The file of that name, or the folder if models lie in it."""
    try:
        path = Path(os.path.expanduser(text))
        if path.is_dir():
            holds_models = any(path.glob("*.gguf")) or (path / "config.json").is_file()
            return path if _looks_like_path(text) or holds_models else None
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def _looks_like_path(text: str) -> bool:
    if re.match(r"(?:https?|hf)://", text) or re.match(r"(?:hf|huggingface)\.co/", text):
        return False
    return text.startswith((".", "/", "~", "\\")) or text.endswith((".gguf", "/", os.sep))
