"""Flush: what was on its way at the call has arrived or was given up, however much follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hicache_async import Tier
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HeldStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.rig import Opener, Rig, driven, turns
from tests.flows.stores import FaultAt

pytestmark = pytest.mark.asyncio


class EndlessStore(StoreWrapper):
    """Before a write ends the next prompt is committed, so that something always waits to be written."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.rig: Rig | None = None
        self.num_more = 60

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        if verb == "write" and self.rig is not None and self.num_more:
            self.num_more -= 1
            await self.rig.serve(chr(0x1000 + self.num_more) + "z", prefetch=False)
            await turns(6)
            assert len(self.rig.cache._movers.backups) > 0
        return await call()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_flush_returns_under_endless_traffic(open_cache: Opener, policy: str) -> None:
    """What was pending at the call is stored when flush returns, although there was always more to write."""
    store = EndlessStore()
    rig = await open_cache(store=store, write_policy=policy, write_back_low_water=1.0, host_pages=64)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    store.rig = rig
    await rig.cache.admin.flush()
    assert store.num_more > 40
    store.rig = None
    if policy == "write_through":
        assert [await rig.check_stored(letters) for letters in ("ab", "cd", "ef")] == [2, 2, 2]
    rig.cache.audit()


async def test_flush_does_not_wait_for_what_is_asked_later(open_cache: Opener) -> None:
    """Two flushes around a commit return one after the other, each with its own write."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    first = asyncio.create_task(rig.cache.admin.flush())
    await store.arrived()
    await rig.serve("cd", prefetch=False)
    await turns()
    second = asyncio.create_task(rig.cache.admin.flush())
    await turns()
    store.let_in("write")
    await store.arrived()
    await turns()
    assert (first.done(), second.done()) == (True, False)
    store.open()
    await second
    assert [await rig.check_stored(letters) for letters in ("ab", "cd")] == [2, 2]


async def test_flush_follows_what_is_pending_through_all_stages(open_cache: Opener) -> None:
    """Behind a running forward flush waits for it, then for the copy, then for the write."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    rig.virtual.auto = False
    fence = rig.cache.host_fence()
    with rig.lease("abc") as lease:
        await rig.forward(lease, await lease.load())
        lease.commit(12, after=fence)
        to_host = asyncio.create_task(rig.cache.admin.flush(Tier.HOST))
        to_store = asyncio.create_task(rig.cache.admin.flush())
        await turns()
        assert (rig.where("abc"), to_host.done(), to_store.done()) == ("ddd", False, False)
        fence.set()
        await turns()
        assert (rig.where("abc"), to_host.done(), to_store.done()) == ("bbb", False, False)
        rig.virtual.advance_all()
        await to_host
        await store.arrived()
        await turns()
        assert not to_store.done()
        store.open()
        await to_store
    assert await rig.check_stored("abc") == 3


async def test_a_request_that_fails_or_is_dropped_is_over(open_cache: Opener) -> None:
    """Flush returns when a write raised, when one hung beyond its deadline, and when the store was taken away."""
    rig = await open_cache(store=FlakyStore(MemoryStore(), "write", error=OSError("no"), at=None))
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    assert rig.counters["backup_pages_failed"] == 2

    hung = FaultAt(MemoryStore(), "write", None, "hang")
    rig = await open_cache(store=hung)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    await driven(rig.cache.admin.flush(), rig.clock)
    assert rig.counters["backups_skipped_store_hung"] == 1
    hung.release()

    held = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=held)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    flushing = asyncio.create_task(rig.cache.admin.flush())
    await held.arrived()
    await turns()
    assert not flushing.done()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await flushing
    assert rig.counters["backups_dropped"] == 2
    held.open()
    await detaching


async def test_flush_covers_what_is_written_for_a_new_store(open_cache: Opener) -> None:
    """A flush after an attach returns when all that was on the host is in the store."""
    rig = await open_cache(host_pages=64)
    prompts = [letter + "xyz" for letter in "abcdef"]
    for letters in prompts:
        await rig.serve(letters)
    store = MemoryStore()
    await rig.cache.admin.attach_store(store)
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters, store) for letters in prompts] == [4] * 6


async def test_a_new_store_is_caught_up_with_under_endless_traffic(open_cache: Opener) -> None:
    """What was on the host before the store came is written although requests never stop bringing more."""
    rig = await open_cache(host_pages=200)
    prompts = [letter + "xyz" for letter in "abcdef"]
    for letters in prompts:
        await rig.serve(letters)
    store = EndlessStore()
    await rig.cache.admin.attach_store(store)
    store.rig = rig
    await rig.cache.admin.flush()
    assert store.num_more > 40
    store.rig = None
    assert [await rig.check_stored(letters, store) for letters in prompts] == [4] * 6


async def test_flush_of_an_idle_cache(open_cache: Opener) -> None:
    """With nothing on its way, with and without a store, flush returns at once."""
    for store in (None, MemoryStore()):
        rig = await open_cache(store=store)
        for tier in (Tier.HOST, Tier.STORE):
            await rig.cache.admin.flush(tier)


async def test_flush_of_a_failed_cache(open_cache: Opener) -> None:
    """After a bug nothing is written any more, and flush does not wait for it."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    for letters in ("ab", "cd"):
        await rig.serve(letters, prefetch=False)
    flushing = asyncio.create_task(rig.cache.admin.flush())
    await store.arrived()
    rig.ctx.fail(RuntimeError("a bug"))
    await flushing
    store.open()
    await rig.cache.admin.flush()
