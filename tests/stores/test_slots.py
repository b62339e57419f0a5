"""ShmStore and MmapStore, used by one process: what is written is read, the oldest give way, few hops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from hicache_async.abc import (
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsStat,
    SupportsStats,
    SupportsSweep,
)
from hicache_async.stores._slots import slots as _slots
from hicache_async.stores._slots.segment import Segment
from hicache_async.stores._slots.store import SlotStore
from hicache_async.types import Stop, StopToken
from tests.stores.pages import PAGE_NBYTES, CountingThreads, page_of, read, write
from tests.stores.slot_programs import (
    KINDS,
    NUM_SLOTS,
    SLOT_BYTES,
    check_accounts,
    index_of,
    open_slots,
)

pytestmark = pytest.mark.every_loop

NAMESPACES = ("ukv1-0123456789abcdef", "ukv1-fedcba9876543210")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store."""
    return str(request.param)


@pytest_asyncio.fixture
async def slots(kind: str, tmp_path: Path) -> AsyncIterator[SlotStore]:
    """A store of 40 slots that are not made yet."""
    store = open_slots(kind, tmp_path)
    yield store
    await store.aclose()


def names(first: int, last: int) -> list[str]:
    return [f"key{number}" for number in range(first, last)]


# -- the contract


@pytest.mark.asyncio
async def test_what_was_written_is_read(slots: SlotStore, kind: str, tmp_path: Path) -> None:
    """Pages come back as they were, in a store opened later too, and lookups count them."""
    keys = names(0, NUM_SLOTS)
    assert await slots.count_prefix(keys) == 0
    assert await write(slots, *keys) == NUM_SLOTS
    later = open_slots(kind, tmp_path, max_bytes=None, slot_bytes=None)
    assert await later.count_prefix([*keys, "more"]) == NUM_SLOTS
    assert await read(later, *keys, "more") == NUM_SLOTS
    assert await read(slots, *keys) == NUM_SLOTS
    assert await slots.count_prefix(keys) == NUM_SLOTS
    await later.aclose()
    await check_accounts(slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 3 << 20])
async def test_any_page_size(kind: str, tmp_path: Path, nbytes: int) -> None:
    """A page of any size up to a slot's makes the round trip."""
    store = open_slots(kind, tmp_path, max_bytes=3 * nbytes + (1 << 16), slot_bytes=nbytes)
    assert await write(store, "a", "b", nbytes=nbytes) == 2
    assert await read(store, "a", "b", nbytes=nbytes) == 2
    await store.aclose()


@pytest.mark.asyncio
async def test_nothing_asked_is_nothing_done(slots: SlotStore) -> None:
    """Calls without keys return 0 and make no segment."""
    assert await slots.count_prefix([]) == 0
    assert await slots.read([], [], StopToken()) == 0
    assert await slots.write([], []) == 0
    assert await slots.delete([]) == 0
    assert not os.path.exists(slots.path)


@pytest.mark.asyncio
async def test_counts_end_at_a_hole(slots: SlotStore) -> None:
    """Lookup and read end before the first absent key, whatever exists behind it."""
    await write(slots, "a", "c", "d")
    assert await slots.count_prefix(["a", "b", "c", "d"]) == 1
    stop = StopToken()
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    assert await slots.read(["a", "b", "c"], into, stop) == 1
    assert into[0] == page_of("a")
    assert stop.reason is Stop.VANISHED
    assert await slots.count_prefix(["c", "d"]) == 2
    assert slots.stats == {"missing": 1}


@pytest.mark.asyncio
async def test_a_present_object_is_touched_and_not_rewritten(slots: SlotStore) -> None:
    """Writing a key again leaves its bytes as they are and makes it young."""
    await write(slots, "a", "b")
    (before,) = await slots.stat(["a"])
    assert await slots.write(["a"], [memoryview(bytes(PAGE_NBYTES))]) == 1
    (after,) = await slots.stat(["a"])
    assert before and after
    assert after.modified_s > before.modified_s
    assert await read(slots, "a") == 1


@pytest.mark.asyncio
async def test_one_key_twice_in_a_call(slots: SlotStore) -> None:
    """A key that comes twice takes one slot, and both count."""
    assert await write(slots, "a", "a", "b", "a") == 4
    assert sorted(await slots.list_keys()) == ["a", "b"]
    assert await read(slots, "a", "a", "b") == 3
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_an_object_of_another_size_is_replaced(slots: SlotStore) -> None:
    """Read into a buffer of another size it is a miss that stays; written in another size it is new."""
    await write(slots, "a", nbytes=100)
    stop = StopToken()
    assert await slots.read(["a"], [memoryview(bytearray(101))], stop) == 0
    assert stop.reason is Stop.CORRUPT
    assert await read(slots, "a", nbytes=100) == 1
    assert await write(slots, "a", nbytes=101) == 1
    assert await read(slots, "a", nbytes=101) == 1
    assert await slots.list_keys() == ["a"]
    assert slots.stats == {"size": 1}
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_an_object_larger_than_a_slot_stops_nothing_else(slots: SlotStore) -> None:
    """It ends its own write, is logged once, and other writes go on."""
    pages = [
        memoryview(page_of(key, nbytes)) for key, nbytes in (("a", 10), ("b", SLOT_BYTES + 1), ("c", 10))
    ]
    with capture_logs() as logs:
        assert await slots.write(["a", "b", "c"], pages) == 1
        assert await slots.write(["b"], pages[1:2]) == 0
    assert [line["event"] for line in logs] == ["store.unwritable"]
    assert f"{SLOT_BYTES} bytes" in logs[0]["error"]
    assert await write(slots, "whole", nbytes=SLOT_BYTES) == 1
    assert await read(slots, "whole", nbytes=SLOT_BYTES) == 1
    assert slots.stats == {"too_large": 2}
    await check_accounts(slots)


KEYS = [
    "",
    ".",
    "../x",
    "/x",
    "a b",
    "A",
    "a",
    "ä",
    "\x00",
    "\ud800",
    "%61",
    "k" * 448,
    "k" * 449,
    "ü" * 3000,
]


@pytest.mark.asyncio
async def test_any_key(slots: SlotStore, kind: str, tmp_path: Path) -> None:
    """Keys of any letters and length are kept apart, read and listed, by a store opened later too."""
    assert await write(slots, *KEYS) == len(KEYS)
    later = open_slots(kind, tmp_path)
    for store in (slots, later):
        assert await store.count_prefix(KEYS) == len(KEYS)
        assert await read(store, *KEYS) == len(KEYS)
        assert set(await store.list_keys()) == set(KEYS)
    await later.aclose()


@pytest.mark.asyncio
async def test_a_long_key_takes_room_in_its_slot(slots: SlotStore) -> None:
    """Of a key beyond 448 bytes the bytes count as the object's."""
    key = "k" * 1000
    assert await write(slots, key, nbytes=SLOT_BYTES - 999) == 0
    assert await write(slots, key, nbytes=SLOT_BYTES - 1000) == 1
    assert await read(slots, key, nbytes=SLOT_BYTES - 1000) == 1


@pytest.mark.asyncio
async def test_what_else_it_can_do(slots: SlotStore) -> None:
    """Objects are deleted, listed and described, namespaces named, and all of it is said by protocols."""
    for protocol in (
        SupportsDelete, SupportsListing, SupportsStat, SupportsNamespaces, SupportsSweep, SupportsStats,
    ):  # fmt: skip
        assert isinstance(slots, protocol)
    keys = [f"{number:064x}_{namespace}_model_0_1" for number in range(3) for namespace in NAMESPACES]
    await write(slots, *keys, "other")
    assert sorted(await slots.list_keys()) == sorted([*keys, "other"])
    assert await slots.list_namespaces() == list(NAMESPACES)
    known = await slots.stat([keys[0], "absent"])
    assert known[0] is not None
    assert known[0].nbytes == PAGE_NBYTES
    assert known[1] is None
    assert await slots.delete([keys[0], keys[0], "absent", keys[1]]) == 2
    assert await slots.count_prefix(keys) == 0
    assert await slots.count_prefix(keys[2:]) == 4
    assert await slots.sweep() == {"abandoned": 0, "damaged": 0}


# -- room


@pytest.mark.asyncio
async def test_the_least_recently_used_give_way(slots: SlotStore) -> None:
    """When all slots are taken those go that were neither read nor written for longest, and no more."""
    await write(slots, *names(0, NUM_SLOTS))
    await read(slots, "key0", "key1")
    await write(slots, "key2")
    assert await write(slots, *names(100, 110)) == 10
    assert sorted(set(names(0, NUM_SLOTS)) - set(await slots.list_keys())) == sorted(names(3, 13))
    assert slots.stats == {"evicted": 10}
    await read(slots, "key13", "key14")
    await write(slots, "new")
    assert await slots.count_prefix(["key13", "key14", "new", "key16"]) == 4
    assert await slots.count_prefix(["key15"]) == 0
    assert await write(slots, *names(200, 200 + NUM_SLOTS)) == NUM_SLOTS
    assert sorted(await slots.list_keys()) == sorted(names(200, 200 + NUM_SLOTS))
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_a_write_never_takes_its_own_pages_slots(slots: SlotStore) -> None:
    """A write of more than fits ends where only its own pages are left; those that are present stay."""
    await write(slots, "old", *names(0, NUM_SLOTS - 1))
    new = names(100, 120)
    other_bytes = memoryview(bytes(PAGE_NBYTES))
    pages = [*(memoryview(page_of(key)) for key in new), other_bytes]
    assert await slots.write([*new, "old"], pages) == 21
    assert await read(slots, "old") == 1  # as it was written first
    assert await slots.count_prefix(["key19"]) == 0
    assert await slots.count_prefix(names(20, NUM_SLOTS - 1)) == NUM_SLOTS - 21
    many = names(1000, 1000 + 3 * NUM_SLOTS)
    assert await write(slots, *many) == NUM_SLOTS
    assert await read(slots, *many) == NUM_SLOTS
    assert slots.stats["no_room"] == 1
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_manifests_are_never_evicted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages give way to pages and to manifests; manifests stay until they are deleted, however many are oldest."""
    monkeypatch.setattr(_slots, "_MIN_VICTIMS", 2)
    store = open_slots(kind, tmp_path)
    manifests = [f"manifest_ukv1-{number:016x}" for number in range(10)]
    assert await write(store, *manifests, nbytes=4096) == 10
    for turn in range(5):
        assert await write(store, *names(30 * turn, 30 * turn + 30)) == 30
    for page in names(150, 180):
        assert await write(store, page) == 1
    assert await read(store, *manifests, nbytes=4096) == 10
    assert sorted(await store.list_keys()) == sorted([*manifests, *names(150, 180)])
    more = [f"manifest_ukv1-{number:016x}" for number in range(10, NUM_SLOTS + 5)]
    assert await write(store, *more, nbytes=4096) == 30
    assert await write(store, "page") == 0
    assert await store.delete(manifests) == 10
    assert len(index_of(store).manifests) == 30
    assert await write(store, *names(0, 30)) == 10
    assert await read(store, *more[:30], nbytes=4096) == 30
    later = open_slots(kind, tmp_path)
    assert await write(later, *names(30, 40)) == 10
    assert await read(later, *more[:30], nbytes=4096) == 30
    await later.aclose()
    await check_accounts(store)
    await store.aclose()


@pytest.mark.asyncio
async def test_a_write_of_many_batches_never_takes_its_own(kind: str, tmp_path: Path) -> None:
    """Nor do its later batches take the slots of its earlier ones."""
    store = open_slots(kind, tmp_path, slot_bytes=4096, max_bytes=6 * 4096 + 100 * (4096 + 520))
    many = names(0, 200)
    count = await write(store, *many)
    assert count == index_of(store)._table.num_slots
    assert 64 < count < 128
    assert await read(store, *many) == count
    assert store.stats == {"no_room": 1, "missing": 1}
    await store.aclose()


@pytest.mark.asyncio
async def test_stamps_of_the_future_go_first(slots: SlotStore) -> None:
    """A clock that was set back does not keep objects for ever."""
    await write(slots, *names(0, NUM_SLOTS))
    index = index_of(slots)
    index._table._stamps[index.slots["key30"]] = 1 << 63
    await write(slots, "new")
    assert await slots.count_prefix(["key30"]) == 0
    assert await slots.count_prefix(["new", "key0"]) == 2


# -- hops


@pytest.mark.asyncio
async def test_lookups_take_no_hop_while_nobody_else_writes(kind: str, tmp_path: Path) -> None:
    """512 keys are looked up without a hop, and with one after somebody else has changed something."""
    threads = CountingThreads()
    options = {"max_bytes": 600 * 5000, "slot_bytes": 4096}
    store = open_slots(kind, tmp_path, threads=threads, **options)
    other = open_slots(kind, tmp_path, **options)
    keys = names(0, 512)
    await write(store, *keys)
    before = threads.num_jobs
    assert await store.count_prefix(keys) == 512
    assert threads.num_jobs == before
    await other.delete(["key500"])
    assert await store.count_prefix(keys) == 500
    assert threads.num_jobs == before + 1
    assert await store.count_prefix(keys) == 500
    assert threads.num_jobs == before + 1
    for opened in (store, other):
        await opened.aclose()
    threads.shutdown()


@pytest.mark.asyncio
async def test_a_write_takes_the_lock_twice_for_many_pages(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For up to 64 pages it is taken to get slots and to publish; for pages that are present, not at all."""
    await write(slots, "first")
    taken: list[int] = []
    locked = Segment.locked
    monkeypatch.setattr(Segment, "locked", lambda segment: (taken.append(1), locked(segment))[1])
    await write(slots, *names(0, 30))
    assert len(taken) == 2
    await write(slots, *names(0, 30))
    await read(slots, *names(0, 30))
    await slots.count_prefix(names(0, 30))
    assert len(taken) == 2


# -- two stores on one segment


@pytest.mark.asyncio
async def test_two_stores_see_each_other(slots: SlotStore, kind: str, tmp_path: Path) -> None:
    """What one writes, replaces, evicts or deletes the other knows at its next call."""
    other = open_slots(kind, tmp_path)
    await write(slots, "a", "b")
    assert await other.count_prefix(["a", "b"]) == 2
    await other.delete(["a"])
    assert await slots.count_prefix(["a"]) == 0
    assert await read(slots, "a") == 0
    await write(other, "b", nbytes=50)
    assert await read(slots, "b", nbytes=50) == 1
    await write(slots, *names(0, NUM_SLOTS))
    assert await other.count_prefix(["b"]) == 0
    assert await read(other, *names(0, NUM_SLOTS)) == NUM_SLOTS
    for store in (slots, other):
        await check_accounts(store)
    await other.aclose()


@pytest.mark.asyncio
async def test_both_write_one_key_at_once(
    slots: SlotStore, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer of a key counts it as stored when the first was faster, whose slot stays the key's."""
    other = open_slots(kind, tmp_path)
    await write(other, "first")
    put = Segment.put
    loop = asyncio.get_running_loop()

    faster: list[int] = []

    def overtaken(segment: Segment, slot: int, payload: memoryview, at: int = 0) -> None:
        monkeypatch.setattr(Segment, "put", put)
        assert asyncio.run_coroutine_threadsafe(write(other, "a"), loop).result(30) == 1
        faster.append(index_of(other).slots["a"])
        put(segment, slot, payload, at)

    monkeypatch.setattr(Segment, "put", overtaken)
    assert await write(slots, "a", "b") == 2
    assert index_of(slots).slots["a"] == faster[0]
    assert sorted(await slots.list_keys()) == ["a", "b", "first"]
    assert await read(slots, "a", "b") == 2
    await check_accounts(slots)
    await other.aclose()
