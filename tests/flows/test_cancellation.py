"""However and whenever a caller is cancelled, nothing is lost, nobody is hurt, and the work succeeds afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

import anyio
import pytest

from hicache_async import PrefetchPolicy, PrefixLease
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, turns

pytestmark = pytest.mark.asyncio

Work = Callable[[], Coroutine[object, object, object]]
Cancel = Callable[[Work, int], Awaitable[bool]]
"""Start work, cancel it after so many turns of the loop, and tell whether it had not ended by then."""


async def natively(work: Work, num_turns: int) -> bool:
    task = asyncio.create_task(work())
    await turns(num_turns)
    was_running = not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return was_running


async def twice(work: Work, num_turns: int) -> bool:
    task = asyncio.create_task(work())
    await turns(num_turns)
    was_running = not task.done()
    task.cancel()
    await turns(1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return was_running


async def by_scope(work: Work, num_turns: int) -> bool:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await turns(num_turns)
            scope.cancel()
    return scope.cancelled_caught


async def by_timeout(work: Work, num_turns: int) -> bool:
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)
    was_running = False

    async def limited() -> None:
        with contextlib.suppress(TimeoutError):
            async with limit:
                await work()

    task = asyncio.create_task(limited())
    await turns(max(1, num_turns))
    if not task.done():
        was_running = True
        limit.reschedule(loop.time())
    await task
    return was_running


CANCELS = [natively, twice, by_scope, by_timeout]
MAX_TURNS = 200


async def check_all_given_back(rig: Rig) -> None:
    """Check that no request holds anything any more, and that the books close."""
    await turns()
    rig.cache.audit()
    stats = rig.cache.stats()
    assert (stats.leases, stats.device.leased, stats.device.in_hops, stats.host.in_hops) == (0, 0, 0, 0)
    assert rig.ctx.prefetch_pages == 0
    assert not rig.ctx.waits
    assert not rig.ctx.fetches


# A whole request, cancelled at every one of its awaits


@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_request_at_each_await(open_cache: Opener, cancel: Cancel) -> None:
    """A request may be cancelled at any turn of its life; the next one gets all of it, byte for byte."""
    for num_turns in range(MAX_TURNS):
        rig = await open_cache(store=MemoryStore(), store_batch_pages=1)
        await rig.put_in_store("abc")
        was_running = await cancel(lambda rig=rig: rig.serve("abcdef"), num_turns)  # type: ignore[misc]
        await check_all_given_back(rig)
        rig.check_local("abcdef")
        assert (await rig.serve("abcdef")).tokens >= 12
        await rig.cache.admin.flush()
        await rig.check_everywhere("abcdef")
        assert rig.where("abcdef") == "bbbbbb"
        if not was_running:
            assert num_turns > 5
            return
    raise AssertionError("the request never came to its end")


@pytest.mark.parametrize("cancel", CANCELS)
async def test_one_of_many_at_each_await(open_cache: Opener, cancel: Cancel) -> None:
    """Of many equal requests one may be cancelled at any turn: the others all get the right bytes, and nobody hangs."""
    for num_turns in range(0, 60, 3):
        rig = await open_cache(store=MemoryStore(), store_batch_pages=2, device_pages=32)
        await rig.put_in_store("abcd")
        others = [asyncio.create_task(rig.serve("abcdef")) for _ in range(3)]
        await cancel(lambda rig=rig: rig.serve("abcdef"), num_turns)  # type: ignore[misc]
        for served in await asyncio.gather(*others):
            assert served.tokens >= 16
        await check_all_given_back(rig)
        assert rig.counters["fetched_pages"] <= 4 + 2
        rig.check_local("abcdef")


# Each public coroutine, cancelled while it waits


@dataclass
class Waiting:
    """A coroutine of the API in the middle of its wait.

    Attributes:
        work: calls it; it waits until :attr:`end` lets it go.
        end: ends what it waits for.
        leases: to be released afterwards.
    """

    rig: Rig
    work: Work
    end: Callable[[], object]
    leases: list[PrefixLease] = field(default_factory=list)


async def prefetch(open_cache: Opener) -> Waiting:
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    return Waiting(rig, lambda: lease.prefetch(PrefetchPolicy.wait_complete()), store.open, [lease])


async def prefetch_while_counting(open_cache: Opener) -> Waiting:
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store)
    lease = rig.lease("abcd")
    return Waiting(rig, lease.prefetch, store.open, [lease])


async def settled(open_cache: Opener) -> Waiting:
    waiting = await prefetch(open_cache)
    started = waiting.leases[0].start_prefetch()
    return Waiting(waiting.rig, started.settled, waiting.end, waiting.leases)


async def load_behind_a_prefetch(open_cache: Opener) -> Waiting:
    waiting = await prefetch(open_cache)
    waiting.leases[0].start_prefetch()
    return Waiting(waiting.rig, waiting.leases[0].load, waiting.end, waiting.leases)


async def load_behind_an_announcement(open_cache: Opener) -> Waiting:
    rig = await open_cache()
    owner, lease = rig.lease("abcd"), rig.lease("abcd")
    await owner.load()
    return Waiting(rig, lease.load, owner.release, [owner, lease])


async def load_behind_a_slot(open_cache: Opener) -> Waiting:
    rig = await open_cache(store=MemoryStore(), max_loads_in_flight=1)
    leases = [rig.lease(letters) for letters in ("ab", "cd")]
    for lease, letters in zip(leases, ("ab", "cd"), strict=True):
        await rig.put_in_store(letters)
        await lease.prefetch()
    rig.virtual.auto = False
    await leases[0].load()
    return Waiting(rig, leases[1].load, rig.virtual.advance_all, leases)


async def loading(open_cache: Opener, *, layer: int | None = None) -> Waiting:
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    await lease.prefetch()
    rig.virtual.auto = False
    loading = await lease.load()
    work = loading.finished if layer is None else lambda: loading.ready(layer)
    return Waiting(rig, work, rig.virtual.advance_all, [lease])


async def loading_finished(open_cache: Opener) -> Waiting:
    return await loading(open_cache)


async def loading_ready(open_cache: Opener) -> Waiting:
    return await loading(open_cache, layer=1)


async def allocate(open_cache: Opener) -> Waiting:
    rig = await open_cache(device_pages=8)
    holder, lease = rig.lease("abcd"), rig.lease("wxyz")
    for each, pages in ((holder, 6), (lease, 1)):
        await each.load(total_tokens=pages * PAGE_TOKENS)
        each.allocate_nowait(pages * PAGE_TOKENS)
    return Waiting(rig, lambda: lease.allocate(4 * PAGE_TOKENS), holder.release, [holder, lease])


async def flush(open_cache: Opener) -> Waiting:
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    return Waiting(rig, rig.cache.admin.flush, store.open)


async def fence(open_cache: Opener) -> Waiting:
    rig = await open_cache()
    fence = rig.cache.host_fence()
    lease = rig.lease("abcd")
    loading = await lease.load()
    await rig.forward(lease, loading)
    lease.commit(17, after=fence)
    follower = rig.lease("abcd")
    behind = await follower.load()
    return Waiting(rig, behind.finished, fence.set, [lease, follower])


WAITS = [
    prefetch,
    prefetch_while_counting,
    settled,
    load_behind_a_prefetch,
    load_behind_an_announcement,
    load_behind_a_slot,
    loading_finished,
    loading_ready,
    allocate,
    flush,
    fence,
]


@pytest.mark.every_loop
@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("wait", WAITS)
async def test_a_coroutine_that_waits(
    open_cache: Opener, wait: Callable[[Opener], Awaitable[Waiting]], cancel: Cancel
) -> None:
    """The cancel arrives, the books close before and after release, and the cache serves the same prompt at once."""
    waiting = await wait(open_cache)
    rig = waiting.rig
    await turns()
    assert await cancel(waiting.work, 30)
    rig.cache.audit()
    waiting.end()
    await turns()
    rig.cache.audit()
    for lease in waiting.leases:
        lease.release()
    rig.virtual.auto = True
    rig.virtual.advance_all()
    await check_all_given_back(rig)
    for letters in ("abcd", "cd", "wxyz"):
        await rig.serve(letters)
        rig.check_local(letters)
    await rig.cache.admin.flush()
    await check_all_given_back(rig)


@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("wait", WAITS)
async def test_cancelled_before_the_first_step(
    open_cache: Opener, wait: Callable[[Opener], Awaitable[Waiting]], cancel: Cancel
) -> None:
    """A cancel that comes before the coroutine has begun leaves nothing to clean up."""
    waiting = await wait(open_cache)
    rig = waiting.rig
    await cancel(waiting.work, 0)
    rig.cache.audit()
    for lease in waiting.leases:
        lease.release()
    waiting.end()
    rig.virtual.auto = True
    rig.virtual.advance_all()
    await check_all_given_back(rig)


@pytest.mark.parametrize("wait", WAITS)
async def test_released_instead_of_cancelled(
    open_cache: Opener, wait: Callable[[Opener], Awaitable[Waiting]]
) -> None:
    """Releasing the leases of a waiting coroutine frees everything, whatever the coroutine makes of it."""
    waiting = await wait(open_cache)
    rig = waiting.rig
    task = asyncio.ensure_future(waiting.work())
    await turns()
    for lease in reversed(waiting.leases):
        lease.release()
    rig.cache.audit()
    waiting.end()
    rig.virtual.auto = True
    rig.virtual.advance_all()
    await turns()
    assert task.done()
    task.exception()
    await check_all_given_back(rig)


async def test_a_slot_given_and_cancelled_in_the_same_turn(open_cache: Opener) -> None:
    """A cancel that meets the slot hands it on."""
    rig = await open_cache(store=MemoryStore(), max_loads_in_flight=1)
    leases = [rig.lease(letters) for letters in ("ab", "cd", "ef")]
    for lease, letters in zip(leases, ("ab", "cd", "ef"), strict=True):
        await rig.put_in_store(letters)
        await lease.prefetch()
    rig.virtual.auto = False
    await leases[0].load()
    second, third = (asyncio.create_task(lease.load()) for lease in leases[1:])
    await turns()
    rig.virtual.advance_all()
    while rig.ctx.hops.live:  # noqa: ASYNC110 - until the first load has settled, and given its slot
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (await third).tokens == 8
    rig.virtual.advance_all()
    for lease in leases:
        lease.release()
    await check_all_given_back(rig)


async def test_waiters_cancelled_in_any_order(open_cache: Opener) -> None:
    """Of many waiters for pages half are cancelled and half are served, and every page is accounted for all along."""
    rig = await open_cache(device_pages=16)
    holder = rig.lease("abcd")
    await holder.load(total_tokens=64)
    holder.allocate_nowait(64)
    leases = [rig.lease(chr(ord("A") + number) + "z") for number in range(12)]
    for lease in leases:
        await lease.load(total_tokens=0)
    tasks = [asyncio.create_task(lease.allocate(12)) for lease in leases]
    await turns()
    for number in (0, 11, 4, 5, 8, 2):
        tasks[number].cancel()
        await turns(2)
        rig.cache.audit()
    holder.release()
    for number, task in enumerate(tasks):
        if number in (0, 11, 4, 5, 8, 2):
            assert task.cancelled()
        else:
            assert len((await task).pages) == 3
        leases[number].release()
        rig.cache.audit()
    await check_all_given_back(rig)
