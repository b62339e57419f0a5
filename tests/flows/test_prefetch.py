"""Prefetch: how it ends under each policy, and what it holds meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import LeaseError, PrefetchPolicy, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore
from tests.flows.rig import PAGE_TOKENS, Opener, prefetched, turns
from tests.flows.stores import PageByPageStore, RecordingStore

pytestmark = pytest.mark.asyncio

PATIENT = {"store_timeout_s": 1e6}


# How it ends


async def test_complete(open_cache: Opener) -> None:
    """All that the store has of the missing prefix comes to the host, byte for byte."""
    rig = await open_cache(store=MemoryStore())
    await turns()
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "abcdef") == (16, 16, Stop.COMPLETE)
    assert rig.where("abcdef") == "hhhh"
    rig.check_local("abcd")
    assert rig.unfulfilled() == {Stop.NOT_STORED: 8}
    assert rig.clock.pending == 0


async def test_the_chain_goes_on_from_the_last_local_page(open_cache: Opener) -> None:
    """Only pages that are not local are asked for and read."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.serve("ab")
    await rig.cache.admin.flush()
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "abcd") == (8, 8, Stop.COMPLETE)
    assert [len(keys) for keys in store.keys["read"]] == [2]
    assert len(store.keys["count_prefix"][-1]) == 2
    assert rig.where("abcd") == "bbhh"


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
async def test_whole_pages_reach_the_arena_in_every_layout(open_cache: Opener, layout: str) -> None:
    """Under page-first layouts the store fills the arena itself, under layer_first one scratch page each."""
    rig = await open_cache(store=MemoryStore(), host_layout=layout)
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "abcd") == (16, 16, Stop.COMPLETE)
    rig.check_local("abcd")
    assert rig.ctx.arena.num_scattered == (0 if layout == "page_first" else 4)


@pytest.mark.parametrize("policy", [PrefetchPolicy.best_effort(), PrefetchPolicy.wait_complete()])
async def test_only_timeout_has_a_deadline(open_cache: Opener, policy: PrefetchPolicy) -> None:
    """Whatever the time, the cache stops neither best_effort nor wait_complete."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, **PATIENT)
    await rig.put_in_store("abcd")
    waiting = asyncio.create_task(prefetched(rig, "abcd", policy))
    await store.arrived()
    rig.clock.advance(3600)
    await turns()
    assert not waiting.done()
    store.open()
    assert await waiting == (16, 16, Stop.COMPLETE)


async def test_the_deadline_grows_with_the_tokens_asked_for(open_cache: Opener) -> None:
    """timeout ends at min(cap, base + per_ki_token x tokens / 1024) after the prefetch began, counted to the page."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(
        store=store, prefetch_timeout_base_s=1, prefetch_timeout_per_ki_token_s=64, **PATIENT
    )
    await rig.put_in_store("abcd")
    waiting = asyncio.create_task(prefetched(rig, "abcd"))
    await store.arrived()
    rig.clock.advance(1.99)
    await turns()
    assert not waiting.done()
    rig.clock.advance(0.02)
    await turns()
    rig.clock.advance(0.02)  # what is in hand gets a moment
    assert await waiting == (16, 0, Stop.DEADLINE)
    store.open()
    await turns()
    assert rig.unfulfilled() == {Stop.DEADLINE: 16}


async def test_the_deadline_is_capped(open_cache: Opener) -> None:
    """A policy's own times count before those of the config, and its cap before all."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store, **PATIENT)
    waiting = asyncio.create_task(prefetched(rig, "abcd", PrefetchPolicy.timeout(base_s=100, cap_s=0.5)))
    await store.arrived()
    rig.clock.advance(0.49)
    await turns()
    assert not waiting.done()
    rig.clock.advance(0.01)
    assert await waiting == (0, 0, Stop.DEADLINE)


async def test_the_clock_starts_at_prefetch(open_cache: Opener) -> None:
    """Neither the first answer of the store nor a further batch restarts the deadline."""
    store = HeldStore(MemoryStore(), {"count_prefix", "read"})
    rig = await open_cache(store=store, store_batch_pages=1, prefetch_timeout_base_s=1, **PATIENT)
    await rig.put_in_store("ab")
    waiting = asyncio.create_task(prefetched(rig, "ab"))
    for verb in ("count_prefix", "count_prefix", "read"):
        await store.arrived(verb=verb)
        rig.clock.advance(0.3)
        store.let_in(verb)
    await store.arrived(verb="read")
    rig.clock.advance(0.3)
    await turns()
    rig.clock.advance(0.02)
    assert await waiting == (8, 4, Stop.DEADLINE)
    store.open()


async def test_stop_is_sync_and_may_be_called_again(open_cache: Opener) -> None:
    """stop() says at once how much is there, as often as one likes, and what was brought stays."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.best_effort())
        await store.arrived()
        store.let_in("read")
        await store.arrived()
        assert prefetch.stop() == prefetch.stop() == 8
        store.open()
        result = await prefetch.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (24, 8, Stop.STOPPED)
        assert prefetch.stop() == 8
        assert (await lease.load()).tokens == 8
        rig.check(lease, 8)
    assert rig.unfulfilled() == {Stop.STOPPED: 16}


async def test_stopped_before_its_first_step(open_cache: Opener) -> None:
    """A prefetch stopped at once asks the store nothing."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch()
        assert prefetch.stop() == 0
        assert (await prefetch.settled()).stop is Stop.STOPPED
    assert store.keys["count_prefix"] == store.keys["read"] == []
    assert rig.unfulfilled() == {Stop.STOPPED: 16}


async def test_what_arrives_in_the_page_in_hand_counts(open_cache: Opener) -> None:
    """After stop() at most two pages are touched, and all that arrived is pinned, counted and booked to the store."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=8)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.best_effort())
        store.let_read(3)
        await turns()
        assert store.touched == 3
        assert prefetch.stop() == 0
        store.let_read(100)
        result = await prefetch.settled()
        assert store.touched <= 5
        assert (result.hit_tokens, result.fetched_tokens) == (24, store.touched * PAGE_TOKENS)
        arrived = "h" * store.touched
        await rig.push_out(8)
        assert rig.where("abcdef") == arrived
        served = await rig.run(lease, prefetch=False)
        assert served.books.store == store.touched * PAGE_TOKENS
        assert sum(rig.unfulfilled().values()) == 24 - result.fetched_tokens


async def test_a_hung_read_keeps_nobody_beyond_the_stop(open_cache: Opener) -> None:
    """A stopped prefetch whose store hangs settles after a moment; the pages stay with the read."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch()
        await turns()
        prefetch.stop()
        await turns()
        rig.clock.advance(0.05)
        assert (await prefetch.settled()).stop is Stop.STOPPED
        assert rig.cache.stats().host.in_hops == 4
        rig.cache.audit()
    store.release()
    await turns()
    assert rig.cache.stats().host.in_hops == 0


async def test_a_cancelled_waiter_withdraws_interest(open_cache: Opener) -> None:
    """Cancelling prefetch() stops even wait_complete, and what has arrived stays."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.wait_complete()))
        await store.arrived()
        store.let_in("read")
        await store.arrived()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        store.open()
        served = await rig.run(lease, prefetch=False)
        assert (served.books.store, served.books.computed) == (8, 9)
    assert store.calls["read"] == 2


async def test_load_joins_a_prefetch_that_runs(open_cache: Opener) -> None:
    """load() without waiting for the prefetch first does so itself."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        lease.start_prefetch()
        loading = asyncio.create_task(lease.load())
        await store.arrived()
        await turns()
        assert not loading.done()
        store.open()
        assert (await loading).tokens == 16
        assert lease.books.store == 16


async def test_one_prefetch_a_lease(open_cache: Opener) -> None:
    """A second prefetch, or one after load(), is the caller's mistake."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("ab") as lease:
        await lease.prefetch()
        with pytest.raises(LeaseError, match="one prefetch a lease"):
            await lease.prefetch()
    with rig.lease("ab") as lease:
        await lease.load()
        with pytest.raises(LeaseError, match="before load"):
            lease.start_prefetch()


# What it holds


async def test_existence_stops_at_the_first_short_batch(open_cache: Opener) -> None:
    """Of 1,000 pages with page 130 absent, two questions of 128 keys find 130."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=200)
    letters = "".join(chr(0x100 + i) for i in range(1000))
    await rig.put_in_store(letters, [page for page in range(1000) if page != 130])
    assert await prefetched(rig, letters) == (520, 520, Stop.COMPLETE)
    assert [len(keys) for keys in store.keys["count_prefix"]] == [128, 128]
    assert [len(keys) for keys in store.keys["read"]] == [128, 2]
    rig.check_local(letters)


async def test_fetched_pages_stay_until_load(open_cache: Opener) -> None:
    """What a prefetch has brought outlives any pressure on the host until its request has loaded it."""
    rig = await open_cache(store=MemoryStore(), device_pages=12, host_pages=8)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        await lease.prefetch()
        assert rig.ctx.prefetch_pages == 4
        await rig.push_out(8)
        assert rig.where("abcd") == "hhhh"
        served = await rig.run(lease, prefetch=False)
        assert served.books.store == 16
        assert rig.ctx.prefetch_pages == 0
        await rig.push_out(8, first="P")
        assert rig.where("abcd") == "dddd"
        rig.cache.audit()


async def test_fetched_pages_stay_until_release(open_cache: Opener) -> None:
    """A request that goes without loading leaves its pages to the cache, evictable as any, and its quota free."""
    rig = await open_cache(store=MemoryStore(), host_pages=8)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        await lease.prefetch()
    assert rig.ctx.prefetch_pages == 0
    assert rig.where("abcd") == "hhhh"
    await rig.push_out(8)
    assert rig.where("abcd") == ""


async def test_released_while_it_reads(open_cache: Opener) -> None:
    """A request that goes in the middle of a read pins and charges nothing once the read has ended."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    prefetch = lease.start_prefetch()
    await store.arrived()
    lease.release()
    rig.cache.audit()
    store.open()
    await prefetch.settled()
    await turns()
    assert rig.ctx.prefetch_pages == 0
    assert not rig.ctx.charges
    assert rig.cache.stats().host.in_hops == 0
