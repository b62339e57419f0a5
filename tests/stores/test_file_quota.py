"""A FileStore with limits: every byte is booked, a full one is no fault, and what is read stays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from hicache_async.stores._files.directory import TOUCH_PERIOD_S
from hicache_async.stores._files.quota import Quota
from hicache_async.testing.manual import ManualClock, ManualThreads
from tests.stores.pages import PAGE_NBYTES, files_below, read, until, write

OBJECT_NBYTES = 8192
"""What one object counts: a block of header and its payload in whole blocks."""

pytestmark = pytest.mark.asyncio


def quota_of(store: FileStore) -> Quota:
    """Return the books of a store that has written."""
    quota = store._directory._writing().quota
    assert quota is not None
    return quota


def check_books(store: FileStore) -> None:
    """Check that nothing is reserved and that the books say what is on the disk."""
    quota = quota_of(store)
    assert quota.reserve(0)  # tells the ledger what was committed
    quota.abort(0)
    num_bytes = len(files_below(store.root, "objects")) * OBJECT_NBYTES
    assert quota.usage() == (num_bytes, 0)
    assert quota._leaving == 0
    assert files_below(store.root, "temp") == []


def age(root: str, *keys: str) -> None:
    """Make objects look as if they had not been used for long, the first one longest."""
    for path in files_below(root, "objects"):
        if path.stem in keys:
            os.utime(path, (keys.index(path.stem) + 1,) * 2)


async def test_without_limits_there_are_no_books(store: FileStore) -> None:
    """A store without limits keeps none."""
    await write(store, "a")
    assert store._directory._writing().quota is None
    assert not os.path.exists(f"{store.root}/v2/quota")


async def test_objects_are_booked_through_their_life(tmp_path: Path) -> None:
    """Writing, touching, deleting, replacing and removing what is damaged keep the books as the disk is."""
    store = FileStore(tmp_path, max_bytes=1 << 20)
    keys = [f"key{number}" for number in range(10)]
    assert await write(store, *keys) == 10
    check_books(store)
    assert await write(store, *keys) == 10
    check_books(store)
    assert await store.delete([*keys[:3], "absent"]) == 3
    check_books(store)
    for path in files_below(tmp_path, "objects"):
        if path.stem in keys[4:6]:
            path.write_bytes(bytes(OBJECT_NBYTES))
    assert await read(store, *keys[3:]) == 1
    assert await write(store, *keys[5:6]) == 1
    check_books(store)
    await store.aclose()


@contextmanager
def masked(umask: int) -> Iterator[None]:
    """Give new files of this process fewer bits of their mode than the store wants."""
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("durability", ["none", "batch", "each"])
@pytest.mark.parametrize("call", ["open", "fchmod", "writev", "fdatasync", "link"])
async def test_a_write_that_fails_is_not_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, call: str
) -> None:
    """Whatever call of the disk fails, the room reserved for the page is free again and no file is left."""
    store = FileStore(tmp_path, max_bytes=1 << 20, durability=durability)  # type: ignore[arg-type]
    await write(store, "warm")
    original = getattr(os, call)

    def failing(*args: object, **options: object) -> object:
        if call == "open" and not str(args[0]).startswith(f"{tmp_path}/v2/temp/"):
            return original(*args, **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, masked(0o277 if call == "fchmod" else 0o077):
        patch.setattr(os, call, failing)
        if call == "link":
            patch.setattr(os, "rename", failing)
        if call == "fdatasync" and durability == "none":
            assert await write(store, "new") == 1
        else:
            with pytest.raises(StoreUnavailable, match="No space left"):
                await write(store, "new")
    check_books(store)
    assert await write(store, "new", "newer") == 2
    check_books(store)
    await store.aclose()


async def test_a_delete_that_fails_is_not_booked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that the disk does not let go stays on the books, and one that is gone already is on none."""
    store = FileStore(tmp_path, max_bytes=1 << 20)
    await write(store, "a", "b", "c")
    unlink = os.unlink

    def refusing(path: str) -> None:
        if path.endswith("b.kv"):
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    with pytest.raises(StoreUnavailable, match="Operation not permitted"):
        await store.delete(["a", "absent", "b", "c"])
    assert sorted(await store.list_keys()) == ["b", "c"]
    check_books(store)
    await store.aclose()


async def test_a_cancelled_write_is_booked_as_far_as_it_came(tmp_path: Path) -> None:
    """A write cancelled in the queue, or after its thread began, leaves the books as the disk is."""
    threads = ManualThreads()
    store = FileStore(tmp_path, max_bytes=1 << 20, threads=threads)
    warming = asyncio.create_task(write(store, "warm"))
    await until(lambda: threads.pending == 2)  # this one, and the trim of a store that was opened
    threads.run_all()
    assert await warming == 1
    for begun in (False, True):
        writing = asyncio.create_task(write(store, f"a{begun}", f"b{begun}"))
        await until(lambda: threads.pending == 1)
        if begun:
            threads.run_next()
        writing.cancel()
        await asyncio.wait([writing])
        threads.run_all()
        check_books(store)
    assert len(files_below(tmp_path, "objects")) == 3
    await store.aclose()


async def test_a_full_store_is_no_fault(tmp_path: Path) -> None:
    """What has no room ends the count, is counted and logged once; what is there is touched, read and kept."""
    store = FileStore(tmp_path, max_bytes=4 * OBJECT_NBYTES)
    with capture_logs() as logs:
        assert await write(store, "a", "b") == 2
        for _ in range(3):
            assert await write(store, "large", nbytes=5 * OBJECT_NBYTES) == 0
            assert await write(store, "a", "b") == 2
    assert [line["event"] for line in logs] == ["store.full"]
    assert store.stats == {"full": 3}
    assert await read(store, "a", "b") == 2
    assert await write(store, "c", "d") == 2
    assert len(files_below(tmp_path, "objects")) == 4
    check_books(store)
    await store.aclose()


async def test_an_oversize_object_stops_nobody_else(tmp_path: Path) -> None:
    """Writes that share a job with one that can never fit are whole."""
    store = FileStore(tmp_path, max_bytes=8 * OBJECT_NBYTES, num_lanes=1)
    counts = await asyncio.gather(
        write(store, "a"), write(store, "large", nbytes=9 * OBJECT_NBYTES), write(store, "b", "c")
    )
    assert counts == [1, 0, 2]
    check_books(store)
    await store.aclose()


async def test_the_limit_holds_at_every_moment_and_what_is_read_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten objects' room, a hundred written: never more on disk, and the one that is read again and again stays."""
    clock = ManualClock()
    store = FileStore(tmp_path, max_bytes=10 * OBJECT_NBYTES, monotonic=clock.monotonic)
    writev, most = os.writev, [0]

    def sampled(fd: int, buffers: list[memoryview]) -> int:
        written = writev(fd, buffers)
        files = files_below(tmp_path, "objects") + files_below(tmp_path, "temp")
        most[0] = max(most[0], len(files))
        return written

    monkeypatch.setattr(os, "writev", sampled)
    assert await write(store, "favourite") == 1
    for number in range(100):
        age(store.root, "favourite", *(f"key{earlier}" for earlier in range(number)))
        clock.advance(TOUCH_PERIOD_S)
        assert await read(store, "favourite") == 1
        assert await write(store, f"key{number}") == 1
    assert most[0] == 10
    check_books(store)
    await store.aclose()


async def test_what_is_evicted_is_no_longer_believed(tmp_path: Path) -> None:
    """A lookup right after an eviction does not count what has gone."""
    store = FileStore(tmp_path, max_bytes=4 * OBJECT_NBYTES, existence_ttl_s=-1)
    assert await write(store, "a", "b", "c", "d") == 4
    age(store.root, "a", "b", "c", "d")
    assert await write(store, "e") == 1
    assert await store.count_prefix(["a"]) == 0
    assert await store.count_prefix(["d"]) == 1
    assert await store.count_prefix(["e"]) == 1
    await store.aclose()


async def test_a_read_marks_an_object_once_a_minute(tmp_path: Path) -> None:
    """The first read of a minute makes an object young; the next ones of that minute cost nothing."""
    clock = ManualClock()
    store = FileStore(tmp_path, monotonic=clock.monotonic)
    await write(store, "a")
    (path,) = files_below(tmp_path, "objects")
    touched = []
    for advance_s in (0, TOUCH_PERIOD_S - 1, 1, 1):
        clock.advance(advance_s)
        os.utime(path, (1, 1))
        assert await read(store, "a") == 1
        touched.append(path.stat().st_mtime > 1)
    assert touched == [True, False, True, False]
    await store.aclose()


async def test_a_sweep_trims_and_cleans(tmp_path: Path) -> None:
    """Beyond a lowered limit objects go, oldest first, with files of dead writers and empty directories."""
    store = FileStore(tmp_path)
    await write(store, "a", "b", "c", "0f_ukv1-0123456789abcdef_m")
    await store.delete(["0f_ukv1-0123456789abcdef_m"])
    await store.aclose()
    age(str(tmp_path), "a", "b", "c")
    Path(tmp_path, "v2", "temp", "none.none.1.1.0123abcd.0").touch()
    os.utime(Path(tmp_path, "v2", "temp", "none.none.1.1.0123abcd.0"), (1, 1))
    foreign = Path(tmp_path, "v2", "objects", "notes", "old")
    foreign.mkdir(parents=True)
    store = FileStore(tmp_path, max_bytes=2 * OBJECT_NBYTES, low_water=1.0)
    assert await store.list_namespaces() == []  # sweeps what dead writers left
    Path(tmp_path, "v2", "temp", "none.none.1.1.0123abcd.1").touch()
    os.utime(Path(tmp_path, "v2", "temp", "none.none.1.1.0123abcd.1"), (1, 1))
    swept = await store.sweep()
    assert swept == {"temp_files": 1, "evicted_bytes": 0, "empty_directories": 3}  # it trims at open
    assert sorted(await store.list_keys()) == ["b", "c"]
    assert foreign.is_dir()
    assert await write(store, "d") == 1
    assert await store.sweep() == {"temp_files": 0, "evicted_bytes": 0, "empty_directories": 1}
    await store.aclose()


async def test_a_directory_swept_away_under_a_writer_is_made_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that removes the directory a writer has just made costs the writer a second try."""
    await write(store, "warm")
    rename, removed = os.rename, []

    def swept(source: str, target: str) -> None:
        if target.endswith(".kv") and len(removed) < 2:
            removed.append(target)
            if os.path.isdir(os.path.dirname(target)):
                os.rmdir(os.path.dirname(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", swept)
    assert await write(store, "a") == 1
    assert len(removed) == 2
    assert await read(store, "a", nbytes=PAGE_NBYTES) == 1
