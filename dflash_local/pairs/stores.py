"""Models of ollama and LM Studio on this disk: plain GGUF files, which are used where they lie."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_local.pairs import gguf_names

_MODEL_LAYER = "application/vnd.ollama.image.model"
_REGISTRIES = ("registry.ollama.ai/library/", "registry.ollama.ai/")
"""What ollama itself leaves out of a name."""
_LATEST = "latest"
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
_MOST = 1000
"""Files that are looked at: a home folder may hold a link to anything."""


@dataclass(frozen=True)
class StoredModel:
    """`name` is what `store` calls it, and what it is run by here."""

    name: str
    store: str
    path: Path

    @property
    def n_bytes(self) -> int:
        return self.path.stat().st_size


def stored_models() -> list[StoredModel]:
    """All that are found, by name. A store that cannot be read has none."""
    found = {model.name.casefold(): model for model in (*_lm_studio(), *_ollama())}
    return sorted(found.values(), key=lambda model: model.name.casefold())


def stored(name: str) -> Path | None:
    """The file of the model of that name; a name without a tag means ollama's `latest`."""
    wanted = {name.casefold(), f"{name}:{_LATEST}".casefold()}
    return next((each.path for each in stored_models() if each.name.casefold() in wanted), None)


def store_of(path: Path) -> str | None:
    """The program that keeps this file; None for any other file."""
    return next((each.store for each in stored_models() if each.path == path), None)


def _ollama() -> Iterator[StoredModel]:
    given = os.environ.get("OLLAMA_MODELS")
    homes = [Path(given)] if given else [Path.home() / ".ollama/models"]
    homes += [] if given else [Path("/usr/share/ollama/.ollama/models")]
    for home in homes:
        for manifest in _files(home / "manifests", "*"):
            path = _blob(home, manifest)
            if path is not None and path.is_file():
                place, _, tag = str(manifest.relative_to(home / "manifests")).rpartition(os.sep)
                name = place.replace(os.sep, "/")
                for registry in _REGISTRIES:
                    name = name.removeprefix(registry)
                yield StoredModel(f"{name}:{tag}", "ollama", path)


def _blob(home: Path, manifest: Path) -> Path | None:
    """The file of a manifest's model."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digest = next(each["digest"] for each in layers if each["mediaType"] == _MODEL_LAYER)
        return home / "blobs" / Path(digest.replace(":", "-")).name
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return None


def _lm_studio() -> Iterator[StoredModel]:
    for folder in _LM_STUDIO:
        home = Path.home() / folder
        for file in _files(home, "*.gguf"):
            is_first = "-of-" not in file.stem or "-00001-of-" in file.stem
            if is_first and gguf_names.is_target(file.name):
                yield StoredModel(file.stem, "LM Studio", file)


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        found = [path for path, _ in zip(folder.rglob(pattern), range(_MOST), strict=False)]
        return [path for path in found if path.is_file()]
    except OSError:
        return []
