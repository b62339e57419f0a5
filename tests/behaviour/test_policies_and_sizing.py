"""Policies do what their names say at every ratio of host to device, and what they could not do is counted."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import PrefetchResult, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.flows.rig import PAGE_TOKENS, Opener, driven, prefetched, turns

pytestmark = pytest.mark.asyncio

POLICIES = ["write_through", "write_through_selective", "write_back"]


# Looking costs nothing


async def test_ten_prefetches_of_nothing_take_no_host_page(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host full of useful pages and the store empty, ten prefetches at once evict and take nothing."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=8)
    await rig.push_out(4)
    useful = [letter + "z" for letter in "ABCD"]
    before, places = rig.cache.stats(), [rig.where(letters) for letters in useful]
    assert (before.host.free, before.host.in_tree) == (0, 8)
    pool, taken = rig.ctx.host_pool, []
    take = pool.take
    monkeypatch.setattr(pool, "take", lambda *args, **options: taken.append(args) or take(*args, **options))
    leases = [rig.lease(letter * 6) for letter in "abcdefghij"]
    results = await asyncio.gather(*(lease.prefetch() for lease in leases))
    assert set(results) == {PrefetchResult(0, 0, Stop.NOT_STORED)}
    after = rig.cache.stats()
    assert not taken
    assert (after.host, after.device, after.dropped_tokens) == (
        before.host,
        before.device,
        before.dropped_tokens,
    )
    assert [rig.where(letters) for letters in useful] == places
    for lease in leases:
        lease.release()


# A hit larger than the room for it


@pytest.mark.parametrize(("overflow", "fetched_pages"), [("shrink", 3), ("refuse", 0)])
async def test_a_hit_without_room_is_cut_or_refused_and_says_so(
    open_cache: Opener, overflow: str, fetched_pages: int
) -> None:
    """Of eight stored pages with room for three, three come or none; hit, fetched and reason say which, and why."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, host_pages=8, prefetch_overflow=overflow)
    await rig.put_in_store("abcdefgh")
    await rig.serve("vwxyz", prefetch=False)
    await store.arrived()  # the write keeps five of the host's eight pages
    with rig.lease("abcdefgh") as lease:
        served = await rig.run(lease)
    assert served.result is not None
    fetched_tokens = fetched_pages * PAGE_TOKENS
    assert (served.result.hit_tokens, served.result.fetched_tokens) == (32, fetched_tokens)
    assert served.result.stop is Stop.NO_HOST_ROOM
    assert (served.books.store, served.books.computed) == (fetched_tokens, 33 - fetched_tokens)
    assert rig.unfulfilled() == {Stop.NO_HOST_ROOM: 32 - fetched_tokens}
    assert rig.ctx.metrics.unfulfilled_series()["host_capacity"] == 32 - fetched_tokens
    assert rig.cache.stats().store_tokens == fetched_tokens
    store.open()


async def test_a_refused_hit_comes_whole_once_there_is_room(open_cache: Opener) -> None:
    """What was refused for want of room is still stored, and all of it is fetched when asked for again."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, host_pages=8, prefetch_overflow="refuse")
    await rig.put_in_store("abcdefgh")
    await rig.serve("vwxyz", prefetch=False)
    await store.arrived()
    assert await prefetched(rig, "abcdefgh") == (32, 0, Stop.NO_HOST_ROOM)
    assert rig.where("abcdefgh") == ""
    store.open()
    await rig.cache.admin.flush()
    assert await prefetched(rig, "abcdefgh") == (32, 32, Stop.COMPLETE)
    assert rig.unfulfilled() == {Stop.NO_HOST_ROOM: 32}


# Lost before it was stored

FIVE = ["abc", "def", "ghi", "jkl", "mno"]


@pytest.mark.parametrize("writes_let_in", [0, 1])
async def test_what_is_lost_before_it_was_stored_is_counted(open_cache: Opener, writes_let_in: int) -> None:
    """Five prompts larger than device and host, a slow store: each token is restorable, or counted as lost unstored."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, device_pages=4, host_pages=6, store_batch_pages=1)
    for letters in FIVE:
        await rig.serve(letters, prefetch=False)
        await turns()
        store.let_in("write", writes_let_in)
        await turns()
        rig.cache.audit()
    store.open()
    await rig.cache.admin.flush()
    lost = 0
    for letters in FIVE:
        restorable = max(len(rig.where(letters)), await rig.check_stored(letters))
        lost += (len(letters) - restorable) * PAGE_TOKENS
    dropped = rig.cache.stats().dropped_tokens
    assert lost > 0
    assert lost == dropped.get("host_eviction_unstored", 0) + dropped.get("unbacked_eviction", 0)
    assert set(dropped) <= {"host_eviction", "host_eviction_unstored", "unbacked_eviction"}


async def test_nothing_is_lost_to_a_store_that_keeps_up(open_cache: Opener) -> None:
    """The same five prompts with a store that writes at once: each is restored in full."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=6)
    for letters in FIVE:
        await rig.serve(letters, prefetch=False)
        await rig.cache.admin.flush()
    assert set(rig.cache.stats().dropped_tokens) <= {"host_eviction"}
    for letters in FIVE:
        assert (await rig.serve(letters)).books.computed == 1
        await rig.cache.admin.flush()
    assert rig.cache.stats().store_tokens >= 3 * 3 * PAGE_TOKENS


# Where a policy brings what


@pytest.mark.parametrize(
    ("policy", "stages"),
    [
        ("write_through", [("bbb", 3), ("bbb", 3), ("hhh", 3)]),
        ("write_through_selective", [("ddd", 0), ("bbb", 3), ("hhh", 3)]),
        ("write_back", [("ddd", 0), ("ddd", 0), ("hhh", 3)]),
    ],
)
async def test_each_policy_brings_a_prompt_down_when_it_says(
    open_cache: Opener, policy: str, stages: list[tuple[str, int]]
) -> None:
    """After insert, second hit and eviction a prompt is where the policy says, and after close it is stored."""
    rig = await open_cache(store=MemoryStore(), write_policy=policy)
    found: list[tuple[str, int]] = []
    for stage in ("insert", "second hit", "evict"):
        if stage == "evict":
            await rig.push_out(8)
        else:
            await rig.serve("abc")
        await rig.cache.admin.flush()
        found.append((rig.where("abc"), await rig.check_stored("abc")))
        rig.check_local("abc")
    assert found == stages
    rig = await open_cache.restart(rig, write_policy=policy)
    assert await rig.check_stored("abc") == 3
    served = await rig.serve("abc")
    assert (served.books.store, served.books.computed) == (12, 1)


# A host no larger than the device

DEVICE_PAGES = 8
PROMPTS = ["abcd", "ijkl", "abxy", "ABCDEF", "abcd"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_pages", [1, DEVICE_PAGES - 1, DEVICE_PAGES, 2 * DEVICE_PAGES])
async def test_a_host_of_any_size_serves(open_cache: Opener, host_pages: int, policy: str) -> None:
    """From one host page to twice as many as the device has: every prompt is served right and nothing hangs."""
    rig = await open_cache(
        store=MemoryStore(), device_pages=DEVICE_PAGES, host_pages=host_pages, write_policy=policy
    )
    stage_room_tokens = max(0, host_pages - DEVICE_PAGES) * PAGE_TOKENS
    assert rig.cache.stats().stage_room_tokens == stage_room_tokens
    for letters in PROMPTS * 2:
        await driven(rig.serve(letters), rig.clock)
        rig.check_local(letters)
        await driven(rig.cache.admin.flush(), rig.clock)
        rig.cache.audit()
    assert rig.counters.get("bugs", 0) == 0
    if host_pages >= DEVICE_PAGES:
        rig = await open_cache.restart(
            rig, device_pages=DEVICE_PAGES, host_pages=host_pages, write_policy=policy
        )
        assert (await driven(rig.serve("abcd"), rig.clock)).books.store == 16


@pytest.mark.parametrize("host_pages", [1, DEVICE_PAGES - 1, DEVICE_PAGES, 2 * DEVICE_PAGES])
async def test_the_declared_staging_room_is_there_when_the_device_is_full(
    open_cache: Opener, host_pages: int
) -> None:
    """With the device full and backed a hit of stage_room_tokens is fetched; what is missing beyond is counted."""
    rig = await open_cache(store=MemoryStore(), device_pages=DEVICE_PAGES, host_pages=host_pages)
    hit = "abcdefgh"
    await rig.put_in_store(hit)
    running = rig.lease("STUVWXY")
    await driven(rig.run(running, prefetch=False), rig.clock)
    await rig.cache.admin.flush()
    assert rig.cache.stats().device.free == 0
    stage_room_tokens = rig.cache.stats().stage_room_tokens
    with rig.lease(hit) as lease:
        result = await driven(lease.prefetch(), rig.clock)
        assert result.hit_tokens == 32
        assert result.fetched_tokens >= min(32, stage_room_tokens)
        missing = result.hit_tokens - result.fetched_tokens
        reasons = rig.unfulfilled()
        assert set(reasons) <= {Stop.NO_HOST_ROOM, Stop.RATE_LIMITED}
        assert sum(reasons.values()) == missing
        rig.cache.audit()
    rig.check(running, 28)
    rig.check_local(hit)
    running.release()
