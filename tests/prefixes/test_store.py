"""Prefixes that left their slots are kept within bounds, and come back from memory and from disk as
they were, or not at all."""

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dflash_local.errors import InputError
from dflash_local.prefixes import files as prefix_files
from dflash_local.prefixes import store as prefix_store
from dflash_local.prefixes.files import PrefixFiles
from dflash_local.prefixes.prefix import SavedSequence, Wanted
from dflash_local.prefixes.store import PrefixStore

KEY = {"target": "one"}
LARGE = 1 << 20


def entry(
    *tokens: int,
    size: int = 1000,
    n_least: int = 0,
    n_drafter: int | None = None,
    checkpoints: tuple[int, ...] = (),
    owner: str = "",
) -> SavedSequence:
    """Content that its tokens tell."""
    content = np.frombuffer(random.Random(str(tokens)).randbytes(size), np.uint8)
    return SavedSequence(
        list(tokens),
        n_least,
        len(tokens) if n_drafter is None else n_drafter,
        checkpoints=checkpoints,
        owner=owner,
        target=content[: size // 2],
        drafter=content[size // 2 :],
        states=tuple(content[: 10 + length] for length in checkpoints),
    )


def files(folder: Path, max_bytes: int = LARGE, key: dict[str, str] = KEY) -> PrefixFiles:
    return PrefixFiles(folder, key, max_bytes)


def prompt(*tokens: int) -> np.ndarray:
    return [*tokens, 99]


def same(found: SavedSequence | None, kept: SavedSequence) -> None:
    """Fail unless a sequence was found, and is as it was."""
    assert found is not None
    np.testing.assert_equal(asdict(found), asdict(kept))


def found(store: PrefixStore, *tokens: int) -> SavedSequence | None:
    """The stored prefix of a prompt that begins with these tokens."""
    hit = store.find(Wanted(prompt(*tokens), for_drafts=True))
    return store.fetch(hit) if hit else None


def n_found(store: PrefixStore, *tokens: int) -> int:
    hit = store.find(Wanted(prompt(*tokens), for_drafts=True))
    return hit.n_usable if hit else 0


# In memory


def test_the_longest_prefix_is_found() -> None:
    store = PrefixStore(LARGE)
    for tokens in ((1, 2, 3, 4), (1, 2, 5, 6, 7), (8,)):
        assert store.put(entry(*tokens))
    assert n_found(store, 1, 2, 5, 6) == 4
    assert n_found(store, 1, 2, 3, 4, 5, 6) == 4
    assert n_found(store, 1, 9) == 1
    assert n_found(store, 9) == 0
    same(found(store, 1, 2, 3), entry(1, 2, 3, 4))


def test_of_a_whole_prompt_the_last_token_is_left() -> None:
    store = PrefixStore(LARGE)
    store.put(entry(1, 2, 3))
    hit = store.find(Wanted([1, 2, 3], for_drafts=True))
    assert hit is not None and hit.n_usable == 2


def test_what_cannot_be_cut_is_used_whole() -> None:
    store = PrefixStore(LARGE)
    store.put(entry(1, 2, 3, 4, n_least=3))
    assert n_found(store, 1, 2, 9) == 0
    assert n_found(store, 1, 2, 3, 9) == 3
    store.put(entry(1, 2, 3, 4, 5, 6, n_least=5))
    assert store.n_entries == 2  # the longer one does not serve for the other
    assert n_found(store, 1, 2, 3, 4, 9) == 4


def test_nobody_finds_the_texts_of_others(tmp_path: Path) -> None:
    """In memory and on disk, and the same text of two owners is kept for both."""
    for _ in range(2):
        store = PrefixStore(LARGE, files(tmp_path))
        for n, owner in enumerate(("", "a", "b")):
            if store.n_disk_entries < 3:
                assert store.put(entry(1, 2, 3, 4 + n, owner=owner))
                assert store.put(entry(1, 2, 3, owner=owner))
        for owner, n in (("", 3), ("a", 3), ("b", 3), ("c", 0)):
            hit = store.find(Wanted(prompt(1, 2, 3), owner=owner))
            assert (hit.n_usable if hit else 0) == n
            if hit:
                entry_found = store.fetch(hit)
                assert entry_found is not None and entry_found.owner == owner
        store.close()


def test_drafts_want_the_drafters_rows() -> None:
    store = PrefixStore(LARGE)
    store.put(entry(1, 2, 3, 4, n_drafter=2))
    assert n_found(store, 1, 2, 3, 4) == 2
    plain = store.find(Wanted(prompt(1, 2, 3, 4), for_drafts=False))
    assert plain is not None and plain.n_usable == 4
    store.put(entry(1, 2, 3, 4, 5, n_drafter=0))
    assert store.n_entries == 2


def test_what_was_used_longest_ago_goes_first() -> None:
    size = entry(1).n_bytes
    store = PrefixStore(3 * size)
    for token in (1, 2, 3):
        store.put(entry(token))
    assert found(store, 1) is not None
    store.put(entry(4))
    assert [n_found(store, token) for token in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert store.has(entry(3))  # which asks for it, too
    store.put(entry(5))
    assert [n_found(store, token) for token in (1, 3, 4, 5)] == [0, 1, 1, 1]


def test_never_more_bytes_than_are_allowed() -> None:
    rng = random.Random(3)
    store = PrefixStore(20_000)
    for i in range(300):
        size = rng.randrange(25_000)
        kept = store.put(entry(i, size=size))
        assert kept == (entry(i, size=size).n_bytes <= 20_000)
        assert store.n_bytes <= 20_000
    assert store.n_entries


def test_the_beginning_of_a_longer_one_is_dropped() -> None:
    store = PrefixStore(LARGE)
    store.put(entry(1, 2))
    store.put(entry(1, 3))
    store.put(entry(1, 2, 3))
    assert store.n_entries == 2
    assert store.n_bytes == entry(1, 3).n_bytes + entry(1, 2, 3).n_bytes
    assert store.has(entry(1, 2)) and not store.has(entry(1, 4))


def test_a_recurrent_state_is_cut_at_its_checkpoints() -> None:
    store = PrefixStore(LARGE)
    text = range(1, 11)
    store.put(entry(*text, n_least=10, checkpoints=(3, 6)))
    assert [n_found(store, *text[:n], 77) for n in range(1, 10)] == [0, 0, 3, 3, 3, 6, 6, 6, 6]
    assert n_found(store, *text, 77) == 10
    for n in (3, 6, 10):  # what ends there brings nothing new
        assert store.has(entry(*text[:n], n_least=n))
    assert store.has(entry(*text[:6], n_least=6, checkpoints=(3,)))
    assert not store.has(entry(*text[:5], n_least=5))
    assert not store.has(entry(*text[:6], n_least=6, checkpoints=(2,)))
    assert not store.has(entry(*text[:6]))


def test_what_is_reserved_is_not_used() -> None:
    size = entry(1).n_bytes
    store = PrefixStore(3 * size)
    for token in range(3):
        store.put(entry(token))
    store.reserve(size)
    assert store.n_entries == 2
    assert not store.put(entry(4, size=3000 - 100))
    store.reserve(0)
    assert store.put(entry(5)) and store.n_entries == 3


# On disk


def test_what_leaves_memory_is_found_on_disk(tmp_path: Path) -> None:
    size = entry(1).n_bytes
    store = PrefixStore(2 * size, files(tmp_path))
    for token in range(6):
        store.put(entry(token))
        for earlier in range(token + 1):
            same(found(store, earlier), entry(earlier))
    assert store.n_bytes <= 2 * size
    assert store.n_entries == 2


def test_a_slow_disk_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the model puts entries into the store. Those that the disk has no time for are
    forgotten; those on their way can be had."""
    may_go_on, folder = threading.Event(), files(tmp_path)
    write = folder.write

    def slowly(leaving: SavedSequence) -> bool:
        may_go_on.wait(60)
        return write(leaving)

    monkeypatch.setattr(folder, "write", slowly)
    monkeypatch.setattr(prefix_store, "_LEAST_LEAVING", 0)
    size = entry(1).n_bytes
    store = PrefixStore(2 * size, folder)
    for token in range(9):
        store.put(entry(token))
    assert store.n_disk_entries == 0  # so nothing has waited for the disk
    there = [n_found(store, token) for token in range(9)]
    may_go_on.set()
    assert there == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    store.close()
    assert PrefixStore(LARGE, files(tmp_path)).n_disk_entries == 4


def test_what_was_in_memory_is_there_after_a_restart(tmp_path: Path) -> None:
    first = PrefixStore(LARGE, files(tmp_path))
    for tokens in ((1, 2, 3), (4, 5), (6,)):
        first.put(entry(*tokens, n_drafter=1))
    first.close()
    assert first.n_bytes == 0
    second = PrefixStore(LARGE, files(tmp_path))
    assert (second.n_entries, second.n_disk_entries) == (0, 3)
    same(found(second, 4), entry(4, 5, n_drafter=1))


def test_the_folder_is_bounded_and_the_oldest_file_goes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours" * 1000)
    one = files(tmp_path)
    one.write(entry(0))
    size = one.n_bytes
    store = files(tmp_path, 3 * size)
    for token in (1, 2):
        store.write(entry(token))
    stored = {int(p.tokens[0]): p for p in store.prefixes()}
    old = time.time() - 100
    for token in (1, 2):
        os.utime(stored[token].path, (old + token, old + token))
    os.utime(stored[0].path, (old, old))
    assert store.read(stored[0]) is not None  # used just now
    other = files(tmp_path, 3 * size, {"target": "another"})
    other.write(entry(3))
    assert {int(p.tokens[0]) for p in files(tmp_path, 3 * size).prefixes()} == {0, 2}
    assert store.read(stored[1]) is None
    assert other.n_bytes <= 3 * size
    assert not store.write(entry(9, size=4 * size))
    assert (tmp_path / "notes.txt").exists()


def test_a_longer_file_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    store = files(tmp_path)
    store.write(entry(1, 2))
    store.write(entry(1, 2, 3))
    assert [len(p) for p in store.prefixes()] == [3]
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_another_model_are_left_alone(tmp_path: Path) -> None:
    files(tmp_path).write(entry(1))
    other = files(tmp_path, key={"target": "two"})
    assert other.prefixes() == []
    assert len(files(tmp_path).prefixes()) == 1


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    files(folder).write(entry(1))
    (path,) = folder.iterdir()
    if os.name == "posix":
        assert path.stat().st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o077 == 0


def damaged(content: bytes) -> list[bytes]:
    rng = random.Random(5)
    cuts = [content[: rng.randrange(len(content))] for _ in range(40)]
    flips = []
    for at in [*range(130), *(rng.randrange(len(content)) for _ in range(60))]:
        flips.append(
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        )
    return [b"", content + b"\0", b"GGUF" + content, *cuts, *flips]


@pytest.mark.parametrize("checkpoints", [(), (1, 2)])
def test_no_damaged_file_is_used(tmp_path: Path, checkpoints: tuple[int, ...]) -> None:
    whole = entry(1, 2, 3, checkpoints=checkpoints)
    files(tmp_path).write(whole)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for bad in damaged(content):
        path.write_bytes(bad)
        lines: list[str] = []
        store = PrefixStore(LARGE, PrefixFiles(tmp_path, KEY, LARGE, lines.append))
        assert found(store, 1, 2, 3) is None
        assert n_found(store, 1, 2, 3) == 0
        # A flip in the tokens themselves may make it another prompt's, which nobody has asked for.
        for left in store._all():
            assert store.find(Wanted(prompt(*left.tokens), for_drafts=False)) is not None
            assert found(store, *left.tokens) is None
        assert not path.exists()
        assert len(lines) == 1 and str(path) in lines[0] and "\n" not in lines[0]
    path.write_bytes(content)
    same(found(PrefixStore(LARGE, files(tmp_path)), 1, 2, 3), whole)


def test_a_file_that_changes_after_it_was_seen_is_a_miss(tmp_path: Path) -> None:
    store = PrefixStore(LARGE, files(tmp_path))
    writer = files(tmp_path)
    writer.write(entry(1, 2, 3))
    writer.write(entry(7, 8))
    store = PrefixStore(LARGE, files(tmp_path))
    a, b = (p.path for p in store._all())
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.unlink()
    assert found(store, 1, 2, 3) is None and found(store, 7, 8) is None
    assert content not in {p.read_bytes() for p in tmp_path.iterdir()}


def test_half_written_files_are_never_read_and_go_in_time(tmp_path: Path) -> None:
    files(tmp_path).write(entry(1))
    (path,) = tmp_path.iterdir()
    half = path.with_name(path.name + ".123.tmp")
    half.write_bytes(path.read_bytes())
    path.unlink()
    assert files(tmp_path).prefixes() == [] and half.exists()
    os.utime(half, (time.time() - 1e5,) * 2)
    assert files(tmp_path).prefixes() == [] and not half.exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cache_dir .*file.* cannot be used: .*name a folder"):
        files(tmp_path / "file" / "cache")


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    store = PrefixFiles(tmp_path / "cache", KEY, LARGE, lines.append)
    (tmp_path / "cache").rmdir()
    assert not store.write(entry(1))
    assert len(lines) == 1 and "cannot be written" in lines[0]
    store.clear()
    assert store.n_bytes == 0


def test_an_entry_that_cannot_be_written_stops_no_other_one(tmp_path: Path) -> None:
    """Whatever is wrong with it: here an owner's name that no file can have."""
    lines: list[str] = []
    store = PrefixStore(LARGE, PrefixFiles(tmp_path, KEY, LARGE, lines.append))
    for token, owner in ((1, "\ud800"), (2, "a"), (3, "a")):
        store.put(entry(token, owner=owner))
    store.close()
    assert store.n_disk_entries == 2
    assert len(lines) == 1 and "is not kept" in lines[0]
    store.put(entry(4))
    store.close()
    assert store.n_disk_entries == 3


def test_a_file_of_another_model_is_not_used_under_this_one_s_name(tmp_path: Path) -> None:
    mine, other = files(tmp_path), files(tmp_path, key={"target": "two"})
    other.write(entry(1, 2, 3))
    (path,) = tmp_path.iterdir()
    mine.write(entry(1, 2, 3))
    (name,) = (p for p in tmp_path.iterdir() if p != path)
    path.replace(name)
    assert mine.read(mine.prefixes()[0]) is None
    other.write(entry(1, 2, 3))
    path.replace(name)
    lines: list[str] = []
    assert PrefixFiles(tmp_path, KEY, LARGE, lines.append).prefixes() == []
    assert "another model's" in lines[0]


@pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")
def test_what_somebody_has_planted_is_neither_written_through_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_text("precious")
    store = files(folder)
    store.write(entry(1, 2, 3))
    (path,) = folder.iterdir()
    names = iter("78")  # had the first been guessed
    monkeypatch.setattr(prefix_files.tempfile, "_get_candidate_names", lambda: names)
    path.with_name(f"{path.name}.7.tmp").symlink_to(victim)
    store.write(entry(1, 2, 3))
    assert victim.read_text() == "precious" and next(names, None) is None
    assert not path.is_symlink() and store.read(store.prefixes()[0]) is not None
    path.unlink()
    os.mkfifo(path)
    assert files(folder).prefixes() == []
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    assert files(folder).prefixes() == []
    assert victim.read_text() == "precious"


def test_two_models_of_one_process_may_save_the_same_prefix_at_once(tmp_path: Path) -> None:
    """As two loads of one file do that share a folder."""
    lines: list[str] = []
    stores = [PrefixFiles(tmp_path, KEY, LARGE, lines.append) for _ in range(2)]
    together = threading.Barrier(2)

    def write(store: PrefixFiles) -> list[bool]:
        written = []
        for token in range(40):
            together.wait()
            written.append(store.write(entry(token)))
        return written

    with ThreadPoolExecutor(2) as threads:
        written = list(threads.map(write, stores))
    assert lines == []
    assert all(map(all, written))
    assert len(files(tmp_path).prefixes()) == 40
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_folder_that_others_can_write_to_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    tmp_path.chmod(0o777)
    PrefixFiles(tmp_path, KEY, LARGE, lines.append)
    assert len(lines) == 1 and "chmod 700" in lines[0]
    tmp_path.chmod(0o755)
    PrefixFiles(tmp_path, KEY, LARGE, lines.append)
    assert len(lines) == 1


def test_a_folder_that_cannot_be_written_to_keeps_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a read-only mount, which only root could make for a test."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    files(tmp_path).write(entry(1, 2, 3))
    for name in ("utime", "unlink", "replace", "mkdir"):
        monkeypatch.setattr(os, name, read_only)
    store = files(tmp_path)
    for _ in range(2):
        found = store.read(store.prefixes()[0])
        assert found is not None and found.tokens == [1, 2, 3]
