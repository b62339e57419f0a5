"""MemoryStore keeps copies, within a bound, without threads."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async.abc import SupportsDelete, SupportsListing, SupportsNamespaces, SupportsStat
from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores import MemoryStore, open_store
from hicache_async.types import ObjectStat, Stop, StopToken

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


def views(*pages: bytes) -> list[memoryview]:
    return [memoryview(bytearray(page)) for page in pages]


async def read_all(store: MemoryStore, keys: list[str], nbytes: int) -> tuple[int, list[bytes]]:
    into = views(*[bytes(nbytes)] * len(keys))
    count = await store.read(keys, into, StopToken())
    return count, [bytes(buffer) for buffer in into[:count]]


async def test_what_was_written_is_read() -> None:
    """A page comes back as it was when written, whatever its buffer holds by now."""
    store = MemoryStore()
    pages = views(b"one1", b"two2")
    assert await store.write(["a", "b"], pages) == 2
    pages[0][:] = b"...."
    assert await store.count_prefix(["a", "b", "c"]) == 2
    assert await read_all(store, ["a", "b", "c"], 4) == (2, [b"one1", b"two2"])


async def test_counts_end_at_the_first_absent_key() -> None:
    """A hole ends the lookup and the read; what lies behind it is not counted and not touched."""
    store = MemoryStore()
    await store.write(["a", "c"], views(b"1", b"3"))
    assert await store.count_prefix(["a", "b", "c"]) == 1
    into = views(b".", b".", b".")
    stop = StopToken()
    assert await store.read(["a", "b", "c"], into, stop) == 1
    assert stop.reason is Stop.VANISHED
    assert b"".join(into) == b"1.."


async def test_a_present_key_is_not_rewritten() -> None:
    """Writing a key again keeps the first bytes and counts as stored."""
    store = MemoryStore()
    await store.write(["a"], views(b"1"))
    assert await store.write(["a"], views(b"2")) == 1
    assert await read_all(store, ["a"], 1) == (1, [b"1"])


async def test_another_length_is_a_miss() -> None:
    """An object that does not fill the buffer exactly is not there for it."""
    store = MemoryStore()
    await store.write(["a"], views(b"1234"))
    assert await read_all(store, ["a"], 3) == (0, [])
    assert await read_all(store, ["a"], 5) == (0, [])


async def test_the_least_recently_used_goes_first() -> None:
    """Reads and repeated writes make an object young; the bound holds after every write."""
    store = MemoryStore(max_bytes=3)
    await store.write(list("abc"), views(b"1", b"2", b"3"))
    await read_all(store, ["a"], 1)
    await store.write(["b"], views(b"2"))
    await store.write(["d"], views(b"4"))
    assert sorted(await store.list_keys()) == ["a", "b", "d"]
    assert store.nbytes == 3


async def test_a_write_never_evicts_its_own_pages() -> None:
    """A write larger than the store keeps its beginning, which is the part that can be matched."""
    store = MemoryStore(max_bytes=2)
    await store.write(["old"], views(b"0"))
    assert await store.write(list("abc"), views(b"1", b"2", b"3")) == 2
    assert await store.list_keys() == ("a", "b")
    assert await store.write(["big"], views(b"123")) == 0
    assert store.nbytes == 2


async def test_a_stopped_read_ends_between_pages() -> None:
    """A token that is stopped ends the read before its next page."""
    store = MemoryStore()
    await store.write(["a"], views(b"1"))
    stop = StopToken()
    stop.stop()
    assert await store.read(["a"], views(b"."), stop) == 0
    assert stop.reason is None
    assert stop.tracked
    assert not stop.busy


async def test_a_large_read_lets_the_loop_run() -> None:
    """Between turns of a few MiB other callbacks run, and a cancel there leaves the token quiet."""
    store = MemoryStore()
    keys = [str(number) for number in range(4)]
    page = memoryview(bytes(3 << 20))
    await store.write(keys, [page] * 4)
    stop = StopToken()
    into = [memoryview(bytearray(3 << 20)) for _ in keys]
    task = asyncio.create_task(store.read(keys, into, stop))
    await asyncio.sleep(0)
    assert not task.done()
    assert stop.busy
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not stop.busy


async def test_delete_and_list() -> None:
    """Deleted keys are gone, their bytes too, and only those that existed are counted."""
    store = MemoryStore()
    assert isinstance(store, SupportsDelete)
    assert isinstance(store, SupportsListing)
    await store.write(["a", "b"], views(b"1", b"22"))
    assert await store.delete(["a", "a", "c"]) == 1
    assert await store.list_keys() == ("b",)
    assert store.nbytes == 2


async def test_sizes_times_and_namespaces() -> None:
    """stat() tells payload bytes and when an object was last written or read; namespaces are told once each."""
    now = [100.0]
    store = MemoryStore(time=lambda: now[0])
    assert isinstance(store, SupportsStat) and isinstance(store, SupportsNamespaces)
    digests = ["ukv1-00000000000000aa", "ukv1-00000000000000bb"]
    keys = [f"x_{digests[1]}_m", f"manifest_{digests[0]}", f"y_{digests[1]}_m", "plain"]
    await store.write(keys, views(b"1", b"22", b"333", b""))
    assert await store.list_namespaces() == digests
    now[0] = 200.0
    await read_all(store, [keys[1]], 2)
    await store.write([keys[2]], views(b"333"))
    assert await store.stat([*keys, "absent"]) == [
        ObjectStat(1, 100.0), ObjectStat(2, 200.0), ObjectStat(3, 200.0), ObjectStat(0, 100.0), None,
    ]  # fmt: skip
    await store.delete(keys)
    assert await store.stat(keys) == [None] * 4 and await store.list_namespaces() == []


async def test_manifests_are_never_evicted() -> None:
    """Pages give way to pages and to manifests; manifests stay until they are deleted."""
    store = MemoryStore(max_bytes=4)
    manifests = [f"manifest_{number}" for number in range(5)]
    assert await store.write(manifests[:2], views(b"0", b"1")) == 2
    for turn in range(10):
        assert await store.write([f"{turn}a", f"{turn}b"], views(b"a", b"b")) == 2
    assert await read_all(store, manifests[:2], 1) == (2, [b"0", b"1"])
    assert await store.write(manifests[2:], views(b"2", b"3", b"4")) == 2
    assert await store.write(["page"], views(b"p")) == 0
    assert await store.list_keys() == tuple(manifests[:4])
    assert await store.delete(manifests[:1]) == 1
    assert await store.write(["page"], views(b"p")) == 1


async def test_after_close_every_call_is_refused() -> None:
    """A closed store raises StoreUnavailable, and may be closed again."""
    store = MemoryStore()
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await store.count_prefix(["a"])
    with pytest.raises(StoreUnavailable):
        await store.read([], [], StopToken())
    with pytest.raises(StoreUnavailable):
        await store.write([], [])


async def test_it_opens_by_url() -> None:
    """memory: takes max_bytes, in the query or as an argument, and refuses what cannot work."""
    store = open_store("memory:?max_bytes=1")
    assert await store.write(["a", "b"], views(b"1", b"2")) == 1
    assert await open_store("memory:", max_bytes=2).write(["a", "b"], views(b"1", b"2")) == 2
    with pytest.raises(ConfigError, match="max_bytes is 'much' in store URL.*give an integer"):
        open_store("memory:?max_bytes=much")
    with pytest.raises(ConfigError, match="max_bytes is -1; give an integer >= 0"):
        MemoryStore(-1)


@pytest.mark.parametrize(
    "into",
    [
        memoryview(bytes(4)),
        memoryview(bytearray(4)).cast("I"),
        memoryview(bytearray(8))[::2],
        memoryview(bytearray(4)).cast("B", (2, 2)),
    ],
    ids=["read-only", "words", "strided", "2-D"],
)
async def test_buffers_that_are_no_plain_bytes_are_refused(into: memoryview) -> None:
    """A buffer must be a contiguous, writable row of bytes; the error says what it is."""
    with pytest.raises(ConfigError, match="buffer 0 has shape .* give contiguous, writable bytes"):
        await MemoryStore().read(["a"], [into], StopToken())


async def test_keys_and_buffers_go_in_pairs() -> None:
    """Another number of buffers than keys is refused."""
    with pytest.raises(ConfigError, match="2 keys and 1 buffers"):
        await MemoryStore().write(["a", "b"], views(b"1"))
