"""Under write_back: what will be evicted next is on the host before anybody needs its room."""

from __future__ import annotations

import pytest

from hicache_async import Tier
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import Opener, Rig, turns

pytestmark = pytest.mark.asyncio


async def steady_traffic(rig: Rig, num_prompts: int) -> None:
    """Serve prompts of two pages, one after the other, each computed and never seen again."""
    for number in range(num_prompts):
        await rig.serve(chr(ord("A") + number) + chr(ord("a") + number), prefetch=False)
        rig.cache.audit()
        await rig.cache.admin.flush(Tier.HOST)


async def test_no_request_waits_for_a_copy_to_the_host(open_cache: Opener) -> None:
    """In steady traffic every page that leaves the device was copied ahead, none when its room was asked for."""
    rig = await open_cache(
        device_pages=16, host_pages=64, write_policy="write_back", write_back_low_water=0.25
    )
    await steady_traffic(rig, 24)
    stats = rig.cache.stats()
    assert stats.device.evicted_pages >= 30
    assert stats.counters.get("offloaded_pages_at_eviction", 0) == 0
    assert stats.counters["offloaded_pages"] >= stats.device.evicted_pages
    assert not stats.dropped_tokens
    for number in range(24):
        prompt = chr(ord("A") + number) + chr(ord("a") + number)
        assert len(rig.where(prompt)) == 2
        rig.check_local(prompt)


async def test_without_a_mark_the_copies_come_with_the_evictions(open_cache: Opener) -> None:
    """With the mark at 0 nothing is copied ahead: each page that leaves costs a copy on the way of a request."""
    rig = await open_cache(device_pages=16, host_pages=64, write_policy="write_back", write_back_low_water=0)
    await steady_traffic(rig, 24)
    stats = rig.cache.stats()
    assert stats.counters["offloaded_pages_at_eviction"] == stats.device.evicted_pages > 0


async def test_nothing_is_copied_while_enough_is_free(open_cache: Opener) -> None:
    """Free pages above the mark are all it takes: no copy is made of what nobody evicts."""
    rig = await open_cache(
        device_pages=16, host_pages=64, write_policy="write_back", write_back_low_water=0.25
    )
    await steady_traffic(rig, 5)  # 10 pages, and one that was half full
    assert "offloaded_pages" not in rig.counters
    await steady_traffic(
        rig, 6
    )  # the sixth holds a half-full page, too, while it runs: one short of the mark
    assert rig.counters["offloaded_pages"] == 1
    assert [rig.where(prompt) for prompt in ("Aa", "Bb", "Cc")] == ["db", "dd", "dd"]


async def test_only_the_tail_of_a_long_prompt_is_copied_ahead(open_cache: Opener) -> None:
    """Of a prompt longer than the mark its last pages are copied: they would go first."""
    rig = await open_cache(
        device_pages=16, host_pages=64, write_policy="write_back", write_back_low_water=0.25
    )
    await rig.serve("abcdefghijklmn")
    assert rig.where("abcdefghijklmn") == "d" * 12 + "bb"
    rig.check_local("abcdefghijklmn")


async def test_in_a_full_host_older_pages_make_room(open_cache: Opener) -> None:
    """When the host is full, what it has held longest goes, so that copies still come ahead of evictions."""
    rig = await open_cache(
        device_pages=16, host_pages=16, write_policy="write_back", write_back_low_water=0.25
    )
    await steady_traffic(rig, 26)
    stats = rig.cache.stats()
    assert stats.host.evicted_pages > 0
    assert stats.counters.get("offloaded_pages_at_eviction", 0) == 0


@pytest.mark.parametrize("host_pages", [1, 2, 3])
async def test_a_tiny_host_is_not_copied_through(open_cache: Opener, host_pages: int) -> None:
    """Copies ahead are no more than pages evicted: one does not push out another for ever."""
    rig = await open_cache(
        device_pages=16, host_pages=host_pages, write_policy="write_back", write_back_low_water=1.0
    )
    await steady_traffic(rig, 24)
    stats = rig.cache.stats()
    assert stats.counters["offloaded_pages"] <= 3 * stats.device.evicted_pages


async def test_running_requests_are_not_cold(open_cache: Opener) -> None:
    """Pages that a request holds cannot be evicted, so they are not copied ahead either."""
    rig = await open_cache(device_pages=8, host_pages=64, write_policy="write_back", write_back_low_water=0.5)
    with rig.lease("abcdefg") as lease:
        await rig.run(lease)
        assert "offloaded_pages" not in rig.counters
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abcdefg") == "dddd" + "bbb"


async def test_what_is_copied_ahead_reaches_the_store_with_its_ancestors(open_cache: Opener) -> None:
    """A tail in the store without its head is of no use: the pages before it follow to host and store."""
    store = MemoryStore()
    rig = await open_cache(
        device_pages=16, host_pages=64, write_policy="write_back", write_back_low_water=0.25, store=store
    )
    await rig.serve("abcdefghijklmn")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcdefghijklmn") == 14


@pytest.mark.parametrize("host_pages", [3, 8, 64])
async def test_closing_writes_down_what_only_the_device_has(open_cache: Opener, host_pages: int) -> None:
    """A clean close stores every prefix, through a host of any size; the next process finds all of it."""
    store = MemoryStore()
    rig = await open_cache(device_pages=32, host_pages=host_pages, write_policy="write_back", store=store)
    prompts = ["abcdef", "abcxyz", "mnop"]
    for prompt in prompts:
        await rig.serve(prompt)
    assert await rig.check_stored("abcdef") == 0
    again = await open_cache.restart(rig, device_pages=32, host_pages=64)
    for prompt in prompts:
        assert await again.check_stored(prompt) == len(prompt)


async def test_closing_ends_when_the_store_takes_nothing(open_cache: Opener) -> None:
    """A store that is full does not keep a cache from closing."""
    store = MemoryStore(max_bytes=1)
    rig = await open_cache(device_pages=16, host_pages=8, write_policy="write_back", store=store)
    await rig.serve("abcdef")
    rig.cache.audit()
    await rig.cache.close()


@pytest.mark.parametrize(("device_policy", "host_policy"), [("lfu", "lru"), ("lru", "lru"), ("fifo", "lfu")])
async def test_without_traffic_nothing_is_copied_for_ever(
    open_cache: Opener, device_policy: str, host_policy: str
) -> None:
    """Copies ahead come to rest, however differently the tiers order what goes first, and one more hit adds few."""
    rig = await open_cache(
        device_pages=40,
        host_pages=16,
        write_policy="write_back",
        write_back_low_water=0.5,
        device_eviction_policy=device_policy,
        host_eviction_policy=host_policy,
    )
    for number in range(30):
        await rig.serve(chr(ord("A") + number % 7) * (number % 5 + 1) + "xyz", prefetch=False)
    await turns(2000)
    assert not rig.ctx.hops.live
    before = rig.counters["offloaded_pages"]
    await turns(2000)
    assert rig.counters["offloaded_pages"] == before
