"""Prefetch: how it ends under each policy, every reason a process alone can meet, and what it holds meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import LeaseError, PrefetchPolicy, Stop, Tier
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, driven, turns
from tests.flows.stores import PageByPageStore, RecordingStore, ShortReadStore

pytestmark = pytest.mark.asyncio

PATIENT = {"store_timeout_s": 1e6}


async def prefetched(rig: Rig, letters: str, policy: PrefetchPolicy | None = None) -> tuple[int, int, Stop]:
    """Prefetch a prompt and release it; checks that the tokens asked for add up, and returns the result."""
    before = sum(rig.unfulfilled().values())
    with rig.lease(letters) as lease:
        missing = len(letters) * PAGE_TOKENS - lease.local_tokens
        result = await lease.prefetch(policy)
        rig.cache.audit()
    assert sum(rig.unfulfilled().values()) - before == missing - result.fetched_tokens
    return result.hit_tokens, result.fetched_tokens, result.stop


# How it ends


async def test_complete(open_cache: Opener) -> None:
    """All that the store has of the missing prefix comes to the host, byte for byte."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "abcdef") == (16, 16, Stop.COMPLETE)
    assert rig.where("abcdef") == "hhhh"
    rig.check_local("abcd")
    assert rig.unfulfilled() == {Stop.NOT_STORED: 8}


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


# Why it ends


async def test_nothing_missing(open_cache: Opener) -> None:
    """What is local all along is not asked for."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    assert await prefetched(rig, "ab") == (0, 0, Stop.NOTHING_MISSING)
    assert store.keys["count_prefix"] == []


async def test_not_stored_leaves_the_host_alone(open_cache: Opener) -> None:
    """When the store has nothing, nothing is evicted, taken or pinned for it."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=8)
    await rig.push_out(4)
    before = rig.cache.stats().host
    assert before.free == 0
    assert await prefetched(rig, "abcdef") == (0, 0, Stop.NOT_STORED)
    assert rig.cache.stats().host == before
    assert rig.unfulfilled() == {Stop.NOT_STORED: 24}


async def test_detached(open_cache: Opener) -> None:
    """Without a store a prefetch ends at once."""
    rig = await open_cache()
    assert await prefetched(rig, "ab") == (0, 0, Stop.DETACHED)


async def test_below_threshold_before_looking(open_cache: Opener) -> None:
    """Fewer missing tokens than the threshold are not asked for."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, prefetch_threshold_tokens=9)
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "ab") == (0, 0, Stop.BELOW_THRESHOLD)
    assert store.keys["count_prefix"] == []
    assert await prefetched(rig, "abc") == (12, 12, Stop.COMPLETE)


async def test_below_threshold_after_looking(open_cache: Opener) -> None:
    """A hit smaller than the threshold is not worth reserving for."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, prefetch_threshold_tokens=9)
    await rig.put_in_store("ab")
    assert await prefetched(rig, "abcd") == (8, 0, Stop.BELOW_THRESHOLD)
    assert store.keys["read"] == []
    assert rig.unfulfilled() == {Stop.BELOW_THRESHOLD: 8, Stop.NOT_STORED: 8}


async def test_rate_limited(open_cache: Opener) -> None:
    """Prefetches together hold at most their share of the host: one beyond it is cut short, later ones go on."""
    rig = await open_cache(store=MemoryStore(), host_pages=12, prefetch_capacity_fraction=0.5)
    for letters in ("abcd", "ijkl", "wxyz"):
        await rig.put_in_store(letters)
    with rig.lease("abcd") as first, rig.lease("ijkl") as second:
        assert (await first.prefetch()).stop is Stop.COMPLETE
        assert (await second.prefetch()).stop is Stop.RATE_LIMITED
        assert rig.unfulfilled() == {Stop.RATE_LIMITED: 8}
        assert rig.ctx.prefetch_pages == 6
        assert await prefetched(rig, "wxyz") == (16, 0, Stop.RATE_LIMITED)
        rig.cache.audit()
    assert rig.ctx.prefetch_pages == 0
    assert await prefetched(rig, "wxyz") == (16, 16, Stop.COMPLETE)


@pytest.mark.parametrize(("overflow", "fetched"), [("shrink", 8), ("refuse", 0)])
async def test_no_host_room(open_cache: Opener, overflow: str, fetched: int) -> None:
    """Without room for the whole hit a prefetch shrinks or refuses; the counter rises by exactly hit minus fetched."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, host_pages=6, prefetch_overflow=overflow)
    await rig.put_in_store("abcd")
    await rig.serve("wxyz", prefetch=False)
    await store.arrived()  # a write holds four of the six host pages
    assert await prefetched(rig, "abcdef") == (16, fetched, Stop.NO_HOST_ROOM)
    assert rig.unfulfilled() == {Stop.NO_HOST_ROOM: 16 - fetched, Stop.NOT_STORED: 8}
    assert rig.ctx.metrics.unfulfilled_series()["host_capacity"] == 16 - fetched
    store.open()


async def test_vanished(open_cache: Opener) -> None:
    """Pages that were counted and are gone at read end the prefix before them."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    waiting = asyncio.create_task(prefetched(rig, "abcd"))
    await store.arrived()
    inner = store.inner
    assert isinstance(inner, MemoryStore)
    await inner.delete([(await inner.list_keys())[2]])
    store.open()
    assert await waiting == (16, 8, Stop.VANISHED)
    assert rig.unfulfilled() == {Stop.VANISHED: 8}


@pytest.mark.parametrize("reason", [Stop.CORRUPT, Stop.VANISHED, Stop.STORE_FAULT])
async def test_a_store_says_why_it_read_less(open_cache: Opener, reason: Stop) -> None:
    """The reason that a store leaves at the stop token is the prefetch's, and what was good stays."""
    store = ShortReadStore(MemoryStore(), 1, reason)
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    assert await prefetched(rig, "abcd") == (16, 4, reason)
    assert rig.unfulfilled() == {reason: 12}


@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_store_fault(open_cache: Opener, verb: str) -> None:
    """A store that raises is a miss."""
    store = FlakyStore(MemoryStore(), verb, error=OSError("gone"), at=None)
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    hit = 0 if verb == "count_prefix" else 16
    assert await prefetched(rig, "abcd") == (hit, 0, Stop.STORE_FAULT)
    assert rig.unfulfilled() == {Stop.STORE_FAULT: 16}
    assert rig.cache.stats().host.free == 32


async def test_a_fault_in_a_later_count_keeps_the_earlier_ones(open_cache: Opener) -> None:
    """What the store vouched for before it failed is fetched; the rest is put down to the fault."""
    store = FlakyStore(MemoryStore(), "count_prefix", error=OSError("gone"), at={2})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcdef")
    assert await prefetched(rig, "abcdef") == (8, 8, Stop.STORE_FAULT)
    assert rig.unfulfilled() == {Stop.STORE_FAULT: 16}


@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_a_store_that_hangs_is_a_fault(open_cache: Opener, verb: str) -> None:
    """No answer in store_timeout_s is a miss, always; no hop is left once the store has answered."""
    store = HangingStore(MemoryStore(), verb)
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    policy = PrefetchPolicy.wait_complete()
    hit = 0 if verb == "count_prefix" else 16
    assert await driven(prefetched(rig, "abcd", policy), rig.clock) == (hit, 0, Stop.STORE_FAULT)
    assert rig.unfulfilled() == {Stop.STORE_FAULT: 16}
    rig.cache.audit()
    store.release()
    await turns()
    assert rig.cache.stats().hops == 0
    assert rig.cache.stats().host.free == 32


async def test_a_question_that_hangs_leaves_nothing_behind(open_cache: Opener) -> None:
    """A lookup owns nothing: once nobody waits for it, by time or by stop, no hop of it is left."""
    store = HangingStore(MemoryStore(), "count_prefix")
    rig = await open_cache(store=store)
    assert await driven(prefetched(rig, "abcd"), rig.clock, 1.0) == (0, 0, Stop.DEADLINE)
    assert await driven(prefetched(rig, "abcd", PrefetchPolicy.wait_complete()), rig.clock) == (
        0,
        0,
        Stop.STORE_FAULT,
    )
    await turns()
    assert rig.cache.stats().hops == 0


async def test_reads_that_hang_do_not_eat_the_host(open_cache: Opener) -> None:
    """Pages that a hung read may still write count against the prefetch quota until it has ended."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store, host_pages=8, prefetch_capacity_fraction=0.5)
    await rig.put_in_store("abcd")
    await rig.put_in_store("wxyz")
    waiting = prefetched(rig, "abcd", PrefetchPolicy.wait_complete())
    assert await driven(waiting, rig.clock) == (16, 0, Stop.STORE_FAULT)
    assert rig.ctx.prefetch_pages == 4
    assert await prefetched(rig, "wxyz") == (16, 0, Stop.RATE_LIMITED)
    assert rig.cache.stats().host.in_hops == 4
    rig.cache.audit()
    store.release()
    await turns()
    assert rig.ctx.prefetch_pages == 0


async def test_anchor_not_backed(open_cache: Opener) -> None:
    """Under write-through a fetched page needs its ancestors on the host; without room for them it is given up."""
    rig = await open_cache(store=MemoryStore(), host_pages=4, write_policy="write_through_selective")
    await rig.put_in_store("abcd")
    await rig.put_in_store("wxyz")
    await rig.serve("ab", prefetch=False)
    assert rig.where("ab") == "dd"
    with rig.lease("wxyz") as lease:
        assert (await lease.prefetch()).fetched_tokens == 16
        assert await prefetched(rig, "abcd") == (8, 0, Stop.ANCHOR_NOT_BACKED)
    assert rig.unfulfilled() == {Stop.ANCHOR_NOT_BACKED: 8}
    assert await prefetched(rig, "abcd") == (8, 8, Stop.COMPLETE)
    assert rig.where("abcd") == "bbhh"
    await rig.cache.admin.flush(Tier.HOST)
    rig.check_local("abcd")


async def test_write_back_attaches_under_a_device_only_node(open_cache: Opener) -> None:
    """Under write_back fetched pages may hang below pages that only the device has."""
    rig = await open_cache(store=MemoryStore(), write_policy="write_back")
    await rig.put_in_store("abcd")
    await rig.serve("ab", prefetch=False)
    assert await prefetched(rig, "abcd") == (8, 8, Stop.COMPLETE)
    assert rig.where("abcd") == "ddhh"
    assert (await rig.serve("abcd")).books.host == 8


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
