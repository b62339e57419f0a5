"""Each token is booked to the tier that served it, or to one named reason why none did; the sums close."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools

import pytest

from hicache_async import Books, CacheStats, PrefetchPolicy, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HeldStore
from tests.behaviour.tools import holding_pages
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, plain, prefetched, turns

pytestmark = pytest.mark.asyncio

PROMPT = "abcdefgh"
"""Eight pages, and one token more: 33 tokens."""


async def in_every_tier(open_cache: Opener, **options: object) -> tuple[Rig, HeldStore]:
    """Open a cache that has pages of PROMPT: two on the device, three more on the host, two more in the store."""
    store = HeldStore(MemoryStore(), ())
    rig = await open_cache(store=store, host_pages=8, **options)  # type: ignore[arg-type]
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    await rig.put_in_store("abcdefg")
    with rig.lease("abcde") as lease:
        await lease.prefetch()
    assert rig.where(PROMPT) == "bbhhh"
    assert await rig.check_stored(PROMPT) == 7
    return rig, store


async def books_of(rig: Rig) -> Books:
    """Serve PROMPT; returns its books, which close and are what the totals of the cache rose by."""
    before = rig.cache.stats()
    served = await rig.serve(PROMPT)
    after = rig.cache.stats()
    books = served.books
    assert books.device + books.host + books.store + books.computed == books.prompt == 33
    assert books == Books(
        33,
        after.device_tokens - before.device_tokens,
        after.host_tokens - before.host_tokens,
        after.store_tokens - before.store_tokens,
        after.computed_tokens - before.computed_tokens,
    )
    rig.check_local(PROMPT)
    return books


async def test_each_page_is_booked_to_the_tier_it_came_from(open_cache: Opener) -> None:
    """Of eight pages two are the device's, three the host's, two the store's though staged there, one computed."""
    rig, _ = await in_every_tier(open_cache)
    assert await books_of(rig) == Books(prompt=33, device=8, host=12, store=8, computed=5)
    assert rig.unfulfilled() == {Stop.NOT_STORED: 4}


async def test_a_declined_load_is_booked_to_no_tier(open_cache: Opener) -> None:
    """What is too little to load is computed: neither host nor store is credited, though pages were fetched for it."""
    rig, _ = await in_every_tier(open_cache, load_threshold_tokens=100)
    assert await books_of(rig) == Books(prompt=33, device=8, host=0, store=0, computed=25)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, Books(prompt=33, device=8, host=0, store=0, computed=25)),
        (2, Books(prompt=33, device=8, host=8, store=0, computed=17)),
        (4, Books(prompt=33, device=8, host=12, store=4, computed=9)),
    ],
)
async def test_a_load_cut_short_is_booked_as_far_as_it_went(
    open_cache: Opener, room: int, expected: Books
) -> None:
    """With device room for some of the cached pages only these are credited, the host's before the store's."""
    rig, _ = await in_every_tier(open_cache, device_pages=12)
    other = await holding_pages(rig, 10 - room)
    with rig.lease(PROMPT) as lease:
        await lease.prefetch()
        loading = await lease.load()
        assert lease.books == expected
        assert loading.tokens == 33 - expected.computed
    assert rig.counters["load_tokens_without_device_room"] == (5 - room) * PAGE_TOKENS
    other.release()


async def test_a_tail_that_leaves_the_store_before_it_is_read_is_computed(open_cache: Opener) -> None:
    """A page that the store counted and no longer has is booked as computed, and its loss has a name."""
    rig, store = await in_every_tier(open_cache)
    store.hold("read")
    serving = asyncio.create_task(books_of(rig))
    await store.arrived()
    await plain(store).delete((await plain(store).list_keys())[-1:])
    store.open()
    assert await serving == Books(prompt=33, device=8, host=12, store=4, computed=9)
    assert rig.unfulfilled() == {Stop.NOT_STORED: 4, Stop.VANISHED: 4}


async def test_a_tail_that_leaves_the_host_before_its_request_comes_back_is_not_credited(
    open_cache: Opener,
) -> None:
    """A request that gave its fetched tail up and finds it evicted is credited only with what serves it then."""
    rig, store = await in_every_tier(open_cache)
    with rig.lease(PROMPT) as lease:
        assert (await lease.prefetch()).fetched_tokens == 8
        assert rig.where(PROMPT) == "bbhhhhh"
    await plain(store).delete((await plain(store).list_keys())[-2:])
    await rig.put_in_store("yz")
    with rig.lease("yz") as lease:
        assert (await lease.prefetch()).fetched_tokens == 8
    assert rig.where(PROMPT) == "bbhhhh"
    assert await books_of(rig) == Books(prompt=33, device=8, host=16, store=0, computed=9)


# Why a prefetch brought less than was missing


async def test_six_ways_to_bring_less_have_six_counters(open_cache: Opener) -> None:
    """Absent, unreadable, too slow, too short, no room, over quota: each counts what it cost, and all adds up."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError(errno.EIO, "input/output error"))
    store = HeldStore(flaky, ())
    rig = await open_cache(
        store=store,
        host_pages=12,
        prefetch_capacity_fraction=0.5,
        prefetch_threshold_tokens=8,
        store_timeout_s=1e6,
    )
    for letters in ("eeee", "tttt", "s", "rrrr", "qqqq", "oooo"):
        await rig.put_in_store(letters)
    policy = PrefetchPolicy.timeout(base_s=1.0, per_ki_token_s=0.0)
    results = {
        "absent": await prefetched(rig, "mmmm", policy),
        "unreadable": await prefetched(rig, "eeee", policy),
        "too short": await prefetched(rig, "ssss", policy),  # one page is stored
    }
    store.hold("read")
    slow = asyncio.create_task(prefetched(rig, "tttt", policy))
    await store.arrived()
    rig.clock.advance(1.0)
    await turns()
    rig.clock.advance(0.1)  # what is in hand gets a moment
    results["too slow"] = await slow
    store.open()
    await turns()
    with rig.lease("rrrr") as other:  # uses four of the six pages of the quota
        results["in full"] = dataclasses.astuple(await other.prefetch())
        results["over quota"] = await prefetched(rig, "qqqq", policy)
    store.hold("write")
    await rig.serve("0123456789", prefetch=False)
    await store.arrived()  # the write keeps ten of the host's twelve pages
    results["no room"] = await prefetched(rig, "oooo", policy)
    store.open()

    assert results == {
        "absent": (0, 0, Stop.NOT_STORED),
        "unreadable": (16, 0, Stop.STORE_FAULT),
        "too short": (4, 0, Stop.BELOW_THRESHOLD),
        "too slow": (16, 0, Stop.DEADLINE),
        "in full": (16, 16, Stop.COMPLETE),
        "over quota": (16, 8, Stop.RATE_LIMITED),
        "no room": (16, 8, Stop.NO_HOST_ROOM),
    }
    counters = {
        Stop.NOT_STORED: 16 + 12,
        Stop.STORE_FAULT: 16,
        Stop.BELOW_THRESHOLD: 4,
        Stop.DEADLINE: 16,
        Stop.RATE_LIMITED: 8,
        Stop.NO_HOST_ROOM: 8,
    }
    assert rig.unfulfilled() == counters
    hits, fetched = (sum(result[field] for result in results.values()) for field in (0, 1))
    assert len(results) * 16 == fetched + sum(counters.values())
    assert hits == fetched + sum(counters.values()) - counters[Stop.NOT_STORED]


# Rates


async def test_an_interval_without_traffic_has_no_hit_rate(open_cache: Opener) -> None:
    """The hit rate is that of the interval asked for: all computed, all but a token cached, and none while idle."""
    rig = await open_cache()
    moments = [rig.cache.stats()]
    await rig.serve("abc")
    moments.append(rig.cache.stats())
    for _ in range(2):
        await rig.serve("abc")
    moments.append(rig.cache.stats())
    for _ in range(2):
        rig.clock.advance(10)
        await turns()
        moments.append(rig.cache.stats())
    rates = [later.since(earlier).hit_rate for earlier, later in itertools.pairwise(moments)]
    assert rates == [0.0, pytest.approx(24 / 26), None, None]
    assert moments[-1].since(moments[0]).hit_rate == pytest.approx(24 / 39)
    assert moments[-1].hit_rate == pytest.approx(24 / 39)
    assert moments[0].hit_rate is None


COUNTS = ("device_tokens", "host_tokens", "store_tokens", "computed_tokens")


def served_tokens(stats: CacheStats) -> int:
    """Return how many prompt tokens were served, by tiers or computed."""
    return sum(getattr(stats, name) for name in COUNTS)


async def test_every_interval_has_a_rate_between_none_and_all(open_cache: Opener) -> None:
    """Over any interval of mixed traffic the hit rate is within 0 and 1, counts do not go down, and parts add up."""
    rig = await open_cache(store=MemoryStore(), device_pages=8, host_pages=12)
    await rig.put_in_store("wxyz")
    moments = [rig.cache.stats()]
    for letters in ("abcd", "abcd", "wxyz", "abxy", "ijkl", "", "abcd", "wxyz", "q"):
        if letters:
            await rig.serve(letters)
        moments.append(rig.cache.stats())
    for earlier, later in itertools.combinations(moments, 2):
        interval = later.since(earlier)
        assert all(getattr(interval, name) >= 0 for name in COUNTS)
        assert served_tokens(interval) == served_tokens(later) - served_tokens(earlier)
        if not served_tokens(interval):
            assert interval.hit_rate is None
        else:
            expected = 1 - interval.computed_tokens / served_tokens(interval)
            assert interval.hit_rate == pytest.approx(expected)
            assert 0 <= interval.hit_rate <= 1
        assert all(count >= 0 for count in interval.unfulfilled_tokens.values())
        assert all(count >= 0 for count in interval.counters.values())
        assert (interval.device.capacity, interval.host.capacity) == (8, 12)
