"""One file of a hub repository, in the hub client's cache; an interrupted transfer is resumed.

The client resumes within one call only, and throws a part away when it is interrupted. So weights
are first transferred, by the client's own function, to where it looks for finished files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.errors import InputError
from dflash_local.hub.trouble import transfer_errors

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from huggingface_hub import HfFileMetadata

Watch = Callable[[str, int, int], None]
"""Called with the name of a file that is fetched, the bytes that are here, and all of it."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HTTP_LIMIT = 50_000_000_000  # bytes; the hub gives larger files by Xet only


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Let `watch` follow the transfers of weights in this context. Its errors end the transfer; the
    bytes so far are kept."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Let the client show its bars on stderr, or keep it quiet."""
    from huggingface_hub import utils

    if shown or utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.enable_progress_bars()  # type: ignore[attr-defined]


def fetch(repo: str, name: str, commit: str) -> Path:
    """The file `name` of `repo` at `commit`, downloaded if it is not in the cache.

    Raises InputError when the disk is too full or the bytes are not those that the hub announced,
    and the client's own errors.
    """
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(repo, name, revision=commit)
    if isinstance(cached, str):
        return Path(cached)
    is_large = name.endswith((".safetensors", ".gguf"))
    if is_large:
        _fill_blob(repo, name, commit)
    with progress_bars(is_large):
        return Path(hub.hf_hub_download(repo, name, revision=commit))


def _fill_blob(repo: str, name: str, commit: str) -> None:
    """Put the bytes of `name` where the client keeps them, if it names the file by its sha256."""
    import huggingface_hub as hub
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    url = hub.hf_hub_url(repo, name, revision=commit)
    metadata = hub.get_hf_file_metadata(url)
    etag, size = metadata.etag, metadata.size
    if etag is None or size is None or not _SHA256.fullmatch(etag) or size > _HTTP_LIMIT:
        return
    cache = Path(constants.HF_HUB_CACHE)
    folder = file_download.repo_folder_name(repo_id=repo, repo_type="model")
    blob = cache / folder / "blobs" / etag
    lock = cache / ".locks" / folder / f"{etag}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            _complete(blob.with_name(f"{etag}.incomplete"), url, repo, name, metadata)
            os.replace(blob.with_name(f"{etag}.incomplete"), blob)


def _complete(part: Path, url: str, repo: str, name: str, metadata: HfFileMetadata) -> None:
    """Transfer the rest of the file to `part`, and check all of it."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.sha import sha_fileobj

    size = metadata.size or 0
    done = part.stat().st_size if part.exists() else 0
    if done > size:
        part.unlink()
        done = 0
    free = shutil.disk_usage(part.parent).free
    if free < size - done:
        raise InputError(
            f"{repo}: {name} needs {size - done} bytes, {part.parent} has {free} left;"
            " make room, or set HF_HOME to a folder on another disk"
        )
    while done < size:
        with _Part(part, name, size) as file:
            try:
                file_download.http_get(
                    url,
                    file,
                    resume_size=done,
                    headers=build_hf_headers(),
                    expected_size=size,
                    displayed_filename=name,
                )
            except transfer_errors():
                file.flush()
                # try again as long as something arrives
                if file.tell() <= done:
                    raise
            done = file.tell()
    with part.open("rb") as whole:
        sha256 = sha_fileobj(whole).hex()
    if sha256 != metadata.etag:
        part.unlink()
        raise InputError(
            f"{repo}: {name} arrived damaged (its sha256 is not the hub's) and was removed;"
            " run the same command again"
        )


class _Part(BufferedWriter):
    """The part of a file that has come, to be added to. Watchers hear of it and of each piece."""

    def __init__(self, path: Path, name: str, size: int) -> None:
        super().__init__(FileIO(path, "ab"))
        self._name, self._size = name, size
        self._watch = _watch.get()
        self._tell()

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        self._tell()
        return written

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch(self._name, self.tell(), self._size)
