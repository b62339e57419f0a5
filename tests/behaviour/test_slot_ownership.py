"""A page has one owner at any time, and every way out of a request gives back once what it held."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from hicache_async import CapacityError, InvariantError, PrefixLease, Stop, Tier
from hicache_async.core.node import Node
from hicache_async.core.pool import Owner
from hicache_async.stores._files import writer as _writer
from hicache_async.stores.file import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HeldStore
from tests.behaviour.tools import AT_EVICTION, FillingDisk, holding_pages, num_pins, tree_nodes
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, page_hashes, plain, prefetched, turns
from tests.flows.stores import namespaces_met, page_keys

pytestmark = pytest.mark.asyncio


# Prefetch


@pytest.mark.parametrize("batch_pages", [1, 2, 3, 128])
async def test_the_unread_tail_of_a_prefetch_is_freed_once(open_cache: Opener, batch_pages: int) -> None:
    """Of four pages reserved two arrive: two host pages are in use, and the six others are each there once."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, host_pages=8, store_batch_pages=batch_pages)
    await rig.put_in_store("abcd")
    waiting = asyncio.create_task(prefetched(rig, "abcd"))
    await store.arrived()
    await plain(store).delete((await plain(store).list_keys())[2:])
    store.open()
    assert await waiting == (16, 8, Stop.VANISHED)
    await turns()
    pool = rig.ctx.host_pool
    in_use = pool.owned_by(Owner.TREE).tolist()
    assert (len(in_use), pool.num_free, rig.ctx.prefetch_pages) == (2, 6, 0)
    others = pool.take(6, Owner.LEASE, fenced=False).pages
    assert sorted([*others.tolist(), *in_use]) == list(range(8))
    pool.free(others, Owner.LEASE)
    rig.check_local("abcd")


async def reading_below(rig: Rig, store: HeldStore) -> asyncio.Task[tuple[int, int, Stop]]:
    """Start the prefetch of "cd" below "ab", which the device holds; returns while the store reads."""
    await rig.put_in_store("abcd")
    waiting = asyncio.create_task(prefetched(rig, "abcd"))
    await store.arrived()
    return waiting


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_a_read_goes_on_below_an_anchor_that_leaves_the_device(open_cache: Opener, policy: str) -> None:
    """An anchor evicted from the device in mid-read is on the host, and what was read hangs below it."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, device_pages=5, write_policy=policy, write_back_low_water=0.0)
    await rig.serve("ab", prefetch=False)
    waiting = await reading_below(rig, store)
    assert rig.where("ab") == ("bb" if policy != "write_back" else "dd")
    other = await holding_pages(rig, 5)
    assert rig.where("ab") == "hh"
    store.open()
    assert await waiting == (8, 8, Stop.COMPLETE)
    assert rig.where("abcd") == "hhhh"
    rig.check_local("abcd")
    other.release()
    assert rig.cache.stats().host.free == 32 - 4
    assert (await rig.serve("abcd")).tokens == 16


async def test_an_anchor_that_has_nowhere_to_go_stays(open_cache: Opener) -> None:
    """With the host taken by the read itself, its anchor keeps the device pages until the read is attached."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, device_pages=5, host_pages=2, **AT_EVICTION)
    await rig.serve("ab", prefetch=False)
    waiting = await reading_below(rig, store)
    with pytest.raises(CapacityError, match="3 of 5 can be had"):
        await holding_pages(rig, 5)
    rig.cache.audit()
    assert rig.where("ab") == "dd"
    store.open()
    assert await waiting == (8, 8, Stop.COMPLETE)
    assert rig.where("abcd") == "ddhh"
    rig.check_local("abcd")
    assert num_pins(rig) == 0
    (await holding_pages(rig, 5)).release()


async def test_a_read_below_an_anchor_that_is_gone_gives_its_pages_back(open_cache: Opener) -> None:
    """An anchor whose forward fails in mid-read takes no page of the read along: all are free, and fetched anew."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, write_policy="write_back")
    first = rig.lease("ab")
    await first.load()
    first.allocate_nowait(9)
    forward = rig.cache.host_fence()
    first.commit(8, after=forward)
    waiting = await reading_below(rig, store)
    forward.fail(RuntimeError("out of luck"))
    await turns()
    rig.cache.audit()
    store.open()
    assert await waiting == (8, 0, Stop.ANCHOR_NOT_BACKED)
    await turns()
    first.release()
    stats = rig.cache.stats()
    assert (stats.device.free, stats.host.free, rig.ctx.prefetch_pages) == (16, 32, 0)
    assert (await rig.serve("abcd")).books.store == 16


# Looking up, and not using it


async def only_matched(lease: PrefixLease) -> None:
    """Use nothing."""


async def only_prefetched(lease: PrefixLease) -> None:
    """Ask the store, to learn that nothing is missing."""
    assert (await lease.prefetch()).stop is Stop.NOTHING_MISSING


async def used_from_the_device(lease: PrefixLease) -> None:
    """Use the device's copy."""
    assert (await lease.load()).loaded_tokens == 0
    assert lease.books.device == 12


@pytest.mark.parametrize("use", [only_matched, only_prefetched, used_from_the_device])
async def test_a_lookup_that_loads_nothing_leaves_no_pin(
    open_cache: Opener, use: Callable[[PrefixLease], Awaitable[None]]
) -> None:
    """Three pages on device and host, looked up and not loaded, are evictable on the host afterwards."""
    rig = await open_cache(store=MemoryStore(), host_pages=8)
    await rig.serve("abc")
    await rig.cache.admin.flush()
    assert rig.where("abc") == "bbb"
    with rig.lease("abc") as lease:
        await use(lease)
    assert num_pins(rig) == 0
    await rig.push_out(4)
    assert rig.where("abc") == "ddd"
    rig.cache.audit()


async def test_a_fetched_prefix_that_another_request_loads_is_let_go(open_cache: Opener) -> None:
    """Who finds its fetched pages on the device already keeps no host page of them while it runs."""
    rig = await open_cache(store=MemoryStore(), host_pages=8)
    await rig.put_in_store("abc")
    with rig.lease("abc") as lease:
        assert (await lease.prefetch()).fetched_tokens == 12
        await rig.serve("abc")
        assert rig.where("abc") == "bbb"
        assert rig.ctx.prefetch_pages == 3
        assert (await lease.load()).loaded_tokens == 0
        assert rig.ctx.prefetch_pages == 0
        await turns()  # the other request's copy has ended
        assert all(node.host.pins == 0 for node in tree_nodes(rig))
        await rig.push_out(4)
        assert rig.where("abc") == "ddd"
        rig.check(lease, 12)
    assert num_pins(rig) == 0


# Releasing twice


async def test_a_second_release_takes_nobody_elses_pin(open_cache: Opener) -> None:
    """Released twice, a request lets go of its own pin only: the other holder's pages stay on the device."""
    rig = await open_cache(device_pages=5)
    await rig.serve("abc")
    await turns()
    first, second = rig.lease("abc"), rig.lease("abc")
    for lease in (first, second):
        assert (await lease.load(total_tokens=12)).tokens == 12
    assert num_pins(rig) == 2
    for _ in range(2):
        first.release()
        rig.cache.audit()
        assert num_pins(rig) == 1
    with pytest.raises(CapacityError, match="2 of 5 can be had"):
        await holding_pages(rig, 5)
    assert rig.where("abc") == "bbb"
    rig.check(second, 12)
    second.release()
    assert num_pins(rig) == 0
    (await holding_pages(rig, 5)).release()


async def test_a_second_release_takes_nobody_elses_host_pages(open_cache: Opener) -> None:
    """Of two requests for one fetched prefix the one that is released twice leaves the other's pages and quota."""
    rig = await open_cache(store=MemoryStore(), host_pages=8)
    await rig.put_in_store("abc")
    first, second = rig.lease("abc"), rig.lease("abc")
    results = await asyncio.gather(first.prefetch(), second.prefetch())
    assert [result.fetched_tokens for result in results] == [12, 12]
    for _ in range(2):
        first.release()
        rig.cache.audit()
        assert (num_pins(rig), rig.ctx.prefetch_pages) == (1, 3)
    await rig.push_out(4)
    assert rig.where("abc") == "hhh"
    assert (await second.load()).tokens == 12
    rig.check(second, 12)
    second.release()
    await turns()
    assert (num_pins(rig), rig.ctx.prefetch_pages) == (0, 0)


# Errors on the way out


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
async def test_a_full_disk_at_any_write_holds_nothing(open_cache: Opener, layout: str) -> None:
    """Whichever write hits a full disk, its page is not visible, not held, not busy, and is stored at the next hit."""
    for failing in range(1, 5):
        error = OSError(errno.ENOSPC, "no space left on device")
        store = FlakyStore(MemoryStore(), "write", error=error, at={failing})
        rig = await open_cache(store=store, host_pages=8, store_batch_pages=1, host_layout=layout)
        await rig.serve("abcd", prefetch=False)
        await rig.cache.admin.flush()
        assert await rig.check_stored("abcd") == len(await page_keys(plain(store))) == failing - 1
        stats = rig.cache.stats()
        assert (num_pins(rig), stats.hops, stats.host.in_hops, len(rig.ctx.hop_pages)) == (0, 0, 0, 0)
        assert (stats.host.in_tree, stats.host.free) == (4, 4)
        assert rig.counters["backup_pages_failed"] == 1
        rig.cache.audit()
        await rig.serve("abcd", prefetch=False)
        await rig.cache.admin.flush()
        assert await rig.check_stored("abcd") == 4
        await rig.push_out(4)
        assert rig.where("abcd") == "dddd"


async def test_a_full_disk_at_any_system_call_leaves_nothing_behind(
    open_cache: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call finds the disk full: no open file, no temporary one, no pin, and the next hit stores it all."""
    num_calls, failing = 1, 0
    while failing <= num_calls:
        store = FileStore(tmp_path / str(failing))
        disk = FillingDisk(failing)
        monkeypatch.setattr(_writer, "os", os)
        rig = await open_cache(store=store)
        await namespaces_met()
        monkeypatch.setattr(_writer, "os", disk)
        keys = rig.ctx.keys.keys(page_hashes("abc"))
        num_open = len(os.listdir("/proc/self/fd"))
        await rig.serve("abc", prefetch=False)
        await rig.cache.admin.flush()
        num_stored = await store.count_prefix(keys)
        assert num_stored == rig.counters["backed_up_pages"] == len(await page_keys(store))
        assert (num_stored == 3) is (failing == 0)
        assert (
            sum(path.is_file() for path in (tmp_path / str(failing)).rglob("*")) == num_stored + 1
        )  # the manifest
        assert len(os.listdir("/proc/self/fd")) == num_open
        assert (num_pins(rig), rig.cache.stats().hops) == (0, 0)
        rig.cache.audit()
        num_calls = max(num_calls, disk.num_calls)
        disk.failing = 0
        await rig.serve("abc", prefetch=False)
        await rig.cache.admin.flush()
        assert await store.count_prefix(keys) == 3
        again = await open_cache(store=store)
        assert (await again.serve("abc")).books.store == 12
        again.check_local("abc")
        for each in (rig, again):
            await each.cache.close()
        await store.aclose()
        failing += 1
    assert num_calls >= 3 * 4


# Locks of others


def device_shares(rig: Rig) -> tuple[int, int, int, int]:
    """Return how many device pages are available, evictable, protected, and held by requests or hops."""
    stats = rig.cache.stats().device
    protected: set[Node] = set()
    for node in tree_nodes(rig):
        if node.device.pins or node.device.ready:
            protected.update(node.path())
    num_protected = sum(node.num_pages for node in protected)
    return stats.free, stats.in_tree - num_protected, num_protected, stats.leased + stats.in_hops


def check_shares(rig: Rig, running: PrefixLease) -> None:
    """Prove that the device's pages add up and that what ``running`` reads is protected and whole."""
    rig.cache.audit()
    shares = device_shares(rig)
    assert sum(shares) == rig.cache.stats().device.capacity
    assert shares[2] >= 2
    assert set(rig.where("ab")) <= {"b", "d"}
    rig.check(running, 8)


async def by_itself(rig: Rig) -> None:
    """Let the copy's end be noticed with nobody asking."""
    rig.virtual.advance_all()
    await turns()


async def by_flush(rig: Rig) -> None:
    """Let an operator wait for the copy's end."""
    flushing = asyncio.create_task(rig.cache.admin.flush(Tier.HOST))
    await turns()
    rig.virtual.advance_all()
    await flushing


async def by_steps(rig: Rig) -> None:
    """Let the engine ask for pages at each step."""
    for _ in range(3):
        await rig.cache.begin_step(8)
        rig.virtual.advance()
    await rig.cache.begin_step()
    await turns()


async def by_eviction(rig: Rig) -> None:
    """Let another request ask for pages, twice, while the copy runs and after."""
    for _ in range(2):
        with rig.lease("ijkl") as other:
            await other.load(total_tokens=0)
            with pytest.raises(CapacityError):
                other.allocate_nowait(8 * PAGE_TOKENS)
        rig.virtual.advance_all()
        await turns()


@pytest.mark.parametrize("drain", [by_itself, by_flush, by_steps, by_eviction])
async def test_the_end_of_a_childs_eviction_unlocks_no_parent(
    open_cache: Opener, drain: Callable[[Rig], Awaitable[None]]
) -> None:
    """Under write_back the end of a child's copy, whoever notices it, leaves the parent to its running request."""
    rig = await open_cache(device_pages=8, **AT_EVICTION)
    await rig.serve("ab")
    await rig.serve("abcd")
    running = rig.lease("ab")
    await running.load(total_tokens=8)
    rig.virtual.auto = False
    check_shares(rig, running)
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        other.allocate_nowait(6 * PAGE_TOKENS)
        assert rig.where("abcd")[2:] == "hh"
        assert rig.virtual.pending
        check_shares(rig, running)
    check_shares(rig, running)
    await drain(rig)
    check_shares(rig, running)
    with pytest.raises(CapacityError):
        await holding_pages(rig, 7)
    check_shares(rig, running)
    running.release()
    rig.virtual.auto = True
    rig.virtual.advance_all()
    await turns()
    assert num_pins(rig) == 0
    assert (await rig.cache.begin_step(8)).num_pages == 8


# The detector


async def test_a_device_page_handed_out_twice_is_named_and_harms_nobody(open_cache: Opener) -> None:
    """A used page in the free list raises at the request that would get it, and the cache goes on as before."""
    rig = await open_cache(device_pages=8)
    with rig.lease("ab") as running:
        await rig.run(running)
        used = int(running.pages[-1])
        free_list = rig.ctx.device_pool._free_list
        free_list.give_back(np.array([used]))
        other = rig.lease("wxyz")
        for _ in range(2):
            with pytest.raises(InvariantError, match=f"{used} is lease"):
                rig.ctx.device_pool.take(4, Owner.LEASE, fenced=True)
        with pytest.raises(InvariantError, match=f"{used} is lease"):
            await other.load(total_tokens=16)
        other.release()
        assert free_list.take(1).tolist() == [used]
        rig.cache.audit()
        rig.check(running, 8)
    assert (await rig.serve("wxyz")).books.computed == 17
    rig.check_local("ab")
