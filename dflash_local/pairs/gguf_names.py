"""Facts in the names of GGUF files, by llama.cpp's conventions: quantisation, shards, drafters."""

import re
from collections.abc import Iterable, Mapping, Sequence

from dflash_local.errors import InputError

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANT = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32)(?=$|[-.])",
    re.IGNORECASE,
)
_DRAFTER = re.compile(r"(?:^|-)(?:dflash|dspark)\d*(?=-|\.gguf$)")
"""As llama.cpp names them, and as `convert` does, by the repository."""
_OTHERS = ("mmproj", "imatrix", "mtp-")
_PREFERRED = ("Q4_K_M", "UD-Q4_K_M", "UD-Q4_K_XL", "MXFP4", "Q8_0")
"""What llama.cpp takes where none is asked for comes first."""

Models = Mapping[str, Sequence[str]]
"""The files of each model of a repository or folder, in the order of its shards, by the model's
quantisation, or by its name where that tells none."""


def targets(names: Iterable[str]) -> Models:
    """The models among these files that are no drafters, projectors or the like."""
    return _models(filter(is_target, names))


def drafters(names: Iterable[str]) -> Models:
    """The drafters among these files: by their names they lie beside their target."""
    return _models(filter(_is_drafter, names))


def is_target(name: str) -> bool:
    """Whether this is no drafter, projector or the like, by its name."""
    return not _base(name).startswith(_OTHERS) and not _is_drafter(name)


def projectors(names: Iterable[str]) -> Models:
    """The projectors among these files, with which vision models read images."""
    return _models(name for name in names if _base(name).startswith("mmproj"))


def quantisation(stem: str) -> str | None:
    """The quantisation that a file's name tells, in capitals."""
    found = _QUANT.findall(_SHARD.sub("", stem))
    return found[-1].upper() if found else None


def is_shard(name: str) -> bool:
    """Whether this is one of several files of a model."""
    return _SHARD.search(name.removesuffix(".gguf")) is not None


def choose(models: Models, asked: str | None, usual: Sequence[str] = ()) -> str | None:
    """Choose one of the models: the one asked for, or the first `usual` one, or what llama.cpp
    takes. None if the one asked for is not among them, or there is none at all."""
    known = {name.casefold(): name for name in models}
    if asked is not None:
        wanted = asked.casefold()
        return known.get(wanted) or known.get(f"ud-{wanted}")
    for name in (*usual, *_PREFERRED):
        if name.casefold() in known:
            return known[name.casefold()]
    return next(iter(models), None)


def chosen(models: Models, asked: str | None, where: str, usual: Sequence[str] = ()) -> str:
    """As `choose`. Raises InputError, with what there is, if that gives none."""
    found = choose(models, asked, usual)
    if found is not None:
        return found
    if not models:
        raise InputError(f"{where}: holds no GGUF model")
    raise InputError(f"{where}: holds no {asked}; it has {', '.join(models)}")


def _models(names: Iterable[str]) -> Models:
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        if not name.lower().endswith(".gguf"):
            continue
        stem = name.rpartition("/")[2][: -len(".gguf")]
        plain = _SHARD.sub("", stem)
        key = quantisation(stem) or plain
        if owner.setdefault(key, plain) != plain:
            key = owner[plain] = plain  # another model of the same quantisation
        found.setdefault(key, []).append(name)
    whole = {key: sorted(files) for key, files in found.items()}
    return {key: files for key, files in whole.items() if _complete(files)}


def _complete(files: Sequence[str]) -> bool:
    shard = _SHARD.search(files[0][: -len(".gguf")])
    return shard is None or len(files) == int(shard[2])


def _is_drafter(name: str) -> bool:
    return _DRAFTER.search(_base(name)) is not None


def _base(name: str) -> str:
    return name.rpartition("/")[2].lower()
