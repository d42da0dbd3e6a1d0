"""The content of a hub repository, as the hub lists it, and as the client's cache has it."""

import contextlib
import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.hub.download import fetch
from dflash_local.hub.trouble import OTHERWISE, one_line, transfer_errors, why_unreachable

_BLOCK = 1 << 20
"""Bytes of a header that are read at once."""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    commit: str
    sizes: dict[str, int]
    """Bytes of each file, by its path in the repository."""
    folder: Path | None = None
    """The folder of the files, if they are in the cache."""

    def n_bytes(self, names: Iterable[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of these files that are not in the cache yet."""
        here = {name for held in cached(self.name, self.commit) for name in held.sizes}
        return [name for name in names if name not in here]

    def fetch(self, names: Iterable[str]) -> list[Path]:
        """These files in the cache, downloaded where they are missing. Raises InputError."""
        if self.folder is not None:
            return [self.folder / name for name in names]
        with one_line(self.name, self.commit):
            return [fetch(self.name, name, self.commit) for name in names]

    def check_access(self, name: str) -> None:
        """Raise InputError if the hub would not give the file `name`, without fetching it."""
        import huggingface_hub as hub

        with one_line(self.name, self.commit):
            hub.get_hf_file_metadata(hub.hf_hub_url(self.name, name, revision=self.commit))


def listed(repo: str, revision: str | None = None) -> Repository:
    """The content of `repo` on the hub. Raises InputError: no repository, access or network."""
    from huggingface_hub import errors

    with one_line(repo, revision):
        try:
            return ask(repo, revision)
        except errors.HfHubHTTPError:
            raise
        except transfer_errors() as error:
            raise InputError(
                f"{repo}: {why_unreachable(error)}, and it is not on this disk: {OTHERWISE}"
            ) from None


def ask(repo: str, revision: str | None) -> Repository:
    """As `listed`, but raises the client's own errors where the hub cannot be asked."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    info = hub.HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    if info.sha is None:
        raise InputError(f"{repo}: the hub names no commit of it")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return Repository(repo, info.sha, sizes)


def cached(repo: str, revision: str | None = None) -> list[Repository]:
    """The content of `repo` in the cache, without a word to the hub: each commit that has any, the
    last fetched first; of a `revision` its last known commit alone."""
    place = cache_folder(repo)
    if place is None:
        return []
    snapshots = [path for path in (place / "snapshots").glob("*") if path.is_dir()]
    if revision is not None:
        ref = place / "refs" / revision
        commit = ref.read_text().strip() if ref.is_file() else revision
        snapshots = [path for path in snapshots if path.name == commit]
    snapshots.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    found = []
    for folder in snapshots:
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        found.append(Repository(repo, folder.name, sizes, folder))
    return found


def cache_folder(repo: str) -> Path | None:
    """The client's folder of `repo`; None if nothing of it was ever fetched."""
    from huggingface_hub import constants, file_download

    name = file_download.repo_folder_name(repo_id=repo, repo_type="model")
    folder = Path(constants.HF_HUB_CACHE) / name
    return folder if folder.is_dir() else None


def remove_files(repo: str, names: Iterable[str]) -> int:
    """Remove these files of `repo` at every commit, and their bytes; the number of bytes freed."""
    place = cache_folder(repo)
    freed = 0
    if place is None:
        return 0
    for name in names:
        for link in (place / "snapshots").glob(f"*/{glob.escape(name)}"):
            # where links are not supported, the file itself lies there
            blob = Path(os.path.realpath(link))
            with contextlib.suppress(OSError):
                freed += blob.stat().st_size
                link.unlink()
                if blob != link:
                    blob.unlink(missing_ok=True)
    return freed


def repository_of(path: Path) -> str | None:
    """The hub id of the repository that a file in the client's cache comes from."""
    place = snapshot_of(path)
    return place[0] if place else None


def snapshot_of(path: Path) -> tuple[str, str] | None:
    """The same, and the commit."""
    parts = path.absolute().parts
    for i, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[i + 1] == "snapshots":
            return part.removeprefix("models--").replace("--", "/", 1), parts[i + 2]
    return None


def remote_model(repository: Repository, names: list[str]) -> GgufFile:
    """The headers of a GGUF model on the hub, whose shards are `names`: a few megabytes of each.

    Raises InputError as `listed` does, and FileError for a file that is no GGUF model.
    """
    import huggingface_hub as hub

    shards = []
    with one_line(repository.name, repository.commit):
        files = hub.HfFileSystem()
        for name in names:
            place = f"{repository.name}@{repository.commit}/{name}"
            size = repository.sizes[name]
            # with its size, so that the client does not ask for the folder's listing
            file = files.open(place, "rb", size=size, block_size=_BLOCK, cache_type="readahead")
            shards.append((Path(name), file, size))
        return GgufFile.read(shards)
