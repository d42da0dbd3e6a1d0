"""Saved sequences on disk: one file each, written and checked as a whole, with a limit in bytes.

A file begins with a magic line and a digest of all that follows: the length of a header, the header
as JSON, then the tokens and the saved states of target and drafter. Its name consists of two
digests: one of a key that names model files and options, one of owner and tokens; the header has
the first, too. So files of another model or version are never used, under any name, nor files of
another user. A file that was cut or damaged is noticed before anything in it is used.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dflash_local import disk_cache
from dflash_local.errors import InputError
from dflash_local.prefixes.prefix import Prefix, SavedSequence
from dflash_local.printable import silent

_MAGIC = b"dflash-local prefix 3\n"
_DIGEST = 32
_SHORT = 16
"""Characters of the key's digest in the name of a file."""
_BEGIN = len(_MAGIC) + _DIGEST
_LENGTH = 4
_MOST_HEADER = 1 << 16
_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.prefix(\.\w+\.tmp)?")
_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|(com|lpt)[\d¹²³]) *(\.|$))\w(?:[\w .-]{0,126}[\w-])?")
"""Of a file that a user names. It leads to no other folder and to no device, on any system."""
_OLD_S = 3600.0
"""Age at which a half-written file is taken as abandoned."""


class _Unusable(Exception):
    """A file that is not a complete saved sequence; the message names the fault."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPrefix(Prefix):
    """A saved sequence in a file."""

    path: Path
    n_bytes: int


class PrefixFiles:
    """The saved sequences in one folder, which several processes and models may share.

    Only those of one key can be read. All files together have at most `max_bytes`; the least
    recently used are deleted first, of any model. Safe to use from several threads.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        key: Mapping[str, Any],
        max_bytes: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`key`: everything that must be equal for a saved sequence to be usable, as JSON. `say` is
        called with a line about each file that cannot be used or written. Raises InputError for a
        folder that cannot be made or read.
        """
        self.folder = Path(os.path.expanduser(folder))
        self.max_bytes = max_bytes
        self.say = say or silent
        self._key = _digest(key)
        self._prefixes: dict[Path, StoredPrefix] = {}
        self._lock = threading.Lock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.name == "posix" and self.folder.stat().st_mode & 0o022:  # others may write
                self.say(
                    f"{self.folder}: other users can write to it; chmod 700 it, or name another"
                )
            self._read_folder()
        except OSError as error:
            raise InputError(
                f"cache_dir {self.folder} cannot be used: {error.strerror or error}; "
                "name a folder that can be written"
            ) from None
        self.n_bytes = self._trim(0)

    def prefixes(self) -> list[StoredPrefix]:
        """The saved sequences that can be read."""
        with self._lock:
            return list(self._prefixes.values())

    def read(self, prefix: StoredPrefix) -> SavedSequence | None:
        """A saved sequence, checked. None if its file is damaged or changed; it is then deleted."""
        try:
            entry = _read(prefix.path, self._key)
            if entry.tokens != prefix.tokens:
                raise _Unusable("its tokens have changed")
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(prefix.path)
            return entry
        except (OSError, _Unusable, MemoryError) as error:
            if not isinstance(error, FileNotFoundError):  # another process made room
                self.say(f"{prefix.path}: {error}; deleted")
            self._remove(prefix.path)
            return None

    def write(self, entry: SavedSequence) -> bool:
        """Save a sequence, completely or not at all, and make room for it. False if that fails or
        it is too large."""
        content = _content(entry, self._key)
        n_bytes = sum(len(part) for part in content)
        if n_bytes > self.max_bytes:
            return False
        named = entry.owner.encode() + _raw(entry.tokens)
        name = hashlib.blake2b(named, digest_size=8).hexdigest()
        path = self.folder / f"{self._key[:_SHORT]}-{name}.prefix"
        try:
            self._trim(n_bytes)
            _write_whole(path, content)
        except (OSError, MemoryError) as error:
            self.say(f"{path}: cannot be written: {error}; this prefix is not kept")
            return False
        use = {field.name: getattr(entry, field.name) for field in fields(Prefix)}
        stored = StoredPrefix(**use, path=path, n_bytes=n_bytes)
        for old in self.prefixes():
            if old.path != path and stored.serves_for(old):
                self._remove(old.path)
        with self._lock:
            self._prefixes[path] = stored
        self.n_bytes = self._trim(0)
        return True

    def clear(self) -> None:
        """Delete the saved sequences that can be read."""
        for prefix in self.prefixes():
            self._remove(prefix.path)
        self.n_bytes = self._trim(0)

    def _read_folder(self) -> None:
        for path in sorted(self.folder.iterdir()):
            if not _OURS.fullmatch(path.name):
                continue
            if path.suffix == ".tmp":
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _OLD_S:
                        path.unlink()
            elif path.name.startswith(self._key[:_SHORT]):
                try:
                    self._prefixes[path] = _read_head(path, self._key)
                except FileNotFoundError:
                    continue
                except (OSError, _Unusable) as error:
                    self.say(f"{path}: {error}; deleted")
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        with self._lock:
            self._prefixes.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def _trim(self, n_more: int) -> int:
        """Delete the least recently used until `n_more` bytes fit. Returns the bytes in use."""
        found = []
        for path in self.folder.glob("*"):  # none if somebody has removed the folder
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + n_more <= self.max_bytes:
                break
            self._remove(path)
            total -= size
        return total


class SlotFiles:
    """Slots that users save under names of their own: files of one folder, as many as they like. An
    owner's are in a folder of their own, so that nobody else's names lead there."""

    def __init__(self, folder: str | os.PathLike[str], key: Mapping[str, Any]) -> None:
        """`key` as for `PrefixFiles`. Raises InputError for a folder that is not there."""
        self._folder = Path(os.path.expanduser(folder))
        self._key = _digest(key)
        if not self._folder.is_dir():
            raise InputError(f"slot_save_path {self._folder} is no folder; make it, or name one")

    def write(self, name: str, entry: SavedSequence, owner: str = "") -> int:
        """Save a sequence, in place of one of that name; the bytes of its file. Raises
        InputError."""
        path, content = self._path(name, owner), _content(entry, self._key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write_whole(path, content)
        except OSError as error:
            raise InputError(f"{name} cannot be written: {error.strerror or error}") from None
        return sum(len(part) for part in content)

    def read(self, name: str, owner: str = "") -> tuple[SavedSequence, int]:
        """A saved sequence and the bytes of its file. Raises InputError."""
        path = self._path(name, owner)
        try:
            return _read(path, self._key), path.stat().st_size
        except (OSError, _Unusable) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(f"{name} cannot be restored: {why}") from None

    def _path(self, name: str, owner: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{name[:40]!r} is no name of a saved slot; take letters, digits, spaces and . _ - "
                "(no folders, no device such as con), at most 128"
            )
        own = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest() if owner else ""
        return self._folder / own / name


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_json(key)).hexdigest()


def _content(entry: SavedSequence, key: str) -> list[bytes | memoryview]:
    """The parts of a file, to be written one after the other."""
    header = _json(
        {
            "key": key,
            "n_tokens": len(entry),
            "n_target": entry.target.nbytes,
            "n_rows": entry.drafter.nbytes,
            "n_least": entry.n_least,
            "n_drafter": entry.n_drafter,
            "gave_up": entry.gave_up,
            "owner": entry.owner,
            "checkpoints": [
                [length, state.nbytes]
                for length, state in zip(entry.checkpoints, entry.states, strict=True)
            ],
        }
    )
    parts: list[bytes | memoryview] = [
        len(header).to_bytes(_LENGTH, "little"),
        header,
        _raw(entry.tokens),
        entry.target.data,
        entry.drafter.data,
        *(state.data for state in entry.states),
    ]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return [_MAGIC + digest.digest(), *parts]


def _write_whole(path: Path, content: list[bytes | memoryview]) -> None:
    """Write a file that only this user may read, completely or not at all. Raises OSError,
    MemoryError."""
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(descriptor)  # else a loss of power may leave the name alone
        os.replace(temporary, path)
    except (OSError, MemoryError):
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: Path, key: str) -> SavedSequence:
    with disk_cache.open_own(path) as file:
        head = file.read(_BEGIN)
        if not head.startswith(_MAGIC):
            raise _Unusable("it is not a saved prefix")
        body = np.empty(max(0, os.fstat(file.fileno()).st_size - _BEGIN), np.uint8)
        if file.readinto(body.data) != len(body):
            raise _Unusable("it was cut while it was read")
        if hashlib.blake2b(body.data, digest_size=_DIGEST).digest() != head[len(_MAGIC) :]:
            raise _Unusable("it is damaged")
        use, lengths = _head(file, key)
        rest = body[file.tell() - _BEGIN :]
    target, rows, *states = np.split(rest, list(accumulate(lengths[:-1])))
    return SavedSequence(
        **use,
        target=target,
        drafter=rows,
        # Their own memory: a slot keeps them when all else of the file is gone.
        states=tuple(state.copy() for state in states),
    )


def _read_head(path: Path, key: str) -> StoredPrefix:
    """The prefix that a file says it has, which `_read` checks."""
    with disk_cache.open_own(path) as file:
        use, _ = _head(file, key)
        return StoredPrefix(**use, path=path, n_bytes=os.fstat(file.fileno()).st_size)


def _head(file: BinaryIO, key: str) -> tuple[dict[str, Any], list[int]]:
    """The fields of a `Prefix`, and the bytes of each part of the file from its place then on:
    target, drafter, states."""
    file.seek(0)
    if file.read(_BEGIN)[: len(_MAGIC)] != _MAGIC:
        raise _Unusable("it is not a saved prefix")
    try:
        length = int.from_bytes(file.read(_LENGTH), "little")
        header = json.loads(file.read(min(length, _MOST_HEADER)))
        tokens = np.frombuffer(file.read(4 * header["n_tokens"]), "<i4").tolist()
        use = {name: header[name] for name in ("n_least", "n_drafter", "gave_up", "owner")}
        checkpoints = [(int(length), int(n)) for length, n in header["checkpoints"]]
        lengths = [header["n_target"], header["n_rows"], *(n for _, n in checkpoints)]
        is_whole = file.tell() + sum(lengths) == os.fstat(file.fileno()).st_size
        is_mine = header["key"] == key
    except (ValueError, LookupError, TypeError) as error:
        raise _Unusable(f"its header is damaged: {error!r}") from None
    if not is_mine:
        raise _Unusable("it is another model's")
    if not is_whole:
        raise _Unusable("its parts are not as long as it says")
    return use | {"tokens": tokens, "checkpoints": tuple(n for n, _ in checkpoints)}, lengths


def _raw(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
