"""FileStore with limits: they hold at any moment, whatever fails, and what is evicted is forgotten."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from hicache_async.stores._files import directory as _directory
from hicache_async.testing.manual import ManualClock
from tests.stores.capacity import OBJECT_NBYTES, Sampler, Shelf, finish, opened, run_on_small_disk, start
from tests.stores.pages import files_below, read, write

pytestmark = pytest.mark.asyncio

PAGE = OBJECT_NBYTES - 4096
LIMIT = 10 * OBJECT_NBYTES
KEYS = [f"key{number}" for number in range(100)]

Open = Callable[..., FileStore]


@pytest_asyncio.fixture
async def open_store(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens stores with room for ten objects on one directory, and closes them."""
    stores: list[FileStore] = []

    def open_store(**options: Any) -> FileStore:
        stores.append(FileStore(tmp_path, num_lanes=2, **{"max_bytes": LIMIT} | options))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.aclose()


def check_books(shelf: Shelf) -> None:
    """Check, while a store is open, that the books are what lies on the disk."""
    quota = shelf.quota(10)
    with opened(quota):
        assert sum(quota.usage()) == shelf.nbytes()


@pytest.mark.parametrize("durability", ["none", "batch", "each"])
async def test_a_hundred_objects_through_room_for_ten(
    open_store: Open, tmp_path: Path, durability: str
) -> None:
    """No sample sees more than 10 objects, files under construction included; those that are read stay."""
    clock, dice, shelf = ManualClock(), random.Random(5), Shelf(tmp_path)
    store = open_store(durability=durability, monotonic=clock.monotonic)
    loved = KEYS[:3]
    assert await write(store, *loved, nbytes=PAGE) == 3
    with Sampler(shelf) as sampler:
        for key in KEYS[3:]:
            clock.advance(_directory.TOUCH_PERIOD_S)
            assert await read(store, *loved, nbytes=PAGE) == 3
            assert await write(store, key, nbytes=PAGE) == 1
            assert await read(store, dice.choice(KEYS), nbytes=PAGE) in (0, 1)
    assert sampler.num_samples > 10
    assert 8 * OBJECT_NBYTES < sampler.most_nbytes <= LIMIT
    assert await read(store, *loved, nbytes=PAGE) == 3
    assert set(store.stats) == {"missing"}
    check_books(shelf)


@pytest.mark.parametrize(
    ("durability", "unnamed_temp"),
    [("none", False), ("batch", False), ("each", False), ("none", True), ("each", True)],
)
async def test_a_call_larger_than_the_limit(
    open_store: Open, tmp_path: Path, durability: str, unnamed_temp: bool
) -> None:
    """A call of more pages than fit exceeds nothing, and what it counts is stored: none makes room for a later one."""
    store = open_store(durability=durability, unnamed_temp=unnamed_temp)
    shelf = Shelf(tmp_path)
    with Sampler(shelf) as sampler:
        count = await write(store, *KEYS, nbytes=PAGE)
    assert count == 10
    assert sampler.most_nbytes <= LIMIT
    assert sorted(shelf.keys(*KEYS)) == sorted(KEYS[:10])
    assert await write(store, *KEYS[50:], nbytes=PAGE) == 10  # another call may have their place at once
    assert files_below(tmp_path, "temp") == []
    check_books(shelf)


async def test_an_oversize_object_stops_nothing(open_store: Open, tmp_path: Path) -> None:
    """A page larger than the limit is not stored, is counted and logged once, and costs no other its place."""
    store = open_store()
    assert await write(store, *KEYS[:9], nbytes=PAGE) == 9
    with capture_logs() as logs:
        for _ in range(3):
            assert await write(store, "huge", nbytes=LIMIT) == 0
    assert await write(store, "small", nbytes=PAGE) == 1
    assert await read(store, *KEYS[:9], nbytes=PAGE) == 9
    assert store.stats == {"full": 3}
    assert [line["event"] for line in logs] == ["store.full"]
    check_books(Shelf(tmp_path))


async def test_what_is_on_disk_counts_after_a_restart(open_store: Open, tmp_path: Path) -> None:
    """With 8 of 10 stored, 5 more after a restart leave at most 10, the oldest went, foreign files stay."""
    first, shelf = open_store(), Shelf(tmp_path)
    await write(first, *KEYS[:8], nbytes=PAGE)
    await first.aclose()
    for number, key in enumerate(KEYS[:8]):
        os.utime(shelf.path(key), (1e9 - number, 1e9 - number))
    foreign = shelf.path(KEYS[0]).with_name("notes.txt")
    foreign.write_bytes(bytes(2 * LIMIT))
    again = open_store(low_water=1.0)
    with Sampler(shelf) as sampler:
        assert await write(again, *KEYS[8:13], nbytes=PAGE) == 5
    assert sampler.most_nbytes <= LIMIT + 2 * LIMIT
    assert shelf.keys(*KEYS) == [*KEYS[:5], *KEYS[8:13]]
    assert foreign.stat().st_size == 2 * LIMIT
    await again.delete(KEYS)
    assert foreign.exists()


async def test_a_lowered_limit_is_announced_and_kept(open_store: Open, tmp_path: Path) -> None:
    """Opening under a lower limit logs what goes, in figures, and removes that; before the first write, too."""
    await write(open_store(), *KEYS[:10], nbytes=PAGE)
    lower = open_store(max_bytes=LIMIT // 2, low_water=0.8)
    with capture_logs() as logs:
        assert (await lower.sweep())["evicted_bytes"] == 0  # behind the trim, as both look at everything
    assert Shelf(tmp_path).nbytes() == 4 * OBJECT_NBYTES
    assert [line["event"] for line in logs] == ["store.trimming"]
    assert (logs[0]["old_bytes"], logs[0]["new_bytes"]) == (LIMIT, 4 * OBJECT_NBYTES)
    assert (logs[0]["old_objects"], logs[0]["new_objects"]) == (10, 4)
    lowest = open_store(max_bytes=2 * OBJECT_NBYTES)
    with capture_logs() as logs:
        assert await write(lowest, "new", nbytes=PAGE) == 1
    assert [line["event"] for line in logs] == ["store.trimming"]
    assert Shelf(tmp_path).nbytes() <= 2 * OBJECT_NBYTES


async def test_evicted_objects_are_forgotten(open_store: Open, tmp_path: Path) -> None:
    """A lookup stops believing in an object as soon as this store has evicted it."""
    store, shelf = open_store(existence_ttl_s=-1), Shelf(tmp_path)
    await write(store, *KEYS[:10], nbytes=PAGE)
    os.utime(shelf.path(KEYS[4]), (1, 1))
    assert await store.count_prefix(KEYS[:10]) == 10
    assert await write(store, "new", nbytes=PAGE) == 1
    assert await store.count_prefix(KEYS[:10]) == 4


async def test_damaged_and_deleted_objects_are_room(open_store: Open, tmp_path: Path) -> None:
    """What is removed by a read or a delete can be written again without evicting anything."""
    store, shelf = open_store(), Shelf(tmp_path)
    await write(store, *KEYS[:10], nbytes=PAGE)
    path = shelf.path(KEYS[3])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert await read(store, KEYS[3], nbytes=PAGE) == 0
    check_books(shelf)
    assert await store.delete(KEYS[5:7]) == 2
    check_books(shelf)
    assert await write(store, KEYS[3], *KEYS[5:7], nbytes=PAGE) == 3
    assert await read(store, *KEYS[:10], nbytes=PAGE) == 10
    check_books(shelf)


async def test_a_present_key_takes_no_room(open_store: Open, tmp_path: Path) -> None:
    """Writing what is there evicts nothing, however full the directory is."""
    store, shelf = open_store(), Shelf(tmp_path)
    await write(store, *KEYS[:10], nbytes=PAGE)
    for _ in range(3):
        assert await write(store, *KEYS[:10], nbytes=PAGE) == 10
    assert shelf.keys(*KEYS) == KEYS[:10]
    check_books(shelf)


async def test_an_object_of_another_size_is_replaced_in_the_books_too(
    open_store: Open, tmp_path: Path
) -> None:
    """Where a key's object has another size, the old one's room is given back."""
    store, shelf = open_store(), Shelf(tmp_path)
    await write(store, *KEYS[:3], nbytes=PAGE)
    assert await write(store, KEYS[1], nbytes=5 * PAGE) == 1
    assert shelf.nbytes() == 2 * OBJECT_NBYTES + 6 * 4096
    check_books(shelf)


# -- faults


async def test_an_undeletable_object_stops_nothing(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the oldest cannot be removed others go; where none can, writes end, and work again later."""
    clock, shelf = ManualClock(), Shelf(tmp_path)
    store = open_store(monotonic=clock.monotonic)
    await write(store, *KEYS[:10], nbytes=PAGE)
    os.utime(shelf.path(KEYS[0]), (1, 1))
    unlink = os.unlink

    def refuse(part: str) -> Callable[[str], None]:
        def refusing_unlink(path: str) -> None:
            if part in path:
                raise PermissionError(1, "Operation not permitted", path)
            unlink(path)

        return refusing_unlink

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse("/key0.kv"))
        for first in range(10, 30, 5):
            assert await write(store, *KEYS[first : first + 5], nbytes=PAGE) == 5
        assert shelf.keys(KEYS[0]) == KEYS[:1]
        patch.setattr(os, "unlink", refuse("/objects/"))
        count = await write(store, *KEYS[30:60], nbytes=PAGE)
        assert count < 2
        assert await write(store, "new", nbytes=PAGE) == 0
    clock.advance(60)
    assert await write(store, "new", nbytes=PAGE) == 1
    assert shelf.nbytes() <= LIMIT
    check_books(shelf)


@pytest.mark.parametrize("name", ["writev", "open", "link", "fdatasync", "fsync"])
@pytest.mark.parametrize("durability", ["none", "batch", "each"])
async def test_an_io_error_anywhere_leaves_the_books_right(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, durability: str
) -> None:
    """Whichever call of a write fails with EIO, whenever it does: no room is lost, no file is left."""
    store, shelf = open_store(durability=durability), Shelf(tmp_path)
    await write(store, *KEYS[:5], nbytes=PAGE)
    real, num_calls = getattr(os, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        is_ledger = name == "open" and str(args[0]).endswith("/quota")
        num_calls += not is_ledger
        if num_calls % 3 == 1 and not is_ledger:
            raise OSError(5, "Input/output error")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with Sampler(shelf) as sampler:
            for number in range(5, 30):
                try:
                    await write(store, *KEYS[number : number + 3], nbytes=PAGE)
                except StoreUnavailable as error:
                    assert "Input/output error" in str(error)
    assert sampler.most_nbytes <= LIMIT
    assert files_below(tmp_path, "temp") == []
    check_books(shelf)
    assert await write(store, *KEYS[90:99], nbytes=PAGE) == 9
    assert await read(store, *KEYS[90:99], nbytes=PAGE) == 9


async def test_a_ledger_that_fails_is_a_store_that_fails(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the books cannot be written no object is, reads go on, and afterwards all is well."""
    store, shelf = open_store(), Shelf(tmp_path)
    await write(store, *KEYS[:5], nbytes=PAGE)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="Input/output error"):
                await write(store, "new", nbytes=PAGE)
        assert await read(store, *KEYS[:5], nbytes=PAGE) == 5
    assert await write(store, "new", nbytes=PAGE) == 1
    assert shelf.keys("new") == ["new"]
    check_books(shelf)


async def test_everything_removed_under_a_store_with_limits(open_store: Open, tmp_path: Path) -> None:
    """After somebody removed the whole directory, ledger and all, writes go on within the limit."""
    root = tmp_path / "kv"
    store = FileStore(root, max_bytes=LIMIT, num_lanes=2)
    await write(store, *KEYS[:10], nbytes=PAGE)
    shutil.rmtree(root)
    for first in range(0, 30, 5):
        assert await write(store, *KEYS[first : first + 5], nbytes=PAGE) == 5
    assert 8 * OBJECT_NBYTES < Shelf(root).nbytes() <= LIMIT
    check_books(Shelf(root))
    await store.aclose()


async def test_close_gives_the_place_back(open_store: Open, tmp_path: Path) -> None:
    """A closed store is no member any more, and holds nothing reserved."""
    store, shelf = open_store(), Shelf(tmp_path)
    await write(store, *KEYS[:3], nbytes=PAGE)
    quota = store._directory._writer and store._directory._writer.quota
    assert quota is not None
    assert quota._ledger.joined
    await store.aclose()
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-store-close"):
            thread.join(30)
    assert not quota._ledger.joined
    check = shelf.quota(10)
    with opened(check):
        assert check.trim() == 0
        assert check.usage() == (shelf.nbytes(), 0)


# -- several processes, and small disks

WRITE = """
import asyncio
from hicache_async.stores import FileStore
from tests.stores.pages import read, write

name, seconds, options, sizes = args[0], float(args[1]), eval(args[2]), eval(args[3])

async def main():
    dice, granted, stats = random.Random(name), 0, {}
    store = FileStore(root, num_lanes=2, existence_ttl_s=0, **options)
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = [f"{dice.randrange(200)}" for _ in range(dice.randrange(1, 5))]
        nbytes = dice.choice(sizes)
        granted += await write(store, *(f"{nbytes}-{key}" for key in keys), nbytes=nbytes)
        assert await read(store, f"{nbytes}-{keys[0]}", nbytes=nbytes) in (0, 1)
        if dice.random() < 0.1:
            await store.delete([f"{nbytes}-{keys[-1]}"])
    assert set(store.stats) <= {"missing", "full"}, store.stats
    await store.aclose()
    print(granted)

asyncio.run(main())
"""


@pytest.mark.parametrize("durability", ["none", "batch"])
async def test_three_processes_share_one_limit(tmp_path: Path, durability: str) -> None:
    """While three write, read and delete the same keys no sample exceeds the limit; the books are the disk."""
    write_together(tmp_path, 1.5, durability)


@pytest.mark.stress
@pytest.mark.parametrize("durability", ["none", "batch", "each"])
async def test_three_processes_share_one_limit_for_long(tmp_path: Path, durability: str) -> None:
    """However long three write, read and delete, no sample exceeds the limit, and the books are the disk."""
    write_together(tmp_path, 15, durability)


def write_together(root: Path, seconds: float, durability: str) -> None:
    shelf = Shelf(root)
    limit = 40 * OBJECT_NBYTES
    quota = shelf.quota(max_bytes=limit)
    options = {"max_bytes": limit, "durability": durability}
    writers = [start(WRITE, root, number, seconds, options, [1, 4096, 9000]) for number in range(3)]
    with opened(quota), Sampler(shelf) as sampler:
        assert quota.trim() == 0
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.write("go\n")
            writer.stdin.flush()
        granted = [int(finish(writer)) for writer in writers]
        assert all(each > 20 for each in granted), granted
        assert limit // 2 < sampler.most_nbytes <= limit
        assert quota.usage() == (shelf.nbytes(), 0)


SMALL = """
import asyncio
from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from tests.stores.pages import files_below, read, write

async def main():
    shelf, dice = Shelf(root), random.Random(1)
    free = os.statvfs(root).f_bavail * 4096
    store = FileStore(root, num_lanes=2, existence_ttl_s=0, **eval(args[0]))
    keys = [f"key{number}" for number in range(300)]
    failures, least = 0, free
    for first in range(0, 300, 10):
        try:
            await write(store, *keys[first : first + 10], nbytes=32768)
        except StoreUnavailable as error:
            assert "No space left" in str(error), error
            failures += 1
        least = min(least, os.statvfs(root).f_bavail * 4096)
        assert await read(store, dice.choice(keys), nbytes=32768) in (0, 1)
    assert set(store.stats) <= {"missing"}, store.stats
    assert files_below(root, "temp") == []
    quota = shelf.quota(max_bytes=1 << 40)
    assert sum(quota.usage()) == shelf.nbytes()
    held = await store.list_keys()
    assert await read(store, *held, nbytes=32768) == len(held) > 100
    assert (failures > 0) == eval(args[1]), failures
    assert least >= int(args[2]), least
    assert await store.delete(keys[:50] + held[:5]) >= 5
    assert await write(store, "new", nbytes=32768) == 1
    quota.close()
    await store.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("options", "fails", "min_free"),
    [
        ({"max_bytes": 100 << 20}, True, 0),
        ({"max_bytes": 6 << 20}, False, 1 << 20),
        ({"min_free_bytes": 2 << 20}, False, 2 << 20),
        ({"min_free_bytes": 1 << 20, "max_bytes": 7 << 20, "durability": "batch"}, False, 1 << 20),
    ],
    ids=["beyond the disk", "max_bytes", "min_free_bytes", "both"],
)
async def test_a_small_disk(tmp_path: Path, options: dict[str, object], fails: bool, min_free: int) -> None:
    """With limits that the disk has room for no write fails and the space is kept; without, the books hold."""
    run_on_small_disk(SMALL, tmp_path / "disk", "8m", options, fails, min_free)


async def test_a_lower_limit_trims_at_open(open_store: Open, tmp_path: Path) -> None:
    """A store that is only read comes within its limits all the same, and says so before it deletes."""
    first, shelf = open_store(), Shelf(tmp_path)
    assert await write(first, *KEYS[:10], nbytes=PAGE) == 10
    await first.aclose()
    with capture_logs() as logs:
        second = open_store(max_bytes=LIMIT // 2)
        await second.count_prefix(KEYS[:1])
        await second.sweep()  # behind the trim, as both look at everything
    assert 0 < shelf.nbytes() <= LIMIT // 2
    assert [line["event"] for line in logs] == ["store.trimming"]
    check_books(shelf)


async def test_a_store_without_limits_keeps_the_books_of_others(open_store: Open, tmp_path: Path) -> None:
    """What it writes into a directory with a ledger counts for those who have limits."""
    first, shelf = open_store(), Shelf(tmp_path)
    assert await write(first, *KEYS[:5], nbytes=PAGE) == 5
    second = FileStore(tmp_path, num_lanes=2)
    assert await write(second, *KEYS[10:14], nbytes=PAGE) == 4
    check_books(shelf)
    await second.aclose()


async def test_who_comes_with_limits_is_told_of_the_writes_of_others(
    open_store: Open, tmp_path: Path
) -> None:
    """A store without limits that was there before keeps the books from the moment there are some."""
    old, shelf = FileStore(tmp_path, num_lanes=2), Shelf(tmp_path)
    assert await write(old, *KEYS[:3], nbytes=PAGE) == 3
    new = open_store()
    assert await write(new, *KEYS[3:5], nbytes=PAGE) == 2
    for number in range(10, 40):
        assert await write(old, KEYS[number], nbytes=PAGE) == 1
        assert await write(new, KEYS[number + 50], nbytes=PAGE) == 1
        assert shelf.nbytes() <= LIMIT + OBJECT_NBYTES  # the last one of the one without limits
    check_books(shelf)
    await old.aclose()
