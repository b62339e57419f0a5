"""Why a prefetch ended where it did: every reason that a process alone can meet, and its counter."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import PrefetchPolicy, Stop, Tier
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore
from tests.flows.causes import NOT_ALONE, SCENARIOS, prefetch_now
from tests.flows.rig import Opener, driven, prefetched, turns
from tests.flows.stores import RecordingStore, ShortReadStore

pytestmark = pytest.mark.asyncio


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


# All of them


async def test_each_reason_has_a_scenario() -> None:
    """Every reason is reached below, except those that no process alone can meet."""
    assert set(SCENARIOS) == set(Stop) - NOT_ALONE


@pytest.mark.parametrize("stop", SCENARIOS)
async def test_each_reason_is_reached_and_counted(open_cache: Opener, stop: Stop) -> None:
    """A prefetch ends for the reason of its scenario, and what it did not bring is counted under reasons met."""
    async with SCENARIOS[stop](open_cache) as rig:
        before = rig.unfulfilled()
        _, fetched, ended = await prefetch_now(rig)
        assert ended is stop
        risen = {reason for reason, count in rig.unfulfilled().items() if count > before.get(reason, 0)}
        if stop is Stop.BELOW_THRESHOLD:
            assert risen == {stop, Stop.NOT_STORED}  # what was found, and what was not
        else:
            assert risen == (set() if stop in (Stop.COMPLETE, Stop.NOTHING_MISSING) else {stop})
        assert fetched == {
            Stop.COMPLETE: 16, Stop.RATE_LIMITED: 8, Stop.NO_HOST_ROOM: 8, Stop.VANISHED: 4, Stop.CORRUPT: 4
        }.get(stop, 0)  # fmt: skip
