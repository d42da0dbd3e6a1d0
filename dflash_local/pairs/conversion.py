"""The conversion of a drafter whose target is named, or not even that."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_local.convert import ConvertResult, convert
from dflash_local.convert.files.source import HUB_ID, Source, card_text
from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.pairs import registry
from dflash_local.pairs.address import read_address
from dflash_local.pairs.find import Say, StrPath, find_target

# "It must be used in conjunction with the target model `Qwen/Qwen3-4B`."
_CARD_TARGET = re.compile(r"target model\b[\s:|*_`\[(]*([\w-][\w.-]*/[\w.-]*\w)", re.IGNORECASE)
_TARGET_FIELDS = (
    "target_model", "target_model_id", "target_model_name", "target_model_name_or_path",
    "target_name_or_path", "target_model_path", "base_model", "base_model_name_or_path",
)  # fmt: skip
_GIVE = "give one with --target: a GGUF file, or a repository of the hub that has some"


def convert_for(
    source: StrPath, target: StrPath | None = None, *, say: Say, **options: Any
) -> ConvertResult:
    """`convert` of a drafter for a target by any address, such as a name of the registry or a place
    on the hub that has GGUF files, of which only a header is fetched. By default it is the one that
    the registry knows, or that the drafter names. Raises as `convert`."""
    if target is None:
        return convert(source, target=partial(_target_of, say=say), say=say, **options)
    given = _opened(target)  # before the drafter is fetched: its name may be wrong
    return convert(source, target=lambda *_: given, say=say, **options)


def _target_of(drafter: Source, config: dict[str, Any], *, say: Say) -> GgufFile:
    """The target of a drafter with this config. What is on the hub alone has no `shards`."""
    named = target_hint(drafter, config)
    pair = registry.of_drafter(drafter.name) or (registry.of_weights(named) if named else None)
    place = pair.gguf if pair else named
    if place is None:
        raise InputError(
            f"{drafter.name}: neither the registry nor its config nor its card says which target it"
            f" is for; {_GIVE}"
        )
    say(f"target: {place}, as {'the registry' if pair else 'the drafter'} says")
    try:
        return _opened(place)
    except InputError as error:
        raise InputError(
            f"the target of {drafter.name} cannot be read: {error}; or {_GIVE}"
        ) from None


def _opened(target: StrPath) -> GgufFile:
    files = find_target(read_address(target))
    if files.missing():
        return replace(files.remote(), path=Path(files.key, files.names[0]), shards=())
    return GgufFile.open(files.path())


def target_hint(source: Source, config: dict[str, Any]) -> str | None:
    """The hub id of the target that a drafter is for, as its config or card says; else None."""
    layout = config.get("speculators_config")
    verifier = layout.get("verifier") if isinstance(layout, dict) else None
    dflash = config.get("dflash_config")
    candidates = [verifier.get("name_or_path")] if isinstance(verifier, dict) else []
    for fields in (dflash, config):
        if isinstance(fields, dict):
            candidates += [fields.get(key) for key in _TARGET_FIELDS]
    candidates += _CARD_TARGET.findall(card_text(source.folder))
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
        if isinstance(name, str) and HUB_ID.fullmatch(name) and name != source.name:
            return name
    return None
