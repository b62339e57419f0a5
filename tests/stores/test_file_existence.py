"""How a FileStore comes to know which objects exist: from its own calls, from a scan, or from the disk."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path

import pytest

from hicache_async.stores import FileStore
from hicache_async.stores._files import directory as _directory
from hicache_async.stores._files import scan as _scan
from hicache_async.testing.manual import ManualThreads
from tests.stores.pages import CountingThreads, files_below, read, until, write

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

DIGEST, OTHER = "ukv1-0123456789abcdef", "ukv1-fedcba9876543210"


def keys_of(digest: str, num_keys: int) -> list[str]:
    return [f"{number:04x}_{digest}_Model_0_2" for number in range(num_keys)]


async def fill(root: Path, *keys: str) -> None:
    """Store objects as another process would."""
    store = FileStore(root)
    assert await write(store, *keys, nbytes=1) == len(keys)
    await store.aclose()


async def scanned(store: FileStore, num_keys: int) -> None:
    """Wait until so many keys are known."""
    while len(store._existence) < num_keys:  # noqa: ASYNC110 - threads make them known, unasked
        await asyncio.sleep(0)


async def test_the_first_lookup_has_its_namespace_listed(tmp_path: Path) -> None:
    """Soon all objects of that namespace are known without a hop, and those of no other."""
    mine, theirs, plain = keys_of(DIGEST, 1100), keys_of(OTHER, 3), ["plain"]
    await fill(tmp_path, *mine, *theirs, *plain)
    threads = CountingThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=-1)
    assert await store.count_prefix([f"absent_{DIGEST}_m"]) == 0
    await scanned(store, len(mine))
    await until(lambda: not store._opened or not store._opened._live)
    num_jobs = threads.num_jobs
    for first in range(0, 1100, 100):
        assert await store.count_prefix(mine[first : first + 100]) == 100
    assert threads.num_jobs == num_jobs
    assert len(store._existence) == len(mine)
    assert await store.count_prefix(theirs) == 3
    assert await store.count_prefix(plain) == 1
    await store.aclose()
    threads.shutdown()


@pytest.mark.parametrize("ttl_s", [0, 5])
async def test_a_lookup_of_what_is_unknown_is_one_hop(tmp_path: Path, ttl_s: float) -> None:
    """Whatever others have written since is found, 512 keys in one job that is no scan's."""
    threads = ManualThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=ttl_s)
    keys = keys_of(DIGEST, 512)
    looking = asyncio.create_task(store.count_prefix(keys))
    await until(lambda: threads.pending == (2 if ttl_s else 1))
    await asyncio.to_thread(asyncio.run, fill(tmp_path, *keys))
    for _ in range(threads.pending):
        threads.run_next()
    assert await looking == 512
    await store.aclose()


async def test_a_scan_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread hangs in a listing, lookups, reads and writes of a store with one lane are done."""
    keys = keys_of(DIGEST, 20)
    await fill(tmp_path, *keys)
    inside, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    listdir = os.listdir

    def hung(path: str) -> list[str]:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)
        return listdir(path)

    store = FileStore(tmp_path, num_lanes=1, existence_ttl_s=-1)
    assert await store.count_prefix(["plain"]) == 0  # sweeps files under construction, which lists too
    monkeypatch.setattr(os, "listdir", hung)
    assert await store.count_prefix(keys) == 20
    await inside.wait()
    assert await store.count_prefix(["x", *keys]) == 0
    assert await store.count_prefix([*keys, "y"]) == 20
    assert await read(store, *keys, nbytes=1) == 20
    assert await write(store, "new", nbytes=1) == 1
    await store.aclose()
    go_on.set()


async def test_a_scan_goes_in_slices_and_ends_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice looks at a bounded number of names, others come in between, and after close there is none."""
    monkeypatch.setattr(_scan, "SLICE_NAMES", 7)
    await fill(tmp_path, *keys_of(DIGEST, 600))
    threads = ManualThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=-1)
    looking = asyncio.create_task(store.count_prefix([f"absent_{DIGEST}_m"]))
    await until(lambda: threads.pending == 2)
    threads.run_all()
    assert await looking == 0
    await until(lambda: len(store._existence) > 0)
    for _ in range(5):
        await until(lambda: threads.pending == 1)
        before = len(store._existence)
        threads.run_next()
        await until(lambda before=before: len(store._existence) > before)  # type: ignore[misc]
        assert len(store._existence) - before <= 7
    await until(lambda: threads.pending == 1)
    known = len(store._existence)
    await store.aclose()
    threads.run_all()
    for _ in range(20):
        await asyncio.sleep(0)
    assert threads.pending == 0
    assert len(store._existence) == known <= 42


async def test_a_scan_ends_where_the_index_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing a directory larger than the index forgets nothing that was asked for."""
    monkeypatch.setattr(_scan, "SLICE_NAMES", 7)
    await fill(tmp_path, *keys_of(DIGEST, 300))
    store = FileStore(tmp_path, existence_ttl_s=-1)
    store._existence._max_young = 50
    assert await store.count_prefix([f"absent_{DIGEST}_m"]) == 0
    await scanned(store, 44)
    for _ in range(100):
        await asyncio.sleep(0)
    assert store._opened is not None
    assert not store._opened._live
    assert len(store._existence) <= 50
    assert len(store._existence._old) == 0
    await store.aclose()


async def test_what_is_deleted_during_a_scan_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that the scan has listed and this store has deleted since is unknown, the others are known."""
    keys = keys_of(DIGEST, 10)
    await fill(tmp_path, *keys)
    store = FileStore(tmp_path, existence_ttl_s=-1)
    loop = asyncio.get_running_loop()
    listed, go_on = asyncio.Event(), threading.Event()
    names_in = _directory.names_in

    def held(path: str) -> list[str]:
        names = names_in(path)
        if any(name.endswith(".kv") for name in names):
            loop.call_soon_threadsafe(listed.set)
            assert go_on.wait(30)
        return names

    monkeypatch.setattr(_scan, "names_in", held)
    assert await store.count_prefix([f"absent_{DIGEST}_m"]) == 0
    await listed.wait()
    assert await store.delete(keys[:5]) == 5
    go_on.set()
    await scanned(store, 5)
    assert store._existence.count_prefix(keys[5:]) == 5
    assert store._existence.count_prefix(keys[:1]) == 0
    await store.aclose()


async def test_a_lookup_overtaken_by_a_delete_is_not_believed(tmp_path: Path) -> None:
    """A lookup that saw an object which was deleted before it could say so leaves no belief behind."""
    await fill(tmp_path, "a", "b")
    threads = ManualThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=-1)
    looking = asyncio.create_task(store.count_prefix(["a", "b"]))
    await until(lambda: threads.pending == 1)
    threads.run_next()
    deleting = asyncio.create_task(store.delete(["b"]))
    assert await looking == 2
    await until(lambda: threads.pending == 1)
    threads.run_next()
    assert await deleting == 1
    assert store._existence.count_prefix(["a", "b"]) == 1
    await store.aclose()


async def test_a_lookup_that_overtakes_a_delete_is_not_believed_after_it(tmp_path: Path) -> None:
    """A lookup that is asked and answered while a delete waits for its thread is forgotten with the object."""
    await fill(tmp_path, "a", "b")
    threads = ManualThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=-1)
    deleting = asyncio.create_task(store.delete(["b"]))
    await until(lambda: threads.pending == 1)
    looking = asyncio.create_task(store.count_prefix(["a", "b"]))
    await until(lambda: threads.pending == 2)
    threads._jobs.rotate()
    threads.run_next()
    assert await looking == 2
    threads.run_next()
    assert await deleting == 1
    assert store._existence.count_prefix(["a", "b"]) == 1
    await store.aclose()


async def test_what_is_no_file_is_not_found(tmp_path: Path) -> None:
    """A directory, a pipe, a link or an empty file under the name of an object is no object to a lookup."""
    await fill(tmp_path, "a", "b", "c", "d", "e")
    files = {path.stem: path for path in files_below(tmp_path, "objects")}
    for path in files.values():
        path.unlink()
    files["a"].mkdir()
    os.mkfifo(files["b"])
    files["c"].symlink_to("elsewhere")
    files["d"].touch()
    store = FileStore(tmp_path)
    assert [await store.count_prefix([key]) for key in "abcde"] == [0] * 5
    assert await store.stat("abcde") == [None] * 5
    await store.aclose()


async def test_a_scan_of_what_cannot_be_listed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the directory is not to be used the scan is one job, and lookups say that nothing is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = CountingThreads()
    store = FileStore(threads=threads)
    Path(store.root).mkdir(mode=0o755)
    for _ in range(3):
        assert await store.count_prefix(keys_of(DIGEST, 2)) == 0
    await until(lambda: not store._opened or not store._opened._live)
    assert threads.num_jobs == 4
    await store.aclose()
    threads.shutdown()


async def test_a_store_closed_between_two_slices_starts_no_other(tmp_path: Path) -> None:
    """A slice whose end is heard of after the close is the last one, without complaint."""
    await fill(tmp_path, *keys_of(DIGEST, 100))
    threads = ManualThreads()
    store = FileStore(tmp_path, threads=threads)
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    looking = asyncio.create_task(store.count_prefix([f"absent_{DIGEST}_m"]))
    await until(lambda: threads.pending == 2)
    threads.run_all()
    lanes = store._opened
    assert lanes is not None
    lanes._collect()
    await store.aclose()
    await asyncio.wait([looking])
    for _ in range(20):
        await asyncio.sleep(0)
    assert threads.pending == 0
    assert complaints == []
