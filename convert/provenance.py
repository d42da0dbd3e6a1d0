"""The keys that say where a converted file comes from. The same input gives the same keys."""

from __future__ import annotations

from gguf import Keys

from dflash_local.gguf.file import GgufFile
from dflash_local.version import version

from .files.source import Source
from .key import Key

# llama.cpp ignores keys that it does not know
SOURCE = "dflash_local.source"
REVISION = "dflash_local.source.revision"
SHA256 = "dflash_local.source.sha256"
TARGET = "dflash_local.target"
TARGET_REVISION = "dflash_local.target.revision"
VERSION = "dflash_local.version"

_HUB = "https://huggingface.co"


def model_name(source: Source) -> str:
    """The name without its owner."""
    return source.name.rpartition("/")[2]


def provenance_keys(drafter: Source, target: GgufFile | Source, sha256: str) -> list[Key]:
    """Where the drafter comes from, its target, the `sha256` of its weights, our own version.

    Of a local folder only the name is kept, of a GGUF target the name inside the file.
    """
    keys = [
        Key(SOURCE, drafter.name, "str"),
        *_optional(REVISION, drafter.revision),
        Key(SHA256, sha256, "str"),
        Key(VERSION, version(), "str"),
    ]
    if _on_hub(drafter):
        keys.append(Key(Keys.General.SOURCE_REPO_URL, f"{_HUB}/{drafter.name}", "str"))
    if isinstance(drafter.card.get("license"), str):
        keys.append(Key(Keys.General.LICENSE, drafter.card["license"], "str"))
    return [*keys, *_target_keys(target)]


def _target_keys(target: GgufFile | Source) -> list[Key]:
    base = Keys.General
    if isinstance(target, Source):
        keys = [
            Key(TARGET, target.name, "str"),
            *_optional(TARGET_REVISION, target.revision),
            Key(base.BASE_MODEL_COUNT, 1, "u32"),
            Key(base.BASE_MODEL_NAME.format(id=0), model_name(target), "str"),
        ]
        if _on_hub(target):
            url = f"{_HUB}/{target.name}"
            keys.append(Key(base.BASE_MODEL_REPO_URL.format(id=0), url, "str"))
        return keys
    name = target.get(base.NAME)
    if not isinstance(name, str) or not name:
        return []
    return [
        Key(TARGET, name, "str"),
        Key(base.BASE_MODEL_COUNT, 1, "u32"),
        Key(base.BASE_MODEL_NAME.format(id=0), name, "str"),
    ]


def _optional(name: str, value: str | None) -> list[Key]:
    return [] if value is None else [Key(name, value, "str")]


def _on_hub(source: Source) -> bool:
    return source.revision is not None
