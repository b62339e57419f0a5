"""FileStore on a disk that works: what is written is read, in few hops, by any key."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache_async.abc import SupportsDelete, SupportsListing, SupportsNamespaces, SupportsStat
from hicache_async.errors import ConfigError
from hicache_async.stores import FileStore
from hicache_async.stores._files import object as _object
from hicache_async.testing.manual import ManualClock, ManualThreads
from hicache_async.types import ObjectStat, StopToken
from tests.stores.pages import PAGE_NBYTES, CountingThreads, files_below, page_of, read, write

pytestmark = pytest.mark.every_loop


@pytest.mark.asyncio
async def test_what_was_written_is_read(store: FileStore) -> None:
    """Pages come back as they were, in a store opened later too, and lookups count them."""
    keys = [f"key{number}" for number in range(200)]
    assert await store.count_prefix(keys) == 0
    assert await write(store, *keys) == 200
    later = FileStore(store.root)
    assert await later.count_prefix([*keys, "more"]) == 200
    assert await read(later, *keys, "more") == 200
    assert await store.count_prefix(keys) == 200
    await later.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 3 << 20])
async def test_any_page_size(store: FileStore, nbytes: int) -> None:
    """A page of any size makes the round trip."""
    assert await write(store, "a", "b", nbytes=nbytes) == 2
    assert await read(store, "a", "b", nbytes=nbytes) == 2


@pytest.mark.asyncio
async def test_nothing_asked_is_nothing_done(store: FileStore) -> None:
    """Calls without keys return 0 and leave no trace on disk."""
    assert await store.count_prefix([]) == 0
    assert await store.read([], [], StopToken()) == 0
    assert await store.write([], []) == 0
    assert await store.delete([]) == 0
    assert not os.path.exists(store.root)


@pytest.mark.asyncio
async def test_opening_and_reading_make_no_directory(store: FileStore) -> None:
    """A root that does not exist is an empty store until something is written."""
    assert await store.count_prefix(["a"]) == 0
    assert await read(store, "a") == 0
    assert await store.list_keys() == []
    assert store.stats == {"missing": 1}
    assert not os.path.exists(store.root)


@pytest.mark.asyncio
async def test_counts_end_at_a_hole(store: FileStore) -> None:
    """Lookup and read end before the first absent key, whatever exists behind it."""
    await write(store, "a", "c", "d")
    fresh = FileStore(store.root, existence_ttl_s=0)
    assert await fresh.count_prefix(["a", "b", "c", "d"]) == 1
    assert await read(fresh, "a", "b", "c", "d") == 1
    assert await fresh.count_prefix(["c", "d"]) == 2
    await fresh.aclose()


@pytest.mark.asyncio
async def test_an_object_is_one_file_with_its_payload_at_a_block(store: FileStore) -> None:
    """The file is a head of whole blocks and the payload, which can be mapped as it is."""
    await write(store, "a")
    (path,) = files_below(store.root, "objects")
    data = path.read_bytes()
    assert data[4096:] == page_of("a")
    header = _object.decode_head(data[:4096])
    assert header is not None
    assert (header.version, header.algorithm, header.key, header.nbytes) == (2, 1, b"a", PAGE_NBYTES)


@pytest.mark.asyncio
async def test_a_present_object_is_touched_and_not_rewritten(store: FileStore) -> None:
    """Writing a key again leaves the file as it is and makes it young."""
    await write(store, "a")
    (path,) = files_below(store.root, "objects")
    os.utime(path, (1, 1))
    before = path.stat()
    assert await store.write(["a"], [memoryview(bytes(PAGE_NBYTES))]) == 1
    after = path.stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime > 1e9
    assert await read(store, "a") == 1


@pytest.mark.asyncio
async def test_a_file_of_another_size_is_replaced(store: FileStore) -> None:
    """A truncated object does not count as present: writing its key makes it whole."""
    await write(store, "a")
    (path,) = files_below(store.root, "objects")
    os.truncate(path, 4096 + PAGE_NBYTES - 1)
    assert await write(store, "a") == 1
    assert await read(store, "a") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "keys",
    [
        [
            "",
            ".",
            "..",
            "../x",
            "/x",
            "A",
            "a",
            "a%2fb",
            "a/b",
            "x" * 5000,
            "X" * 5000,
            "\ud800",
            "ключ",
            "a\0b",
        ],
        ["model/Llama-3.1-8B_0_2", "model/llama-3.1-8b_0_2"],
    ],
    ids=["odd", "case"],
)
async def test_any_key_is_kept_apart(store: FileStore, keys: list[str]) -> None:
    """Whatever a key looks like, it is stored, listed and deleted as itself, inside the directory."""
    assert await write(store, *keys) == len(keys)
    assert await read(store, *keys) == len(keys)
    assert sorted(await store.list_keys()) == sorted(keys)
    assert len(files_below(store.root, "objects")) == len(keys)
    assert os.listdir(Path(store.root).parent) == ["kv"]
    assert await store.delete([keys[0], "absent", keys[1]]) == 2
    assert sorted(await store.list_keys()) == sorted(keys[2:])


@pytest.mark.asyncio
async def test_delete_is_seen_by_lookup_and_read(store: FileStore) -> None:
    """A deleted key is absent at once, though it was believed to exist."""
    assert isinstance(store, SupportsDelete)
    assert isinstance(store, SupportsListing)
    await write(store, "a", "b")
    assert await store.count_prefix(["a", "b"]) == 2
    assert await store.delete(["b"]) == 1
    assert await store.count_prefix(["a", "b"]) == 1
    assert await read(store, "a", "b") == 1


@pytest.mark.asyncio
async def test_foreign_files_are_not_listed(store: FileStore) -> None:
    """Only objects under their own names are listed."""
    await write(store, "a")
    (path,) = files_below(store.root, "objects")
    for name in ("notes.txt", "a.tmp", "~0.kv", "B.kv"):
        Path(path.parent, name).write_bytes(path.read_bytes())
    Path(path.parent.parent, "zz").mkdir()
    Path(path.parent.parent, "zz", path.name).write_bytes(path.read_bytes())
    Path(path.parent.parent, "README").write_bytes(b"")
    assert await store.list_keys() == ["a"]


@pytest.mark.asyncio
async def test_stat_tells_size_and_age(store: FileStore) -> None:
    """Payload bytes and time of last use come in one hop, for any key, with None for what is not there."""
    assert isinstance(store, SupportsStat)
    assert await store.stat([]) == []
    assert await store.stat(["a"]) == [None]
    long_key = "k" * 5000
    await write(store, "a")
    await write(store, long_key, nbytes=1)
    for path in files_below(store.root, "objects"):
        os.utime(path, (7, 7))
    assert await store.stat([long_key, "absent", "a"]) == [
        ObjectStat(1, 7.0),
        None,
        ObjectStat(PAGE_NBYTES, 7.0),
    ]


@pytest.mark.asyncio
async def test_namespaces_are_those_of_the_objects(store: FileStore) -> None:
    """Each namespace that has an object is listed, and none that has lost its last one."""
    assert isinstance(store, SupportsNamespaces)
    assert await store.list_namespaces() == []
    first, second = "ukv1-0000000000000001", "ukv1-0000000000000002"
    await write(store, f"manifest_{second}", f"0f_{first}_m_0_1", "plain")
    Path(store.root, "v2", "objects", "ukv1-foreign").mkdir()
    assert await store.list_namespaces() == [first, second]
    assert sorted(await store.list_keys()) == sorted([f"manifest_{second}", f"0f_{first}_m_0_1", "plain"])
    await store.delete([f"0f_{first}_m_0_1"])
    assert await store.list_namespaces() == [second]


# -- existence


@pytest.mark.asyncio
async def test_a_read_that_misses_drops_the_belief(store: FileStore) -> None:
    """After another process removed an object, one read corrects the lookup."""
    await write(store, "a", "b")
    files = {path.name: path for path in files_below(store.root, "objects")}
    files["b.kv"].unlink()
    assert await store.count_prefix(["a", "b"]) == 2
    assert await read(store, "a", "b") == 1
    assert await store.count_prefix(["a", "b"]) == 1


@pytest.mark.asyncio
async def test_beliefs_end_with_their_ttl(tmp_path: Path) -> None:
    """Within existence_ttl_s lookups cost no hop; after it the disk is asked again."""
    clock, threads = ManualClock(), CountingThreads()
    store = FileStore(tmp_path, existence_ttl_s=5, threads=threads, monotonic=clock.monotonic)
    await write(store, "a")
    hops = threads.num_jobs
    clock.advance(4)
    assert await store.count_prefix(["a"]) == 1
    assert threads.num_jobs == hops
    clock.advance(6)
    files_below(store.root, "objects")[0].unlink()
    assert await store.count_prefix(["a"]) == 0
    assert threads.num_jobs == hops + 1
    await store.aclose()
    threads.shutdown()


# -- hops


@pytest.mark.asyncio
async def test_a_long_lookup_is_one_hop(tmp_path: Path) -> None:
    """512 keys are looked up in one thread job, and again in none."""
    threads = CountingThreads()
    store = FileStore(tmp_path, threads=threads, existence_ttl_s=-1)
    keys = [f"key{number}" for number in range(512)]
    await write(store, *keys, nbytes=1)
    store._existence.discard(keys)
    threads.num_jobs = 0
    assert await store.count_prefix(keys) == 512
    assert threads.num_jobs == 1
    assert await store.count_prefix(keys) == 512
    assert threads.num_jobs == 1
    await store.aclose()
    threads.shutdown()


@pytest.mark.asyncio
async def test_small_reads_share_hops(tmp_path: Path) -> None:
    """Ten concurrent reads are fewer jobs than reads, and each gets its own pages."""
    threads = CountingThreads()
    store = FileStore(tmp_path, threads=threads)
    keys = [f"key{number}" for number in range(20)]
    await write(store, *keys)
    threads.num_jobs = 0
    counts = await asyncio.gather(*(read(store, *keys[first : first + 2]) for first in range(0, 20, 2)))
    assert counts == [2] * 10
    assert threads.num_jobs < 10
    await store.aclose()
    threads.shutdown()


@pytest.mark.asyncio
async def test_nothing_touches_the_disk_on_the_loop(tmp_path: Path) -> None:
    """Until a thread runs, no call has opened, made or looked at a file."""
    threads = ManualThreads()
    store = FileStore(tmp_path / "kv", threads=threads)
    writing = asyncio.create_task(write(store, "a"))
    looking = asyncio.create_task(store.count_prefix(["a"]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert threads.pending == 2
    assert not os.path.exists(store.root)
    threads.run_all()
    assert await asyncio.gather(writing, looking) == [1, 1]
    await store.aclose()


@pytest.mark.asyncio
async def test_twenty_writers_of_one_key(store: FileStore) -> None:
    """Concurrent writes of one key all succeed and leave one whole file and nothing else."""
    assert await asyncio.gather(*(write(store, "a", "b") for _ in range(20))) == [2] * 20
    assert len(files_below(store.root, "objects")) == 2
    assert files_below(store.root, "temp") == []
    assert await read(store, "a", "b") == 2


@pytest.mark.asyncio
async def test_a_half_written_object_is_not_there(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its writer is held after half the bytes an object is absent; then it is whole."""
    held, go_on = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    half_written = asyncio.Event()
    writev = os.writev

    def slow_writev(fd: int, buffers: list[memoryview]) -> int:
        if held.is_set():
            return writev(fd, buffers)
        held.set()
        written = writev(fd, [memoryview(buffers[0]), memoryview(buffers[1])[: PAGE_NBYTES // 2]])
        loop.call_soon_threadsafe(half_written.set)
        assert go_on.wait(30)
        return written

    monkeypatch.setattr(os, "writev", slow_writev)
    writing = asyncio.create_task(write(store, "a"))
    await half_written.wait()
    assert await store.count_prefix(["a"]) == 0
    assert await read(store, "a") == 0
    other = FileStore(store.root)
    assert await other.list_keys() == []
    await other.aclose()
    go_on.set()
    assert await writing == 1
    assert await read(store, "a") == 1


@pytest.mark.asyncio
async def test_short_reads_and_writes_are_continued(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call that moves less than it was asked to is not the end of an object."""
    calls = {"preadv": 0, "writev": 0}
    writev, pread = os.writev, os.pread

    def short_writev(fd: int, buffers: list[memoryview]) -> int:
        calls["writev"] += 1
        first = next(view for view in map(memoryview, buffers) if view.nbytes)
        return writev(fd, [first[:700]])

    def short_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls["preadv"] += 1
        first = next(view for view in map(memoryview, buffers) if view.nbytes)
        data = pread(fd, min(700, first.nbytes), offset)
        first[: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "writev", short_writev)
    monkeypatch.setattr(os, "preadv", short_preadv)
    assert await write(store, "a", "b") == 2
    assert await read(store, "a", "b") == 2
    assert calls == {"preadv": 16, "writev": 16}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"root": ""}, "root is empty"),
        ({"num_lanes": 0}, "num_lanes is 0"),
        ({"num_lanes": 1.5}, "num_lanes is 1.5"),
        ({"existence_ttl_s": -2}, "existence_ttl_s is -2"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    """Each option is refused by name and value, with what would be right."""
    with pytest.raises(ConfigError, match=f"{complaint}; give"):
        FileStore(**{"root": "/nowhere", **options})


@pytest.mark.asyncio
async def test_buffers_that_are_no_plain_bytes_are_refused(store: FileStore) -> None:
    """A buffer that a thread could not fill as a row of bytes is refused before any hop."""
    for into in (memoryview(bytes(4)), memoryview(bytearray(8))[::2], memoryview(bytearray(4)).cast("I")):
        with pytest.raises(ConfigError, match="buffer 0 has shape"):
            await store.read(["a"], [into], StopToken())
    with pytest.raises(ConfigError, match="1 keys and 2 buffers"):
        await store.write(["a"], [memoryview(b"1"), memoryview(b"2")])
