"""MmapStore and its file: paths and URLs, restarts, and any damage that a file can suffer."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores._slots.segment import check_segment, open_segment
from hicache_async.stores._slots.slots import Slots
from hicache_async.stores.mmap import MmapStore
from hicache_async.types import StopToken
from tests.stores.pages import page_of, read, write
from tests.stores.slot_programs import MAX_BYTES, check_accounts, finish, index_of, open_slots, start

NUM_KEYS = 30
KEYS = [f"key{number}" for number in range(NUM_KEYS - 1)] + ["long" * 200]
PAGE_NBYTES = 3000


@pytest.mark.asyncio
async def test_a_file_by_url(tmp_path: Path) -> None:
    """All but threads can be said in the URL, with units; the file is found again without a shape."""
    path = tmp_path / "a b" / "kv"
    path.parent.mkdir()
    url = f"mmap://{tmp_path}/a%20b/kv"
    store = MmapStore.from_url(f"{url}?max_bytes=1MB&slot_bytes=8KiB&mode=0o660&num_lanes=1")
    assert store.path == str(path)
    assert await write(store, "a", nbytes=8192) == 1
    assert path.stat().st_mode & 0o777 == 0o660
    assert 990_000 < path.stat().st_size <= 1_000_000
    await store.aclose()
    later = MmapStore.from_url(url)
    assert await read(later, "a", nbytes=8192) == 1
    await later.aclose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mmap:relative/path?max_bytes=1MB&slot_bytes=4096", "write mmap:///absolute/path"),
        ("mmap:?max_bytes=1MB", "write mmap:///absolute/path"),
        ("mmap://host/path", "names a host"),
        ("mmap:///x?directory=/y", "'directory' is not an option"),
    ],
)
def test_urls_that_cannot_work(url: str, message: str) -> None:
    """A wrong URL says what is wrong with it."""
    with pytest.raises(ConfigError, match=message):
        MmapStore.from_url(url)


@pytest.mark.asyncio
async def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    """A path that is a symbolic link is the file that it leads to."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    store = MmapStore(tmp_path / "link", max_bytes=MAX_BYTES, slot_bytes=4096)
    await write(store, "a")
    assert (tmp_path / "file").stat().st_size > 0
    await store.aclose()


WRITER = """
async def main():
    store = open_slots(kind, directory)
    keys = [f"key{turn}" for turn in range(40)]
    assert await write(store, *keys, nbytes=8192) == 40
    await store.aclose()

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_another_process_finds_everything_after_a_restart(tmp_path: Path) -> None:
    """What one process wrote the next one has, all of it."""
    finish(start(WRITER, "mmap", tmp_path))
    store = open_slots("mmap", tmp_path, max_bytes=None, slot_bytes=None)
    keys = [f"key{number}" for number in range(40)]
    assert await store.count_prefix(keys) == 40
    assert await read(store, *keys, nbytes=8192) == 40
    assert not store.stats
    await store.aclose()


@pytest.mark.asyncio
async def test_a_file_cut_while_it_is_open_is_a_miss(tmp_path: Path) -> None:
    """Slots that are cut off are misses and not the end of the process; those that are left are read."""
    store = open_slots("mmap", tmp_path)
    await write(store, *KEYS, nbytes=PAGE_NBYTES)
    index = index_of(store)
    geometry = index._table._segment.geometry
    by_slot = sorted(KEYS[:-1], key=index.slots.__getitem__)
    os.truncate(store.path, geometry.slots_at + (index.slots[by_slot[-1]]) * geometry.slot_nbytes + 100)
    assert await read(store, by_slot[0], nbytes=PAGE_NBYTES) == 1
    assert await read(store, by_slot[-1], nbytes=PAGE_NBYTES) == 0
    assert store.stats["unreadable"] == 1
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [0, 4096, 8192 + 100])
async def test_a_table_cut_while_it_is_open_is_a_fault(tmp_path: Path, nbytes: int) -> None:
    """Every call is refused and says how large the file is, and the process lives."""
    store = open_slots("mmap", tmp_path)
    await write(store, "a", "b")
    os.truncate(store.path, nbytes)
    calls = [
        lambda: store.count_prefix(["a"]),
        lambda: read(store, "a"),
        lambda: write(store, "c"),
        lambda: store.delete(["a"]),
        lambda: store.stat(["a"]),
        store.list_keys,
        store.list_namespaces,
        store.sweep,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=f"was cut to {nbytes} bytes"):
            await call()
    await store.aclose()


# -- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file that holds all keys."""
    directory = tmp_path_factory.mktemp("whole")
    store = open_slots("mmap", directory)
    slots = Slots(open_segment(store._wanted), Counter())
    pages = [(key, memoryview(page_of(key, PAGE_NBYTES))) for key in KEYS]
    assert slots.write(pages, KEYS, lambda: False).num_pages == NUM_KEYS
    return Path(store.path).read_bytes()


def damage(data: bytes, dice: random.Random) -> bytes:
    """Return the file as some crash or hand may have left it."""
    harmed = bytearray(data)
    table_end = 8192 + 2 * 4096 + 5 * 4096
    for _ in range(dice.choice([1, 1, 2, 5, 50])):
        part = dice.choice([(0, 48), (4096, 4112), (8192, 8192 + 320), (8192, table_end), (0, len(data))])
        at = dice.randrange(*part)
        kind = dice.randrange(6)
        if kind < 2:
            harmed[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            harmed[at : at + 8] = dice.randbytes(8)
        elif kind == 3:  # an old block, as if it had not been written back
            block = at // 4096 * 4096
            harmed[block : block + 4096] = bytes(4096)
        elif kind == 4:
            source = dice.randrange(len(data) - 512) // 512 * 512
            harmed[at // 512 * 512 :][:512] = data[source : source + 512]
        else:
            length = dice.choice([1, 8, 512, 4096])
            harmed[at : at + length] = data[at : at + length][::-1]
    del harmed[len(data) :]
    length = dice.choice([len(data)] * 6 + [dice.randrange(len(data)), len(data) + dice.randrange(20_000)])
    return bytes(harmed[:length]).ljust(length, b"x") if length > len(data) else bytes(harmed[:length])


def opened(path: Path, data: bytes) -> MmapStore | None:
    """Open a damaged file; None where it is refused, with what to do."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    try:
        return MmapStore(path)
    except ConfigError as error:
        assert str(path) in str(error)
        assert "remove" in str(error) or "must be given" in str(error)
        return None


@pytest.mark.asyncio
async def test_damaged_files(tmp_path: Path, whole: bytes) -> None:
    """Whatever is flipped, cut, extended, zeroed or moved: no wrong byte, no error, and no slot is lost."""
    dice = random.Random(17)
    num_opened = num_right = num_missed = 0
    for _ in range(300):
        store = opened(tmp_path / "kv", damage(whole, dice))
        if store is None:
            continue
        num_opened += 1
        num_found = await store.count_prefix(KEYS)
        assert 0 <= num_found <= NUM_KEYS
        for key in KEYS:
            num_right += await read(store, key, nbytes=PAGE_NBYTES)  # checks its bytes
        assert await write(store, *KEYS, nbytes=PAGE_NBYTES) == NUM_KEYS
        num_missed += NUM_KEYS - await read(store, *KEYS, nbytes=PAGE_NBYTES)
        await check_accounts(store)
        await store.aclose()
    assert num_opened > 100
    assert num_right > 10 * num_opened
    assert num_missed == 0


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_many_damaged_files(tmp_path: Path, whole: bytes) -> None:
    """Ten thousand times: no wrong byte, no error, and what is written again is there."""
    dice = random.Random(18)
    path = tmp_path / "kv"
    into = memoryview(bytearray(PAGE_NBYTES))
    pages = {key: page_of(key, PAGE_NBYTES) for key in KEYS}
    batch = [(key, memoryview(page)) for key, page in pages.items()]
    num_opened = 0
    for _ in range(10_000):
        store = opened(path, damage(whole, dice))
        if store is None:
            continue
        check_segment(store._wanted)
        slots = Slots(open_segment(store._wanted), Counter())
        for key, page in pages.items():
            assert slots.read(key, into) is not None or into == page
        assert slots.write(batch, KEYS, lambda: False).num_pages == NUM_KEYS
        for key, page in pages.items():
            assert slots.read(key, into) is None
            assert into == page
        num_opened += 1
    assert num_opened > 3000


@pytest.mark.asyncio
async def test_damage_under_an_open_store(tmp_path: Path, whole: bytes) -> None:
    """A table and payloads that change under a store cost objects, never a wrong byte or an error."""
    dice = random.Random(19)
    path = tmp_path / "kv"
    path.write_bytes(whole)
    store = MmapStore(path)
    for _ in range(150):
        assert await store.count_prefix(KEYS) <= NUM_KEYS
        harmed = bytearray(whole)
        for _ in range(3):
            harmed[dice.randrange(8192, len(whole))] ^= 1 << dice.randrange(8)
            harmed[dice.randrange(4096, 4104)] ^= 1 << dice.randrange(8)
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(harmed[4096:])
        for key in dice.sample(KEYS, 10):
            into = memoryview(bytearray(PAGE_NBYTES))
            if await store.read([key], [into], StopToken()):
                assert into == page_of(key, PAGE_NBYTES)
        keys = dice.sample(KEYS, 10)
        assert await write(store, *keys, nbytes=PAGE_NBYTES) <= 10
    await store.sweep()
    for key in KEYS:
        await read(store, key, nbytes=PAGE_NBYTES)  # finds what is damaged: a write touches what looks whole
    assert await write(store, *KEYS, nbytes=PAGE_NBYTES) == NUM_KEYS
    assert await read(store, *KEYS, nbytes=PAGE_NBYTES) == NUM_KEYS
    await check_accounts(store)
    await store.aclose()
