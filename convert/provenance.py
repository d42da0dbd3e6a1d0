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
VERSION = "dflash_local.version"


def model_name(source: Source) -> str:
    """The name without its owner."""
    return source.name.rpartition("/")[2]


def provenance_keys(drafter: Source, target: GgufFile, sha256: str) -> list[Key]:
    """The drafter's origin, its target, the `sha256` of its weights, our own version.

    Of a local folder only the name is kept, of the target the name inside its file.
    """
    general, license_name = Keys.General, drafter.card.get("license")
    found: dict[str, str | int | None] = {
        SOURCE: drafter.name,
        REVISION: drafter.revision,
        SHA256: sha256,
        VERSION: version(),
        general.LICENSE: license_name if isinstance(license_name, str) else None,
    }
    if drafter.revision is not None:
        found[general.SOURCE_REPO_URL] = f"https://huggingface.co/{drafter.name}"
    if isinstance(name := target.get(general.NAME), str) and name:
        found |= {
            TARGET: name,
            general.BASE_MODEL_COUNT: 1,
            general.BASE_MODEL_NAME.format(id=0): name,
        }
    return [Key.of(name, value) for name, value in found.items() if value is not None]
