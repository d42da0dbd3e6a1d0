"""Sequences that have left their slots, kept in host memory and, from there, on disk.

Memory and disk each have a limit in bytes. The least recently used go first. A sequence is dropped
if another one begins with it and is as good.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from dflash_local.prefixes.files import PrefixFiles, StoredPrefix
from dflash_local.prefixes.prefix import Prefix, SavedSequence, Wanted

_LEAST_LEAVING = 64 << 20


@dataclass(frozen=True)
class Found:
    """A saved sequence, and the number of the prompt's tokens that it can give."""

    prefix: Prefix
    n_usable: int

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self.prefix, StoredPrefix)


class PrefixStore:
    """At most `max_bytes` of entries in memory, and as many, or 64 MiB, on their way to disk.
    Prefixes that the disk is too slow for are forgotten: the thread that uses the store never waits
    for it. With 0 bytes it keeps nothing.

    One thread uses it. Any thread may read its counts.
    """

    def __init__(self, max_bytes: int, files: PrefixFiles | None = None) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._reserved = 0
        self._files = files
        self._entries: list[SavedSequence] = []  # the one used longest ago first
        self._leaving: list[SavedSequence] = []  # to be written, in this order
        self._lock = threading.Lock()  # of `_leaving` and `_writer`
        self._writer: threading.Thread | None = None
        self._reader = ThreadPoolExecutor(1, "prefix-reader")
        self._ahead: tuple[Prefix, Future[SavedSequence | None]] | None = None

    @property
    def spills(self) -> bool:
        """Whether prefixes that leave memory go to disk."""
        return self._files is not None

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    @property
    def n_disk_entries(self) -> int:
        return len(self._files.prefixes()) if self._files else 0

    def find(self, wanted: Wanted) -> Found | None:
        """The saved sequence that has most of a prompt. Of equals it prefers memory to disk, then
        the shortest. None if no token is usable."""
        best: tuple[int, bool, int] = (0, False, 0)
        found = None
        for prefix in self._all():
            n = prefix.n_usable(wanted)
            rank = n, isinstance(prefix, SavedSequence), -len(prefix)
            if n and rank > best:
                best, found = rank, Found(prefix, n)
        return found

    def _all(self) -> list[Prefix]:
        on_disk = self._files.prefixes() if self._files else []
        return [*self._entries, *self._leaving, *on_disk]

    def is_at_hand(self, found: Found) -> bool:
        """Whether `fetch` need not wait for the disk. If it must, a thread begins to read, once."""
        prefix = found.prefix
        if self._files is None or not isinstance(prefix, StoredPrefix):
            return True
        if self._ahead is None or self._ahead[0] is not prefix:
            self._ahead = prefix, self._reader.submit(self._files.read, prefix)
        return self._ahead[1].done()

    def forget_ahead(self) -> None:
        """Nobody waits any more for what `is_at_hand` began to read."""
        self._ahead = None

    def fetch(self, found: Found) -> SavedSequence | None:
        """The found sequence, with its content. It then counts as the last used. None if the file
        turns out to be damaged or gone."""
        prefix = found.prefix
        if isinstance(prefix, StoredPrefix):
            self.is_at_hand(found)
            ahead, self._ahead = self._ahead, None
            return ahead[1].result() if ahead else None
        assert isinstance(prefix, SavedSequence)
        self._touch(prefix)
        return prefix

    def has(self, prefix: Prefix) -> bool:
        """Whether a sequence that is as good is stored already. It then counts as the last used."""
        for entry in self._all():
            if entry.serves_for(prefix):
                if isinstance(entry, SavedSequence):
                    self._touch(entry)
                return True
        return False

    def _touch(self, entry: SavedSequence) -> None:
        for i, other in enumerate(self._entries):
            if other is entry:
                self._entries.append(self._entries.pop(i))
                return

    def put(self, entry: SavedSequence) -> bool:
        """Keep an entry in memory; others move to disk to make room. False if it is too large."""
        if entry.n_bytes > self.max_bytes - self._reserved:
            return False
        kept = [other for other in self._entries if not entry.serves_for(other)]
        self._replace(kept)
        self._make_room(entry.n_bytes)
        self._replace([*self._entries, entry])
        return True

    def reserve(self, n_bytes: int) -> None:
        """Reserve so many of its bytes for the checkpoints of slots, in place of those before."""
        self._reserved = n_bytes
        self._make_room(0)

    def _make_room(self, n_bytes: int) -> None:
        while self._entries and self.n_bytes + n_bytes > self.max_bytes - self._reserved:
            oldest, *rest = self._entries
            self._replace(rest)
            self._spill(oldest)

    def _replace(self, entries: list[SavedSequence]) -> None:
        self._entries = entries
        self.n_bytes = sum(entry.n_bytes for entry in entries)

    def _spill(self, entry: SavedSequence, *, wait: bool = False) -> None:
        """Let a thread write an entry to disk, after those before it. `wait`: if the disk is slow,
        rather than forget the entry."""
        files = self._files
        if files is None or any(p.serves_for(entry) for p in files.prefixes()):
            return
        if wait:
            self._wait()
        with self._lock:
            n_bytes = sum(other.n_bytes for other in self._leaving)
            if n_bytes + entry.n_bytes > max(self.max_bytes, _LEAST_LEAVING):
                return
            self._leaving = [*self._leaving, entry]
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write, args=(files,), name="prefix-writer"
                )
                self._writer.start()

    def _write(self, files: PrefixFiles) -> None:
        while True:
            with self._lock:
                if not self._leaving:
                    self._writer = None
                    return
                entry = self._leaving[0]
            try:
                files.write(entry)
            except Exception as error:  # those behind it are written all the same
                with suppress(Exception):
                    files.say(f"a prefix could not be written, and is not kept: {error}")
            with self._lock:
                self._leaving = self._leaving[1:]

    def _wait(self) -> None:
        writer = self._writer
        if writer is not None:
            writer.join()

    def clear(self) -> None:
        """Forget all prefixes in memory and on disk."""
        self._wait()
        self._replace([])
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        """Write the entries in memory to disk, as far as they fit there. Safe to call again."""
        if self._files is not None:
            kept, n_bytes = [], 0
            for entry in reversed(self._entries):
                n_bytes += entry.n_bytes
                if n_bytes > self._files.max_bytes:
                    break
                kept.append(entry)
            for entry in reversed(kept):
                self._spill(entry, wait=True)
        self._wait()
        self._reader.shutdown()
        self._replace([])
