"""The models that have a name: what of them is here, what fits, where to begin, and what removing
them frees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_local.errors import InputError
from dflash_local.hub.repository import Repository, cached, remove_files, repository_of
from dflash_local.pairs import gguf_names, registry
from dflash_local.pairs.address import Address, HubAddress, NamedPair, read_address
from dflash_local.pairs.drafter import forget_drafter, kept_drafter, weights
from dflash_local.pairs.entry import Entry
from dflash_local.pairs.stores import store_of, stored_models

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device

Place = Literal["gpu", "experts", "cpu", "no"]
"""Where a model fits: "experts" is on the GPU, but for experts in RAM."""

_BYTES_PER_WEIGHT = 0.61
"""Of Q4_K_M, with the tensors that have more bits."""
_BESIDE = 1.25
"""Memory in all for each byte of the target: its drafter, caches at 8k tokens, buffers."""
_BESIDE_EXPERTS = 0.2
"""More than what gpt-oss, Qwen3 and GLM mixtures have besides their experts, with caches."""
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[Bb]\b")


@dataclass(frozen=True)
class Stock:
    """One pair of the registry, and what of it is here."""

    entry: Entry
    here: dict[str, int]
    """Quantisations of the target on this disk, and their bytes."""
    drafter_here: bool
    fits: Place | None = None
    """Where it would fit, roughly; None if its size is not known."""
    is_further: bool = False
    """Whether another drafter of the same model stands for it, and it is not here."""

    @property
    def n_bytes(self) -> int | None:
        """Of the target here, or of the quantisation to fetch, if it is known or can be told."""
        if self.here:
            return max(self.here.values())
        return self.entry.size or self.estimate

    @property
    def estimate(self) -> int | None:
        """About as many bytes as Q4_K_M has, by the billions of weights in the model's name."""
        found = _BILLIONS.search(self.entry.target)
        return round(float(found[1]) * 1e9 * _BYTES_PER_WEIGHT) if found else None

    @property
    def is_estimate(self) -> bool:
        return not self.here and self.entry.size is None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        entry = ("name", "aliases", "target", "gguf", "drafter")
        own = ("here", "drafter_here", "n_bytes", "is_estimate", "fits", "is_further")
        known = {name: getattr(self.entry, name) for name in entry}
        return {**known, "aliases": [*self.entry.aliases]} | {n: getattr(self, n) for n in own}


def place(n_bytes: int, devices: Sequence[Device], *, is_mixture: bool = False) -> Place:
    """The place where a target of so many bytes would fit, roughly."""
    needed = n_bytes * _BESIDE
    gpus = sum(each.free for each in devices if each.type == "gpu")
    host = max(each.free for each in devices if each.type == "cpu")
    if needed <= gpus:
        return "gpu"
    if is_mixture and needed * _BESIDE_EXPERTS <= gpus and needed <= host + gpus:
        return "experts"
    return "cpu" if needed <= host + gpus else "no"


def listed(devices: Sequence[Device]) -> list[Stock]:
    """All pairs by family, as qwen3 and gemma-4, then by size. The hub is not asked."""
    found = [stock_of(entry) for entry in registry.entries()]
    shortest: dict[str, str] = {}
    for entry in registry.entries():
        shortest[entry.target] = min(shortest.get(entry.target, entry.name), entry.name, key=len)
    for i, each in enumerate(found):
        entry, size, is_here = each.entry, each.n_bytes, each.here and each.drafter_here
        fits = None if size is None else place(size, devices, is_mixture=entry.is_mixture)
        is_further = shortest[entry.target] != entry.name and not is_here
        found[i] = replace(each, fits=fits, is_further=is_further)
    return sorted(found, key=_family)


def _family(stock: Stock) -> tuple[str, float, str]:
    name = stock.entry.name
    family = re.match(r"[a-z]+-?[\d.]*", name)
    return (family[0] if family else name, float(stock.n_bytes or 1e15), name)


def best(stocks: Sequence[Stock]) -> tuple[str, str] | None:
    """The name of the model to begin with, and why."""
    # One that comes with a package is for a first try.
    known = [each for each in stocks if each.entry.gguf and each.entry.package is None]
    sizes = {
        fits: [(s.n_bytes, s.entry.name) for s in known if s.n_bytes and s.fits == fits]
        for fits in ("gpu", "cpu")
    }
    if sizes["gpu"]:
        return max(sizes["gpu"], key=lambda each: each[0])[1], "the largest that fits the GPU"
    if not sizes["cpu"]:
        return None
    why = "the smallest: without a GPU each token reads all weights"
    return min(sizes["cpu"], key=lambda each: each[0])[1], why


def others(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """The models of ollama and LM Studio on this disk, for JSON."""
    return [
        {
            "name": each.name,
            "store": each.store,
            "n_bytes": each.n_bytes,
            "fits": place(each.n_bytes, devices),
        }
        for each in stored_models()
    ]


def stock_of(entry: Entry) -> Stock:
    """The files of one pair that are here."""
    place = _gguf(entry)
    here: dict[str, int] = {}
    if isinstance(place, HubAddress):
        for held in reversed(cached(place.repo, place.revision)):
            models = gguf_names.targets(held.sizes)
            here |= {key: held.n_bytes(names) for key, names in models.items()}
    elif isinstance(place, Path) and place.is_file():
        here = {gguf_names.quantisation(place.stem) or place.stem: place.stat().st_size}
    return Stock(entry, here, _drafter_here(entry, place))


def remove(address: Address) -> int:
    """Remove a pair, or one quantisation of its target, from the caches; the bytes that this frees.

    A target that another pair uses, whose drafter is here as well, stays. Raises InputError for
    what was never fetched: a file or folder of the user's own, or of a package, is not touched.
    """
    if isinstance(address, Path):
        store = store_of(address)
        raise InputError(
            f"{address} is a file or folder of yours: remove it as you remove other files"
            if store is None
            else f"this model is {store}'s: remove it there"
        )
    entry = address.entry if isinstance(address, NamedPair) else None
    place = _gguf(entry) if entry else address
    freed = 0
    if isinstance(place, HubAddress):
        quant = address.quant or place.quant
        for held in [] if _is_shared(entry, place) else cached(place.repo, place.revision):
            freed += _remove_models(held, quant, all_files=entry is None)
        if quant is not None:
            return freed  # the drafter serves the others
        drafter = entry.drafter if entry else getattr(registry.of_target(place.repo), "drafter", "")
        freed += _remove_drafter(drafter, place.repo)
    elif entry is not None:
        freed += _remove_drafter(entry.drafter, _key(place))
        if not freed and entry.packaged and entry.package_has(address.quant):
            package = entry.package
            raise InputError(f"{entry.name} is the package {package}'s: pip uninstall {package}")
    return freed


def belongs_to(file: Path, address: Address) -> bool:
    """Whether removing `address` might remove `file`."""
    if isinstance(address, Path):
        return False
    entry = address.entry if isinstance(address, NamedPair) else None
    place = _gguf(entry) if entry else address
    repo = place.repo if isinstance(place, HubAddress) else ""
    drafter = entry.drafter if entry else getattr(registry.of_target(repo), "drafter", "")
    kept = kept_drafter(drafter, _key(place))
    return repository_of(file) in (repo, drafter) or (kept is not None and kept.path == file)


def _remove_models(held: Repository, quant: str | None, all_files: bool) -> int:
    models = gguf_names.targets(held.sizes)
    if quant is not None:
        found = gguf_names.choose(models, quant)
        return 0 if found is None else remove_files(held.name, models[found])
    whole = [*models.values(), *gguf_names.projectors(held.sizes).values()]
    names = [name for files in whole for name in files]
    return remove_files(held.name, list(held.sizes) if all_files else names)


def _remove_drafter(drafter: str, target: str) -> int:
    address = read_address(drafter) if drafter else None
    if not isinstance(address, HubAddress):
        return 0
    freed = forget_drafter(address.repo, target)
    for held in cached(address.repo):
        names = [name for name in held.sizes if name.endswith(".gguf")]
        freed += remove_files(held.name, [*names, *weights(held)])
    return freed


def _is_shared(entry: Entry | None, place: HubAddress) -> bool:
    others = [each for each in registry.entries() if entry and each.name != entry.name]
    return any(
        (each.gguf or "").casefold() == place.repo.casefold() and _drafter_here(each, place)
        for each in others
    )


def _drafter_here(entry: Entry, target: Address | None) -> bool:
    address = read_address(entry.drafter)
    if not isinstance(address, HubAddress):
        return True
    key = _key(target)
    if kept_drafter(address.repo, key) is not None:
        return True
    held = cached(address.repo)
    return any(name.endswith(".gguf") for each in held for name in each.sizes)


def _key(target: Address | None) -> str:
    """By which its converted drafter is kept."""
    if isinstance(target, HubAddress):
        return target.repo
    return str(target.absolute()) if isinstance(target, Path) else ""


def _gguf(entry: Entry) -> Address | None:
    return entry.packaged or (read_address(entry.gguf) if entry.gguf else None)
