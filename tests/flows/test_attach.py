"""Attach and detach: a store comes and goes under running requests; nothing is lost, nothing of the old one stays."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_async import ClosedError, ConfigError, PrefetchPolicy, Stop, Tier
from hicache_async.stores import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.stores.null import NullStore
from hicache_async.testing.faults import HangingStore, HeldStore, StoreWrapper
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, driven, page_hashes, turns
from tests.flows.stores import FaultAt, PageByPageStore, RecordingStore
from tests.flows.test_cancellation import CANCELS, MAX_TURNS, Cancel, check_all_given_back
from tests.flows.test_close import Logs, events

pytestmark = pytest.mark.asyncio


class ClosingStore(StoreWrapper):
    """Remember that it was closed, and refuse to work from then on."""

    is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True
        await super().aclose()


async def detach_forcibly(rig: Rig) -> None:
    """Take the store away, moving time on as far as needed, and prove the books."""
    await driven(rig.cache.admin.detach_store(force=True), rig.clock)
    rig.cache.audit()


# Attaching


async def test_what_is_on_the_host_is_written_to_a_new_store(open_cache: Opener) -> None:
    """Every page that was committed before the store came is in it, ancestors first, without another commit."""
    rig = await open_cache(device_pages=8, host_pages=64, store_batch_pages=2)
    prompts = ["abcd", "abxy", "abcz", "wxyz", "w123", "5"]
    for letters in prompts:
        await rig.serve(letters)
    store = RecordingStore(MemoryStore())
    epoch = rig.ctx.tree.store_epoch
    await rig.cache.admin.attach_store(store)
    assert rig.ctx.tree.store_epoch > epoch
    rig.cache.audit()
    await rig.cache.admin.flush()
    rig.cache.audit()
    assert [await rig.check_stored(letters, store) for letters in prompts] == [len(p) for p in prompts]
    written = [key for keys in store.keys["write"] for key in keys]
    assert len(written) == len(set(written)) == 4 + 2 + 1 + 4 + 3 + 1
    rig = await open_cache(store=store)
    assert (await rig.serve("abcd")).books.store == 16


async def test_under_write_back_the_ancestors_on_the_device_go_along(open_cache: Opener) -> None:
    """Host pages below device-only ones are stored with their ancestors, of which the host gets a copy."""
    rig = await open_cache(device_pages=8, host_pages=32, write_policy="write_back", write_back_low_water=0.0)
    for letters in ("abc", "wxy", "mno"):
        await rig.serve(letters)
    assert rig.where("abc") == "dhh"
    store = MemoryStore()
    await rig.cache.admin.attach_store(store)
    await rig.cache.admin.flush()
    rig.cache.audit()
    assert await rig.check_stored("abc", store) == 3


async def test_the_backlog_does_not_fill_the_queue(open_cache: Opener) -> None:
    """Of a host full of prompts one at a time is written, beside what requests bring, and none is skipped."""
    rig = await open_cache(host_pages=64, max_backups_pending=1)
    for number in range(12):
        await rig.serve(chr(ord("A") + number) + "z")
    await turns()
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"write"})
    await rig.cache.admin.attach_store(store)
    await rig.serve("ab", prefetch=False)
    for _ in range(13):
        await store.arrived()
        assert len(rig.cache._movers.backups) <= 1
        store.let_in("write")
        await turns()
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab", store) == 2
    assert [len(keys) for keys in recording.keys["write"]] == [2] * 13
    assert recording.keys["write"][1] == rig.ctx.keys.keys(page_hashes("ab"))
    assert rig.counters.get("backups_skipped_queue_full", 0) == 0


async def test_the_tree_changes_while_the_backlog_is_written(open_cache: Opener) -> None:
    """Nodes that are split, extended, evicted or cut off meanwhile neither stop the walk nor lose anything else."""
    rig = await open_cache(device_pages=16, host_pages=40)
    prompts = ["abcdef", "ghijkl", "mnopqr", "stuvwx"]
    for letters in prompts:
        await rig.serve(letters)
    store = HeldStore(MemoryStore(), {"write"})
    await rig.cache.admin.attach_store(store)
    await store.arrived()
    for letters in ("abc12", "ghij", "mnopqr34", "stu5", "s67"):
        await rig.serve(letters, prefetch=False)
        rig.cache.audit()
    for number in range(8):
        await rig.serve("xyz" + str(number), prefetch=False)
    rig.cache.audit()
    store.open()
    await rig.cache.admin.flush()
    rig.cache.audit()
    for letters in [*prompts, "abc12", "mnopqr34", "stu5", "s67"]:
        on_host = len(rig.where(letters).rstrip("d"))
        assert await rig.check_stored(letters, store) >= on_host
    assert await rig.check_stored("stuvwx", store) == 6


async def test_a_path_that_loses_its_end_while_it_waits(open_cache: Opener) -> None:
    """Of a prompt whose last pages were evicted before its turn the rest is written."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, host_pages=10)
    await rig.serve("wx", prefetch=False)
    await store.arrived()
    await rig.serve("abcdef", prefetch=False)
    await rig.cache.admin.flush(Tier.HOST)
    await rig.cache.admin.clear(Tier.DEVICE)
    await rig.serve("mnop", prefetch=False)
    assert rig.where("abcdef") == "hhhh"
    store.open()
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in ("wx", "abcdef", "mnop")] == [2, 4, 4]


async def test_what_is_left_of_a_path(open_cache: Opener) -> None:
    """A node stands for itself, one that was merged for the one it is part of, one that went for what is above."""
    rig = await open_cache()
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    tree = rig.ctx.tree
    end = tree.roots[b""].only_child
    assert end is not None
    upper = tree.split(end, 2)
    assert end.reachable() is end
    assert upper.reachable() is upper
    tree.merge(upper)
    assert not upper.attached
    assert upper.reachable() is end
    upper = tree.split(end, 1)
    tree.detach(end)
    assert end.reachable() is upper
    await rig.cache.admin.clear()
    assert end.reachable().parent is upper.reachable().parent is None


async def test_a_store_that_hangs_ends_the_backlog(open_cache: Opener) -> None:
    """With two writes hung the walk is given up, and what it would have written is made up for at the next hit."""
    rig = await open_cache(host_pages=64)
    for number in range(9):
        await rig.serve(chr(ord("A") + number) + "z")
    store = FaultAt(MemoryStore(), "write", None, "hang")
    await rig.cache.admin.attach_store(store)
    await driven(rig.cache.admin.flush(), rig.clock)
    assert store.calls["write"] == 2
    store.release()
    await turns()
    for number in range(9):
        await rig.serve(chr(ord("A") + number) + "z")
    await rig.cache.admin.flush()
    assert await rig.check_stored("Az", store) == 2 == await rig.check_stored("Iz", store)


async def test_a_rank_that_does_not_write_writes_no_backlog(open_cache: Opener) -> None:
    """Of ranks that hold the same bytes only the first one writes what was on the host."""
    rig = await open_cache()
    await rig.serve("abc")
    rig.ctx.keys.writes = False
    store = RecordingStore(MemoryStore())
    await rig.cache.admin.attach_store(store)
    await rig.cache.admin.flush()
    assert store.calls["write"] == 0


async def test_a_new_store_serves_prefetches_at_once(open_cache: Opener) -> None:
    """The first prefetch after the attach finds what another process has stored."""
    rig = await open_cache()
    with rig.lease("abcd") as lease:
        assert (await lease.prefetch()).stop is Stop.DETACHED
    store = MemoryStore()
    other = await open_cache(store=store)
    await other.put_in_store("abcd")
    await rig.cache.admin.attach_store(store)
    assert (await rig.serve("abcd")).books.store == 16


def not_a_store(rig: Rig, tmp_path: Path) -> object:
    return {"read": "not this one"}


def a_class(rig: Rig, tmp_path: Path) -> object:
    return MemoryStore


def unknown_scheme(rig: Rig, tmp_path: Path) -> object:
    return "nowhere://here"


def unknown_option(rig: Rig, tmp_path: Path) -> object:
    return f"file://{tmp_path}?nonsense=1"


@pytest.mark.parametrize("make", [not_a_store, a_class, unknown_scheme, unknown_option])
async def test_what_cannot_be_attached_changes_nothing(
    open_cache: Opener, tmp_path: Path, logs: Logs, make: Callable[[Rig, Path], object]
) -> None:
    """An object that is no store, a scheme and an option that nobody knows are refused before anything is done."""
    rig = await open_cache()
    stores = rig.cache._owned.stores
    epoch = rig.ctx.tree.store_epoch
    with pytest.raises(ConfigError):
        await rig.cache.admin.attach_store(make(rig, tmp_path))  # type: ignore[arg-type]
    assert (rig.ctx.store, rig.ctx.tree.store_epoch, stores) == (None, epoch, [])
    assert not events(logs, "store.attached")


async def test_one_store_at_a_time(open_cache: Opener, logs: Logs) -> None:
    """A second store is refused until the first is detached; the first one again, and none, change nothing."""
    store = MemoryStore()
    rig = await open_cache(store=store)
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    epoch = rig.ctx.tree.store_epoch
    await rig.cache.admin.attach_store(store)
    for other in (MemoryStore(), "memory:", NullStore(), "null:"):
        with pytest.raises(ConfigError, match="a MemoryStore is attached; detach_store"):
            await rig.cache.admin.attach_store(other)
    assert (rig.ctx.store, rig.ctx.tree.store_epoch) == (store, epoch)
    await rig.cache.admin.detach_store()
    for none in (NullStore(), "null:"):
        await rig.cache.admin.attach_store(none)
        assert rig.ctx.store is None
    await rig.cache.admin.attach_store(MemoryStore())
    assert [entry["store"] for entry in events(logs, "store.attached")] == ["MemoryStore"]
    assert len(events(logs, "store.detached")) == 1


async def test_who_opens_a_store_closes_it(open_cache: Opener, tmp_path: Path) -> None:
    """A store given by URL is closed at detach, or with the cache; one given as an object never is."""
    rig = await open_cache()
    stores = rig.cache._owned.stores
    await rig.cache.admin.attach_store(f"file://{tmp_path}?num_lanes=1")
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    (opened,) = stores
    assert isinstance(opened, FileStore)
    await rig.cache.admin.detach_store()
    assert not stores
    assert opened._closed
    given = ClosingStore(MemoryStore())
    await rig.cache.admin.attach_store(given)
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(f"file://{tmp_path}?num_lanes=1")
    (opened,) = stores
    assert (await rig.serve("abcd")).books.prompt == 17
    await rig.cache.close()
    assert isinstance(opened, FileStore)
    assert opened._closed
    assert not given.is_closed
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-store"):
            thread.join(30)


# Detaching


async def test_a_graceful_detach_writes_what_is_pending(open_cache: Opener) -> None:
    """Everything that was committed before the call is in the store when it has gone."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    detaching = asyncio.create_task(rig.cache.admin.detach_store())
    await store.arrived()
    await turns()
    assert not detaching.done()
    assert rig.ctx.store is store
    store.open()
    await detaching
    rig.cache.audit()
    assert rig.ctx.store is None
    assert [await rig.check_stored(letters) for letters in ("ab", "cd", "ef")] == [2, 2, 2]
    assert rig.counters.get("backups_dropped", 0) == 0


async def test_a_forced_detach_drops_and_counts_what_waits(open_cache: Opener, logs: Logs) -> None:
    """What waits to be written is dropped; the write in hand is waited for, and its answer is nobody's."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    await store.arrived()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    assert not detaching.done()
    store.open()
    await detaching
    await turns()
    rig.cache.audit()
    assert store.calls["write"] == 1
    assert rig.counters["backups_dropped"] == 2
    assert rig.counters.get("backed_up_pages", 0) == 0
    (line,) = events(logs, "store.detached")
    assert (line["log_level"], line["stuck"], line["backups_dropped"]) == ("info", [], 2)


async def test_a_prefetch_keeps_what_it_has_when_its_store_goes(open_cache: Opener) -> None:
    """Two of four pages are there when the store is detached: they stay, and the rest counts as detached."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store, store_batch_pages=1)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetching = asyncio.create_task(lease.prefetch(PrefetchPolicy.wait_complete()))
        await turns()
        store.let_read(2)
        await turns()
        detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
        await turns()
        rig.clock.advance(0.05)  # a stopped prefetch gives the page in hand a moment
        result = await prefetching
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (16, 8, Stop.DETACHED)
        assert rig.unfulfilled() == {Stop.DETACHED: 8}
        assert rig.where("abcd") == "hh"
        rig.cache.audit()
        store.let_read(1)
        await detaching
        assert store.touched == 3
        rig.cache.audit()
        assert rig.where("abcd") == "hh"
        served = await rig.run(lease, prefetch=False)
        assert served.books.store == 8
    await check_all_given_back(rig)


async def test_a_prefetch_that_has_everything_is_complete(open_cache: Opener) -> None:
    """A store that goes when the last page has just arrived has been of use: nothing counts as detached."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch()
        while rig.where("abcd") != "hhhh":  # noqa: ASYNC110 - the very turn in which it arrives
            await asyncio.sleep(0)
        rig.cache.admin._attachment.suspend()
        result = await prefetch.settled()
    assert (result.fetched_tokens, result.stop) == (16, Stop.COMPLETE)
    assert rig.unfulfilled() == {}


@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_prefetches_of_every_kind_hear_of_the_detach(open_cache: Opener, verb: str) -> None:
    """Those that look, those that read, those that share a read and those that have just begun end with DETACHED."""
    store = HeldStore(MemoryStore(), {verb})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    leases = [rig.lease("abcd") for _ in range(4)]
    prefetches = [lease.start_prefetch(PrefetchPolicy.wait_complete()) for lease in leases[:3]]
    await store.arrived(3 if verb == "count_prefix" else 1)
    await turns()
    prefetches.append(leases[3].start_prefetch())
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    rig.clock.advance(0.05)
    results = [await prefetch.settled() for prefetch in prefetches]
    assert [result.stop for result in results] == [Stop.DETACHED] * 4
    assert [result.fetched_tokens for result in results] == [0] * 4
    assert rig.unfulfilled() == {Stop.DETACHED: 4 * 16}
    store.open()
    await detaching
    await turns()
    for lease in leases:
        lease.release()
    assert rig.where("abcd") == ""
    await check_all_given_back(rig)


async def test_a_forced_detach_ends_within_its_limit_though_a_read_hangs(
    open_cache: Opener, logs: Logs
) -> None:
    """It waits 0.1 s and no longer; the pages come back when the read does, and what it read is ignored."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store, host_pages=8)
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    prefetch = lease.start_prefetch(PrefetchPolicy.wait_complete())
    await store.hung()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    rig.clock.advance(0.09)
    await turns()
    assert (await prefetch.settled()).stop is Stop.DETACHED
    assert not detaching.done()
    rig.clock.advance(0.02)
    await detaching
    (line,) = events(logs, "store.detached")
    assert line["stuck"] == ["store.read"]
    lease.release()
    rig.cache.audit()
    assert rig.cache.stats().host.in_hops == 4
    other = MemoryStore()
    await rig.cache.admin.attach_store(other)
    assert (await rig.serve("abcd")).books.store == 0  # not from the one that is gone
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd", other) == 4
    store.release()
    await check_all_given_back(rig)
    rig.check_local("abcd")
    assert not events(logs, "store.fault")


async def test_hung_writes_of_the_old_store_do_not_stop_the_new_one(open_cache: Opener) -> None:
    """However many writes hang in the old store, the new one gets its own at once, and no late answer is believed."""
    old = HangingStore(MemoryStore(), "write")
    rig = await open_cache(store=old)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    await driven(rig.cache.admin.flush(), rig.clock)
    assert old.num_hanging == 2
    await detach_forcibly(rig)
    new = RecordingStore(MemoryStore())
    await rig.cache.admin.attach_store(new)
    await rig.cache.admin.flush()
    prompts = ("ab", "cd", "ef")
    assert [await rig.check_stored(letters, new) for letters in prompts] == [2, 2, 2]
    backed_up = rig.counters["backed_up_pages"]
    old.release()
    await turns()
    assert rig.counters["backed_up_pages"] == backed_up == 6
    await check_all_given_back(rig)


async def test_a_write_in_hand_does_not_hold_up_the_new_store(open_cache: Opener) -> None:
    """The new store is written to while the old one still hangs within its time limit."""
    old = HangingStore(MemoryStore(), "write")
    rig = await open_cache(store=old)
    await rig.serve("ab", prefetch=False)
    await old.hung()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    await rig.cache.admin.attach_store(new := MemoryStore())
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab", new) == 2
    assert not detaching.done()
    old.release()
    await detaching
    await check_all_given_back(rig)


async def test_the_same_store_again(open_cache: Opener) -> None:
    """A store that went and came back is believed nothing of: what is on the host is offered to it again."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.serve("abcd")
    await rig.cache.admin.detach_store()
    await rig.serve("wxyz")
    await rig.cache.admin.attach_store(store)
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in ("abcd", "wxyz")] == [4, 4]
    assert sorted(len(keys) for keys in store.keys["write"]) == [4, 4, 4]


async def test_detaching_again_changes_nothing(open_cache: Opener, logs: Logs) -> None:
    """A second detach, at the same time or later, and one of no store, return without a line."""
    rig = await open_cache(store=MemoryStore())
    await asyncio.gather(*(rig.cache.admin.detach_store(force=force) for force in (False, True, False)))
    epoch = rig.ctx.tree.store_epoch
    for force in (False, True):
        await rig.cache.admin.detach_store(force=force)
    assert rig.ctx.tree.store_epoch == epoch
    assert len(events(logs, "store.detached")) == 1


async def test_a_detach_means_the_store_of_its_call(open_cache: Opener) -> None:
    """A graceful detach that waits for an old store leaves the one alone that was attached meanwhile."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    graceful = asyncio.create_task(rig.cache.admin.detach_store())
    await store.arrived()
    forced = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns(1)
    await rig.cache.admin.attach_store(new := MemoryStore())
    store.open()
    await asyncio.gather(graceful, forced)
    assert rig.ctx.store is new


# Cancelled, closed, failed


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_detach_cancelled_at_each_await(open_cache: Opener, cancel: Cancel, force: bool) -> None:
    """Afterwards the store is in use as before, or gone and closed; a second detach ends what the first began."""
    outcomes = set()
    for num_turns in range(MAX_TURNS):
        rig = await open_cache()
        stores = rig.cache._owned.stores
        await rig.cache.admin.attach_store("memory:")
        lease = rig.lease("wxyz")
        await rig.serve("abcd", prefetch=False)
        lease.start_prefetch()
        was_running = await cancel(lambda rig=rig: rig.cache.admin.detach_store(force=force), num_turns)  # type: ignore[misc]
        rig.cache.audit()
        await turns()
        assert [store is rig.ctx.store for store in stores] == [True] * (rig.ctx.store is not None)
        outcomes.add(rig.ctx.store is None)
        await rig.serve("abcd")
        await rig.cache.admin.detach_store(force=force)
        assert (rig.ctx.store, stores) == (None, [])
        await rig.cache.admin.attach_store("memory:")
        await rig.serve("abcd")
        lease.release()
        await rig.cache.admin.flush()
        await check_all_given_back(rig)
        if not was_running:
            break
    assert outcomes == {True, False} or (force and outcomes == {True})


async def test_an_attach_cancelled_while_it_waits_its_turn(open_cache: Opener) -> None:
    """Nothing was opened and nothing has changed."""
    rig = await open_cache(store=(store := MemoryStore()))
    stores = rig.cache._owned.stores
    async with rig.cache.admin._change:
        attaching = asyncio.create_task(rig.cache.admin.attach_store("memory:"))
        await turns()
        attaching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attaching
    assert (rig.ctx.store, stores) == (store, [])
    await rig.cache.admin.detach_store()


async def test_close_ends_a_detach(open_cache: Opener) -> None:
    """A detach that waits for a hung call, and one that waits for a write, hear that the cache was closed."""
    for force in (False, True):
        store = HangingStore(MemoryStore(), "write")
        rig = await open_cache(store=store, close_timeout_s=0.05)
        await rig.serve("ab", prefetch=False)
        await store.hung()
        detaching = asyncio.create_task(rig.cache.admin.detach_store(force=force))
        await turns()
        await rig.cache.close()
        with pytest.raises(ClosedError, match="the cache is closed"):
            await detaching
        await turns()
        assert not rig.ctx.tasks
        store.release()


async def test_after_close_nothing_can_be_changed(open_cache: Opener) -> None:
    """Attach and detach of a closed cache raise ClosedError."""
    rig = await open_cache()
    await rig.cache.close()
    for work in (rig.cache.admin.attach_store("memory:"), rig.cache.admin.detach_store()):
        with pytest.raises(ClosedError, match="the cache is closed"):
            await work


async def test_a_failed_cache_can_change_its_store(open_cache: Opener) -> None:
    """After a bug a store still goes and comes, and is used for nothing."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    rig.ctx.fail(RuntimeError("a bug"))
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(store)
    assert (await rig.serve("abcd")).tokens == 0
    assert not store.calls
    assert rig.ctx.store is store


async def test_a_lease_that_loads_across_a_change(open_cache: Opener) -> None:
    """A request that was prefetched from one store loads while the next one is attached: right bytes, right books."""
    store = MemoryStore()
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        assert (await lease.prefetch()).fetched_tokens == 16
        await rig.cache.admin.detach_store(force=True)
        await rig.cache.admin.attach_store(new := MemoryStore())
        served = await rig.run(lease, prefetch=False)
        assert served.books.store == 4 * PAGE_TOKENS
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd", new) == 4
