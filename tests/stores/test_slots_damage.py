"""Damaged, torn and replaced slots: a counted miss and a free slot each, never wrong bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from hicache_async.stores._slots.segment import BLOCK, RECORD_NBYTES, Segment
from hicache_async.stores._slots.store import SlotStore
from hicache_async.types import Stop, StopToken
from tests.stores.pages import PAGE_NBYTES, page_of, read, write
from tests.stores.slot_programs import KINDS, NUM_SLOTS, check_accounts, index_of, open_slots

pytestmark = pytest.mark.every_loop


@pytest_asyncio.fixture(params=KINDS)
async def slots(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SlotStore]:
    """A store of each kind that holds "a", "b" and "c"."""
    store = open_slots(request.param, tmp_path)
    assert await write(store, "a", "b", "c") == 3
    yield store
    await store.aclose()


def flip(store: SlotStore, offset: int) -> None:
    """Damage one byte of the segment's file."""
    fd = os.open(store.path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ 0x10]), offset)
    os.close(fd)


def offset_of(store: SlotStore, key: str, part: str) -> int:
    """Return the offset of the word, the record or the payload of ``key``."""
    index = index_of(store)
    geometry, slot = index._table._segment.geometry, index.slots[key]
    return {
        "word": geometry.words_at + 8 * slot,
        "record": geometry.records_at + RECORD_NBYTES * slot,
        "payload": geometry.slots_at + geometry.slot_nbytes * slot,
    }[part]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("part", "at", "fault"),
    [
        ("payload", 0, "checksum"),
        ("payload", PAGE_NBYTES - 1, "checksum"),
        ("record", 3, "entry"),
        ("record", 20, "entry"),
        ("record", 70, "entry"),
        ("record", RECORD_NBYTES - 1, "entry"),
        ("word", 2, "entry"),
    ],
)
async def test_a_damaged_object_is_a_miss_and_a_free_slot(
    slots: SlotStore, part: str, at: int, fault: str
) -> None:
    """A flipped bit of payload, record or word ends the read there, once; its key can be written again."""
    flip(slots, offset_of(slots, "b", part) + at)
    stop = StopToken()
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    assert await slots.read(["a", "b", "c"], into, stop) == 1
    assert stop.reason is Stop.CORRUPT
    assert slots.stats == {fault: 1, "damaged": 1}
    assert await slots.count_prefix(["b"]) == 0
    assert await slots.count_prefix(["a", "c"]) == 2
    assert await write(slots, "a", "b", "c") == 3
    assert await read(slots, "a", "b", "c") == 3
    await check_accounts(slots)
    assert slots.stats == {fault: 1, "damaged": 1}


@pytest.mark.asyncio
async def test_any_damaged_byte_of_a_long_key_is_a_miss(slots: SlotStore) -> None:
    """Of a key that lies behind its payload no byte can change unseen: nothing is found under the other key."""
    key = "long" * 120
    assert await write(slots, key) == 1
    index = index_of(slots)
    key_at = offset_of(slots, key, "payload") + PAGE_NBYTES
    for at in range(len(key)):
        other = key[:at] + chr(ord(key[at]) ^ 0x10) + key[at + 1 :]
        flip(slots, key_at + at)
        assert await read(slots, key) == 0
        index.rebuild()
        assert await slots.count_prefix([other]) == await slots.count_prefix([key]) == 0
        assert await slots.read([other], [memoryview(bytearray(PAGE_NBYTES))], StopToken()) == 0
        flip(slots, key_at + at)
        index.rebuild()
    assert await read(slots, key) == 1
    flip(slots, key_at)
    later = open_slots("shm" if type(slots).__name__ == "ShmStore" else "mmap", Path(slots.path).parent)
    assert sorted(await later.list_keys()) == ["a", "b", "c"]
    assert later.stats == {"damaged": 1}
    await later.aclose()


@pytest.mark.asyncio
async def test_payloads_that_were_swapped_are_misses(slots: SlotStore) -> None:
    """An intact payload in the slot of another key is not taken for that key's."""
    index = index_of(slots)
    segment = index._table._segment
    pages = [memoryview(bytearray(PAGE_NBYTES)) for _ in "ab"]
    for key, page in zip("ab", pages, strict=True):
        segment.get(index.slots[key], page)
    for key, page in zip("ba", pages, strict=True):
        segment.put(index.slots[key], page)
    assert await read(slots, "a") == 0
    assert await read(slots, "b") == 0
    assert await read(slots, "c") == 1
    assert slots.stats == {"checksum": 2, "damaged": 2}


@pytest.mark.asyncio
async def test_records_that_were_swapped_are_misses(slots: SlotStore) -> None:
    """An intact record beside the word of another slot is not believed."""
    a, b = (offset_of(slots, key, "record") for key in "ab")
    fd = os.open(slots.path, os.O_RDWR)
    record_a, record_b = (os.pread(fd, RECORD_NBYTES, offset) for offset in (a, b))
    os.pwrite(fd, record_a, b)
    os.pwrite(fd, record_b, a)
    os.close(fd)
    index_of(slots)._table.words[index_of(slots).slots["a"]] ^= 1 << 40  # written by two changes, as if
    for key in "ab":
        count = await read(slots, key)  # checks its bytes
        assert count == 0 or key == "b"


@pytest.mark.asyncio
async def test_a_damaged_state_is_a_free_slot(slots: SlotStore) -> None:
    """A slot in a state that is none is found by a sweep, and its neighbours are not harmed."""
    table = index_of(slots)._table
    table.words[index_of(slots).slots["b"]] |= 3
    assert await slots.sweep() == {"abandoned": 0, "damaged": 1}
    assert sorted(await slots.list_keys()) == ["a", "c"]
    await check_accounts(slots)


def during(monkeypatch: pytest.MonkeyPatch, act: Callable[[Segment, int], object]) -> None:
    """Call ``act`` once with the slot that is being read, before its bytes are copied."""
    get = Segment.get

    def interrupted(segment: Segment, slot: int, into: memoryview, at: int = 0) -> None:
        monkeypatch.setattr(Segment, "get", get)
        act(segment, slot)
        get(segment, slot, into, at)

    monkeypatch.setattr(Segment, "get", interrupted)


@pytest.mark.asyncio
async def test_a_slot_replaced_while_it_is_read_is_a_miss(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is overtaken by a writer that needs the slot is short, and the new object stays."""
    loop = asyncio.get_running_loop()
    others = [f"other{number}" for number in range(NUM_SLOTS)]

    def replace(segment: Segment, slot: int) -> None:
        assert asyncio.run_coroutine_threadsafe(slots.delete(["b"]), loop).result(30) == 1
        assert asyncio.run_coroutine_threadsafe(write(slots, *others), loop).result(30) == NUM_SLOTS

    during(monkeypatch, replace)
    stop = StopToken()
    assert await slots.read(["b"], [memoryview(bytearray(PAGE_NBYTES))], stop) == 0
    assert stop.reason is Stop.VANISHED
    assert slots.stats == {"replaced": 1, "evicted": 2}
    assert await read(slots, *others) == NUM_SLOTS
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_a_stopped_read_ends_after_the_page_in_hand(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop between pages leaves the pages behind it untouched."""
    stop = StopToken()
    during(monkeypatch, lambda segment, slot: stop.stop())
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    assert await slots.read(["a", "b", "c"], into, stop) == 1
    assert into[0] == page_of("a")
    assert not any(into[1])
    assert not stop.busy


@pytest.mark.asyncio
async def test_a_writer_thought_dead_does_not_publish(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose slot was taken meanwhile does not count, those before it do, and the taker keeps it."""
    put = Segment.put
    others = [f"other{number}" for number in range(NUM_SLOTS - 5)]

    def take(segment: Segment, slot: int, payload: memoryview, at: int = 0) -> None:
        put(segment, slot, payload, at)
        if payload != page_of("e"):
            return
        monkeypatch.setattr(Segment, "put", put)
        engine = slots._slots
        assert engine is not None
        with engine._changing() as changes:
            engine._free(changes, slot)
        pages = [(key, memoryview(page_of(key))) for key in others]
        assert engine.write(pages, others, lambda: False).num_pages == len(others)

    monkeypatch.setattr(Segment, "put", take)
    assert await write(slots, "d", "e", "f") == 1
    assert await read(slots, "d") == 1
    assert await slots.count_prefix(["e"]) == 0
    assert await read(slots, *others) == len(others)
    assert await read(slots, "a", "b", "c") == 3
    assert slots.stats == {"taken": 1}
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_a_medium_that_fails_is_a_miss(slots: SlotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error of a read is a miss that frees nothing; of a write it ends the write, or is raised at once."""

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Segment, "get", broken)
    stop = StopToken()
    assert await slots.read(["a"], [memoryview(bytearray(PAGE_NBYTES))], stop) == 0
    assert stop.reason is Stop.STORE_FAULT
    monkeypatch.undo()
    assert await read(slots, "a", "b", "c") == 3
    put = Segment.put

    def breaks(segment: Segment, slot: int, payload: memoryview, at: int = 0) -> None:
        if payload == page_of("e"):
            broken()
        put(segment, slot, payload, at)

    monkeypatch.setattr(Segment, "put", breaks)
    assert await write(slots, "d", "e", "f") == 1
    with pytest.raises(Exception, match="Input/output error"):
        await write(slots, "e", "f")
    assert sorted(await slots.list_keys()) == ["a", "b", "c", "d"]
    assert slots.stats == {"unreadable": 2}
    await check_accounts(slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [0, 1, (1 << 64) - 1, (1 << 63) + 5])
async def test_a_damaged_count_of_changes_hides_nothing(slots: SlotStore, count: int) -> None:
    """Whatever the count says, a store that opens finds every object, and what is written later too."""
    fd = os.open(slots.path, os.O_RDWR)
    os.pwrite(fd, count.to_bytes(8, "little"), BLOCK)
    os.close(fd)
    kind = "shm" if type(slots).__name__ == "ShmStore" else "mmap"
    later = open_slots(kind, Path(slots.path).parent)
    assert await read(later, "a", "b", "c") == 3
    assert await write(later, "d") == 1
    assert await read(slots, "a", "b", "c", "d") == 4
    assert await write(slots, "e") == 1
    assert await read(later, "d", "e") == 2
    for store in (slots, later):
        await check_accounts(store)
    await later.aclose()
