"""Backup: ancestors first, in batches, made up for when it went wrong, and never in a request's way."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HeldStore
from tests.flows.rig import Opener, plain, turns
from tests.flows.stores import FaultAt, RecordingStore, page_keys

pytestmark = pytest.mark.asyncio


async def test_a_path_is_written_ancestors_first(open_cache: Opener) -> None:
    """Pages reach the store in the order of the prompt, in batches of store_batch_pages."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, store_batch_pages=4)
    await rig.serve("abcdef", prefetch=False)
    await rig.cache.admin.flush()
    await rig.serve("abcdefghi", prefetch=False)
    await rig.cache.admin.flush()
    assert [len(keys) for keys in store.keys["write"]] == [4, 2, 3]
    assert [key for keys in store.keys["write"] for key in keys] == await page_keys(plain(store))
    assert await rig.check_stored("abcdefghi") == 9


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
async def test_stored_bytes_are_the_same_in_every_layout(open_cache: Opener, layout: str) -> None:
    """A page is read from the arena itself, or gathered once, into the same object."""
    rig = await open_cache(store=MemoryStore(), host_layout=layout)
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4
    assert rig.ctx.arena.num_gathered == (0 if layout == "page_first" else 4)
    other = "layer_first" if layout == "page_first" else "page_first"
    rig = await open_cache.restart(rig, host_layout=other)
    assert (await rig.serve("abcd")).books.store == 16


async def test_what_is_stored_is_not_written_again(open_cache: Opener) -> None:
    """A hit on a stored path asks the store to write nothing, in this process or the next."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    for _ in range(3):
        await rig.serve("abcd")
        await rig.cache.admin.flush()
    rig = await open_cache.restart(rig)
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert len(store.keys["write"]) == 1


async def test_a_hit_makes_up_for_a_failed_write(open_cache: Opener) -> None:
    """A page that could not be written is written when the next request loads or commits through it."""
    store = FaultAt(MemoryStore(), "write", 1, "raise")
    rig = await open_cache(store=store)
    with capture_logs() as logs:
        await rig.serve("abcd")
        await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 0
    assert [entry["log_level"] for entry in logs if entry["event"] == "backup.stopped"] == ["warning"]
    assert rig.counters["backup_pages_failed"] == 4
    with rig.lease("abcd") as lease:
        await lease.load()
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4


async def test_a_hole_is_repaired_before_what_lies_below(open_cache: Opener) -> None:
    """After a short write the path goes on from the first missing page, so that the store never has a tail alone."""
    store = FaultAt(recording := RecordingStore(MemoryStore()), "write", 1, "short")
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await rig.cache.admin.flush()
    await rig.serve("abcdef", prefetch=False)
    await rig.cache.admin.flush()
    assert [len(keys) for keys in recording.keys["write"]] == [4, 2, 2]
    assert await rig.check_stored("abcdef") == 6


async def test_a_path_of_which_only_the_tail_is_stored(open_cache: Opener) -> None:
    """Where a prefetch found the tail of a path whose head was not stored, the next hit stores the head."""
    store = FaultAt(MemoryStore(), "write", 1, "raise")
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    await rig.put_in_store("abcd", [2, 3])
    assert (await rig.serve("abcd")).books.store == 8
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4


async def test_one_line_says_that_writing_stopped(open_cache: Opener) -> None:
    """A store that cannot be written is logged once as long as it lasts, and requests go on."""
    store = FlakyStore(MemoryStore(), "write", error=OSError("read-only"), at=range(1, 6))
    rig = await open_cache(store=store)
    with capture_logs() as logs:
        for letters in ("ab", "cd", "ef", "gh", "ij"):
            await rig.serve(letters)
            await rig.cache.admin.flush()
        assert len([entry for entry in logs if entry["event"] == "backup.stopped"]) == 1
        await rig.serve("ab")
        await rig.cache.admin.flush()
    assert await rig.check_stored("ab") == 2


async def test_nodes_split_while_they_are_written(open_cache: Opener) -> None:
    """What was written counts as stored, however its nodes were split in the meantime."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcdef", prefetch=False)
    await store.arrived()
    for letters in ("abxy", "abcdwx", "avwx"):
        await rig.serve(letters, prefetch=False)
    rig.cache.audit()
    store.open()
    await rig.cache.admin.flush()
    written = [key for keys in recording.keys["write"] for key in keys]
    assert len(written) == len(set(written)) == 6 + 2 + 2 + 3
    for letters in ("abcdef", "abxy", "abcdwx", "avwx"):
        assert await rig.check_stored(letters) == len(letters)


@pytest.mark.parametrize("count", range(7))
async def test_a_short_write_of_split_nodes(open_cache: Opener, count: int) -> None:
    """Exactly the pages that the store vouches for count as stored, wherever the nodes are split by then."""
    store = HeldStore(FaultAt(recording := RecordingStore(MemoryStore()), "write", 1, count), {"write"})
    rig = await open_cache(store=store, write_policy="write_through")
    await rig.serve("abcdef", prefetch=False)
    await store.arrived()
    await rig.serve("abxy", prefetch=False)
    await rig.serve("abcdwx", prefetch=False)
    store.open()
    await rig.cache.admin.flush()
    await rig.serve("abcdef", prefetch=False)
    await rig.cache.admin.flush()
    rig.cache.audit()
    first, *rest = recording.keys["write"]
    again = [key for keys in rest for key in keys if key in first]
    assert again == list(first[count:])


async def test_hung_writes_are_bounded(open_cache: Opener) -> None:
    """A store that swallows every write holds two batches and no more; when it wakes up all is made up for."""
    store = FaultAt(MemoryStore(), "write", None, "hang")
    rig = await open_cache(store=store)
    prompts = ("ab", "cd", "ef", "gh")
    for letters in prompts:
        await rig.serve(letters)
        for _ in range(2):
            await turns()
            rig.clock.advance(6)
    await turns()
    assert store.calls["write"] == 2
    assert rig.counters["backups_skipped_store_hung"] == 2
    assert rig.cache.stats().hops == 2
    rig.cache.audit()
    store.release()
    await turns()
    for letters in prompts:
        await rig.serve(letters)
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in prompts] == [2] * 4


async def test_the_queue_is_bounded(open_cache: Opener) -> None:
    """A path beyond max_backups_pending is skipped and counted, and made up for at the next commit."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, max_backups_pending=1)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters)
        await turns()
    assert rig.counters["backups_skipped_queue_full"] > 0
    store.open()
    await rig.cache.admin.flush()
    assert await rig.check_stored("ef") == 0
    await rig.serve("ef")
    await rig.cache.admin.flush()
    assert await rig.check_stored("ef") == 2


async def test_a_page_is_not_evicted_while_it_is_written(open_cache: Opener) -> None:
    """Whatever else wants host pages, those that the store reads stay."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, device_pages=4, host_pages=4)
    await rig.serve("abc", prefetch=False)
    await store.arrived()
    await rig.serve("wxy", prefetch=False)
    await rig.serve("ijk", prefetch=False)
    assert rig.where("abc") == "hhh"
    rig.cache.audit()
    store.open()
    await rig.cache.admin.flush()
    assert await rig.check_stored("abc") == 3


async def test_what_was_evicted_before_its_turn_is_let_go(open_cache: Opener) -> None:
    """A path that lost its host pages while it waited to be written is skipped, under every policy."""
    for policy in ("write_through", "write_back"):
        store = HeldStore(MemoryStore(), {"write"})
        rig = await open_cache(store=store, device_pages=4, host_pages=8, write_policy=policy)
        for letters in ("abc", "def", "ghi", "jkl", "mno", "pqr"):
            await rig.serve(letters, prefetch=False)
            await turns()
        assert store.waiting == ("write",)
        assert rig.where("def") == ""
        store.open()
        await rig.cache.admin.flush()
        assert rig.counters.get("bugs", 0) == 0
        rig.cache.audit()
        assert await rig.check_stored("abc") == 3
        assert await rig.check_stored("def") == 0
