"""The keys that say where a converted file comes from. The same input gives the same keys."""

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


def model_name(source: Source) -> str:
    """The name without its owner."""
    return source.name.rpartition("/")[2]


def provenance_keys(drafter: Source, target: GgufFile | Source, sha256: str) -> list[Key]:
    """The drafter's origin, its target, the `sha256` of its weights, our own version.

    Of a local folder only the name is kept, of a GGUF target the name inside the file.
    """
    general, license_name = Keys.General, drafter.card.get("license")
    found: dict[str, str | int | None] = {
        SOURCE: drafter.name,
        REVISION: drafter.revision,
        SHA256: sha256,
        VERSION: version(),
        general.SOURCE_REPO_URL: _url(drafter),
        general.LICENSE: license_name if isinstance(license_name, str) else None,
    }
    if isinstance(target, Source):
        found |= {
            TARGET: target.name,
            TARGET_REVISION: target.revision,
            general.BASE_MODEL_COUNT: 1,
            general.BASE_MODEL_NAME.format(id=0): model_name(target),
            general.BASE_MODEL_REPO_URL.format(id=0): _url(target),
        }
    elif isinstance(name := target.get(general.NAME), str) and name:
        found |= {
            TARGET: name,
            general.BASE_MODEL_COUNT: 1,
            general.BASE_MODEL_NAME.format(id=0): name,
        }
    return [Key.of(name, value) for name, value in found.items() if value is not None]


def _url(source: Source) -> str | None:
    return None if source.revision is None else f"https://huggingface.co/{source.name}"
