"""What a running move reads or writes stays its own until it has really ended, whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hicache_async import PrefetchPolicy, PrefixLease
from hicache_async.flows.prefetch import Prefetch
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing._exam_store import ScriptedStore, comes_late
from tests.behaviour.tools import AT_EVICTION, num_pins
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, on_host, turns

pytestmark = pytest.mark.asyncio

End = Callable[[Rig, PrefixLease, Prefetch, "asyncio.Task[object]"], Awaitable[None]]
"""Ends a request that waits for a read."""


async def by_stop(rig: Rig, lease: PrefixLease, prefetch: Prefetch, waiting: asyncio.Task[object]) -> None:
    assert prefetch.stop() == 2 * PAGE_TOKENS


async def by_cancel(rig: Rig, lease: PrefixLease, prefetch: Prefetch, waiting: asyncio.Task[object]) -> None:
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    prefetch.stop()


async def by_release(rig: Rig, lease: PrefixLease, prefetch: Prefetch, waiting: asyncio.Task[object]) -> None:
    lease.release()


async def by_deadline(
    rig: Rig, lease: PrefixLease, prefetch: Prefetch, waiting: asyncio.Task[object]
) -> None:
    rig.clock.advance(0.05)


async def by_store_timeout(
    rig: Rig, lease: PrefixLease, prefetch: Prefetch, waiting: asyncio.Task[object]
) -> None:
    rig.clock.advance(rig.ctx.config.store_timeout_s)


ENDS: dict[str, tuple[End, PrefetchPolicy]] = {
    "stop": (by_stop, PrefetchPolicy.best_effort()),
    "cancel": (by_cancel, PrefetchPolicy.wait_complete()),
    "release": (by_release, PrefetchPolicy.wait_complete()),
    "deadline": (by_deadline, PrefetchPolicy.timeout(0.05, 0.0, 0.05)),
    "store timeout": (by_store_timeout, PrefetchPolicy.wait_complete()),
}


@pytest.mark.every_loop
@pytest.mark.parametrize("end", ENDS)
async def test_a_read_keeps_its_pages_until_it_has_ended(open_cache: Opener, end: str) -> None:
    """The request is answered with what had arrived; the pages of the late read are nobody's before it is over."""
    finish, policy = ENDS[end]
    store = ScriptedStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=6, store_batch_pages=2)
    for letters in ("abcd", "uv", "wx"):
        await rig.put_in_store(letters)
    store.script = lambda verb, number: comes_late if (verb, store.calls["read"]) == ("read", 2) else None
    lease = rig.lease("abcd")
    prefetch = lease.start_prefetch(policy)
    waiting: asyncio.Task[object] = asyncio.create_task(prefetch.settled())
    while not store.num_waiting:  # noqa: ASYNC110 - until the second of two reads is under way
        await asyncio.sleep(0)
    await finish(rig, lease, prefetch, waiting)
    await turns()
    rig.clock.advance(1.0)  # the moment that a stopped prefetch waits for the page in hand
    await turns()
    assert waiting.done()
    if not waiting.cancelled():
        assert waiting.result().fetched_tokens == 2 * PAGE_TOKENS  # type: ignore[attr-defined]
    lease.release()
    for _ in range(
        2
    ):  # six pages, of which the read keeps two: others get along with four, and never with more
        for letters in ("uv", "wx"):
            await rig.serve(letters)
            rig.check_local(letters)
            assert rig.cache.stats().host.in_hops == 2
    store.open()
    await turns()
    for letters in ("uv", "wx", "abcd"):
        rig.check_local(letters)
    stats = rig.cache.stats().host
    assert (stats.in_hops, stats.free + stats.in_tree) == (0, 6)
    assert rig.ctx.prefetch_pages == 0 and num_pins(rig) == 0
    assert (await rig.serve("abcd")).tokens >= 2 * PAGE_TOKENS


@pytest.mark.every_loop
async def test_who_needs_the_pages_of_a_late_read_goes_without_them(open_cache: Opener) -> None:
    """With the whole host in a read that outlives its request nobody gets a page of it, and nobody waits for one."""
    store = ScriptedStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=2)
    for letters in ("ab", "uv"):
        await rig.put_in_store(letters)
    store.script = lambda verb, number: comes_late if (verb, store.calls["read"]) == ("read", 1) else None
    with rig.lease("ab") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.best_effort())
        while not store.num_waiting:  # noqa: ASYNC110 - until the read is under way
            await asyncio.sleep(0)
        prefetch.stop()
    assert (await rig.serve("uv")).tokens == 0
    assert rig.cache.stats().host.in_hops == 2
    rig.check_local("uv")
    store.open()
    await turns()
    assert rig.cache.stats().host.in_hops == 0
    await rig.serve("uv")
    await rig.cache.admin.flush()
    assert rig.where("uv") == "bb"
    rig.check_local("uv")


@pytest.mark.parametrize("num_host_pages", [2, 3])
async def test_a_load_takes_no_page_of_its_own_source(open_cache: Opener, num_host_pages: int) -> None:
    """A load into a device full of what the host has no room for brings all it may, and loses no page of its own."""
    rig = await on_host(
        open_cache,
        "ab",
        device_pages=2,
        host_pages=num_host_pages,
        prefetch_policy="wait_complete",
        **AT_EVICTION,
    )
    rig.virtual.auto = True
    with rig.lease("CD", whole=True) as dirty:
        await dirty.load(total_tokens=0)
        dirty.allocate_nowait(2 * PAGE_TOKENS)
        rig.compute(dirty, 2 * PAGE_TOKENS)
        dirty.commit(2 * PAGE_TOKENS)
    assert (rig.where("ab"), rig.where("CD")) == ("hh", "dd")
    with rig.lease("ab") as lease:
        loading = await lease.load(total_tokens=2 * PAGE_TOKENS)
        await loading.finished()
        assert loading.tokens == 2 * PAGE_TOKENS
        rig.check(lease, loading.tokens)
        rig.cache.audit()
        rig.check_local("ab")
    assert rig.where("CD") == "h" * (num_host_pages - 2)
    rig.check_local("CD")
