"""Prefetches in a queue: few use the store at once, the others cost next to nothing and can end at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from hicache_async import ConfigError, PrefetchPolicy, PrefixLease, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from hicache_async.types import StopToken
from tests.flows.rig import Opener, Rig, turns
from tests.flows.stores import PageByPageStore, RecordingStore

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

BEST_EFFORT = PrefetchPolicy.best_effort()
PROMPTS = [chr(0x1000 + 2 * number) + chr(0x1001 + 2 * number) for number in range(100)]
"""Prompts of two pages that share none."""


async def many(open_cache: Opener, count: int, *, held: str = "count_prefix", **options: object) -> Rig:
    """Open a cache whose store has ``count`` of the prompts and holds each call of a verb."""
    rig = await open_cache(store=HeldStore(MemoryStore(), {held}), host_pages=400, **options)
    for letters in PROMPTS[:count]:
        await rig.put_in_store(letters)
    return rig


def held_store(rig: Rig) -> HeldStore:
    assert isinstance(rig.store, HeldStore)
    return rig.store


async def test_a_bounded_number_use_the_store_at_once(open_cache: Opener) -> None:
    """Of a hundred prefetches four ask or read at any time, and all are served in the end."""
    rig = await many(open_cache, 100, max_prefetches_in_flight=4)
    store = held_store(rig)
    store.hold("read")
    leases = [rig.lease(letters) for letters in PROMPTS]
    waiting = asyncio.gather(*(lease.prefetch(BEST_EFFORT) for lease in leases))
    while not waiting.done():
        await turns(5)
        assert len(store.waiting) <= 4
        assert sum(hop.name.startswith("store.") for hop in rig.ctx.hops.live) <= 4
        store.let_in("count_prefix")
        store.let_in("read")
    assert {result.stop for result in await waiting} == {Stop.COMPLETE}
    assert [result.fetched_tokens for result in await waiting] == [8] * 100
    for lease in leases:
        lease.release()


async def test_one_that_waits_has_neither_task_nor_timer(open_cache: Opener) -> None:
    """A hundred that wait for a slot need no task and no timer more than one does."""
    rig = await many(open_cache, 100, max_prefetches_in_flight=1)
    await turns()
    first = rig.lease(PROMPTS[0])
    first.start_prefetch()
    await held_store(rig).arrived()
    tasks, timers = len(asyncio.all_tasks()), rig.clock.pending
    leases = [rig.lease(letters) for letters in PROMPTS[1:]]
    for lease in leases:
        lease.start_prefetch()
    await turns()
    assert (len(rig.ctx.admission), len(rig.ctx.deadlines)) == (99, 101)  # each its own, and that of the call
    assert (len(asyncio.all_tasks()), rig.clock.pending) == (tasks, timers)
    for lease in (first, *leases):
        lease.release()
    assert (len(rig.ctx.admission), rig.clock.pending) == (0, 0)


# Ending while it waits


async def queued(open_cache: Opener) -> tuple[Rig, PrefixLease, PrefixLease]:
    """Return a cache with one slot, who has it, and a lease whose prefetch would have to wait."""
    rig = await many(open_cache, 2, max_prefetches_in_flight=1)
    holder, lease = rig.lease(PROMPTS[0]), rig.lease(PROMPTS[1])
    holder.start_prefetch(BEST_EFFORT)
    await held_store(rig).arrived()
    return rig, holder, lease


async def check_the_queue_goes_on(rig: Rig, holder: PrefixLease, lease: PrefixLease) -> None:
    """Check that what ended asked nothing, and that its prompt and the slot are there for the next one."""
    store = held_store(rig)
    assert len(rig.ctx.admission) == 0
    rig.cache.audit()
    store.open()
    lease.release()
    await turns()
    assert store.calls["count_prefix"] == 1
    with rig.lease(PROMPTS[1]) as again:
        assert (await again.prefetch()).fetched_tokens == 8
    holder.release()


async def test_stopped_while_it_waits(open_cache: Opener) -> None:
    """stop() ends one that waits for a slot in the same call, and its waiter hears in the next turn."""
    rig, holder, lease = await queued(open_cache)
    prefetch = lease.start_prefetch()
    waiting = asyncio.create_task(prefetch.settled())
    await turns()
    assert prefetch.stop() == 0
    await turns(2)
    assert waiting.done() and (await waiting).stop is Stop.STOPPED
    assert rig.unfulfilled() == {Stop.STOPPED: 8}
    await check_the_queue_goes_on(rig, holder, lease)


async def test_a_deadline_while_it_waits(open_cache: Opener) -> None:
    """The clock starts at prefetch(), not at the slot."""
    rig, holder, lease = await queued(open_cache)
    waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.timeout(base_s=1, per_ki_token_s=0)))
    await turns()
    rig.clock.advance(1)
    assert (await waiting).stop is Stop.DEADLINE
    await check_the_queue_goes_on(rig, holder, lease)


async def test_cancelled_while_it_waits(open_cache: Opener) -> None:
    """A cancelled waiter takes its prefetch out of the queue."""
    rig, holder, lease = await queued(open_cache)
    waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.wait_complete()))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await check_the_queue_goes_on(rig, holder, lease)


async def test_released_while_it_waits(open_cache: Opener) -> None:
    """A released lease leaves the queue at once."""
    rig, holder, lease = await queued(open_cache)
    lease.start_prefetch()
    await turns()
    lease.release()
    await check_the_queue_goes_on(rig, holder, lease)


async def test_detached_while_it_waits(open_cache: Opener) -> None:
    """When the store goes nobody waits for it any more."""
    rig, holder, lease = await queued(open_cache)
    prefetch = lease.start_prefetch(BEST_EFFORT)
    await turns()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    assert (await prefetch.settled()).stop is Stop.DETACHED
    assert len(rig.ctx.admission) == 0
    held_store(rig).open()
    await detaching
    holder.release()
    lease.release()


async def test_one_waiter_of_several_is_cancelled(open_cache: Opener) -> None:
    """Who waits for a prefetch is nothing to the others who do."""
    rig, holder, lease = await queued(open_cache)
    prefetch = lease.start_prefetch(BEST_EFFORT)
    waiting = [asyncio.create_task(prefetch.settled()) for _ in range(3)]
    await turns()
    waiting[1].cancel()
    await turns()
    held_store(rig).open()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[0] == results[2] == await prefetch.settled()
    holder.release()
    lease.release()


async def test_waiters_that_have_gone_take_no_room(open_cache: Opener) -> None:
    """However often somebody begins to wait and gives up, nothing of that stays with the prefetch."""
    rig, holder, lease = await queued(open_cache)
    prefetch = lease.start_prefetch(BEST_EFFORT)
    for _ in range(20):
        waiting = asyncio.create_task(prefetch.settled())
        await turns(2)
        waiting.cancel()
        await turns(2)
    assert prefetch._waiters == []
    lease.release()
    await check_the_queue_goes_on(rig, holder, lease)


async def test_what_became_local_while_it_waited(open_cache: Opener) -> None:
    """One whose pages came by other means needs nothing of the store when its turn comes."""
    rig, holder, lease = await queued(open_cache)
    prefetch = lease.start_prefetch(BEST_EFFORT)
    await rig.serve(PROMPTS[1], prefetch=False)
    held_store(rig).open()
    assert (await prefetch.settled()).stop is Stop.NOTHING_MISSING
    assert held_store(rig).calls["count_prefix"] == 1
    holder.release()
    lease.release()


async def test_what_is_local_does_not_queue(open_cache: Opener) -> None:
    """A prefetch that has nothing to ask for ends at once, whoever waits."""
    rig, holder, lease = await queued(open_cache)
    await rig.serve("ab", prefetch=False)
    with rig.lease("ab") as local:
        waiting = asyncio.create_task(local.prefetch())
        await asyncio.sleep(0)
        assert waiting.done() and (await waiting).stop is Stop.NOTHING_MISSING
    lease.start_prefetch()
    lease.release()
    await check_the_queue_goes_on(rig, holder, lease)


# In which order


class OrderStore(RecordingStore):
    """Remember the priority of each read as well."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.priorities: list[int] = []
        self.tokens: list[StopToken] = []

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.priorities.append(stop.priority)
        self.tokens.append(stop)
        return await super().read(keys, into, stop)


async def test_served_by_priority_and_in_order(open_cache: Opener) -> None:
    """With one slot the higher priority is served first, equal ones in order, each looked for and read in one go."""
    store = OrderStore()
    rig = await open_cache(store=store, max_prefetches_in_flight=1)
    order = [(0, "ab"), (5, "cd"), (-1, "ef"), (5, "gh"), (0, "ij")]
    for _, letters in order:
        await rig.put_in_store(letters)
    leases = [rig.lease(letters) for _, letters in order]
    started = [
        lease.start_prefetch(priority=priority) for lease, (priority, _) in zip(leases, order, strict=True)
    ]
    for prefetch in started:
        assert (await prefetch.settled()).stop is Stop.COMPLETE
    assert store.priorities == [5, 5, 0, 0, -1]
    by_name = {
        tuple(rig.ctx.keys.keys(lease._holding.hashes(2)[:2])): letters
        for lease, (_, letters) in zip(leases, order, strict=True)
    }
    assert [by_name[tuple(keys)] for keys in store.keys["read"]] == ["cd", "gh", "ab", "ij", "ef"]
    assert [by_name[tuple(keys)] for keys in store.keys["count_prefix"]] == ["cd", "gh", "ab", "ij", "ef"]
    for lease in leases:
        lease.release()


async def test_a_priority_that_is_no_integer_is_refused(open_cache: Opener) -> None:
    """A priority that could not be compared is the caller's mistake, and the lease may prefetch afterwards."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("ab") as lease:
        for priority in ("high", 1.5, None, 1 << 70):
            with pytest.raises(ConfigError, match="priority is"):
                lease.start_prefetch(priority=priority)  # type: ignore[arg-type]
        await lease.prefetch(priority=-3)


async def test_who_joins_raises_the_priority_of_a_read(open_cache: Opener) -> None:
    """A read is as urgent as the most urgent of those who wait for it, from the moment that one joins."""
    store = OrderStore()
    rig = await open_cache(store=HeldStore(store, {"read"}), store_batch_pages=2)
    held = held_store(rig)
    await rig.put_in_store("abcd")
    leases = [rig.lease("abcd") for _ in range(3)]
    held.open("read")
    held.hold("read")
    prefetches = [leases[0].start_prefetch(BEST_EFFORT, priority=1)]
    await held.arrived()
    for lease, priority in zip(leases[1:], (7, 3), strict=True):
        prefetches.append(lease.start_prefetch(BEST_EFFORT, priority=priority))
        await turns()
    held.open()
    for prefetch in prefetches:
        assert (await prefetch.settled()).fetched_tokens == 16
    assert store.priorities == [7, 7]  # the call at the door, and the next batch
    for lease in leases:
        lease.release()


# Large and small


async def test_a_small_one_is_not_stuck_behind_large_ones(open_cache: Opener) -> None:
    """While the store is slow with as many large prefetches as there are slots, a small one is served."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=400, max_prefetches_in_flight=4, store_batch_pages=2)
    prompts = ["".join(chr(0x2000 + 40 * number + page) for page in range(40)) for number in range(6)]
    for letters in (*prompts, "ab"):
        await rig.put_in_store(letters)
    large = [rig.lease(letters) for letters in prompts]
    for lease in large:
        lease.start_prefetch(BEST_EFFORT, priority=9)
    await turns(200)
    assert store.calls["read"] == 3
    with rig.lease("ab") as lease:
        small = asyncio.create_task(lease.prefetch(BEST_EFFORT))
        await turns()
        assert store.calls["read"] == 4
        store.let_read(3 * 2 + 2)  # a batch of each large one, no more, comes before
        await turns(200)
        assert small.done() and (await small).fetched_tokens == 8
    for lease in large:
        lease.release()
    store.let_read(1000)


async def test_concurrent_prefetches_overlap(open_cache: Opener) -> None:
    """Ten prefetches are at the door of the store together, with their questions and then with their reads."""
    rig = await many(open_cache, 10)
    store = held_store(rig)
    store.hold("read")
    leases = [rig.lease(letters) for letters in PROMPTS[:10]]
    waiting = asyncio.gather(*(lease.prefetch(BEST_EFFORT) for lease in leases))
    await store.arrived(10, "count_prefix")
    store.open("count_prefix")
    await store.arrived(10, "read")
    store.open()
    assert [result.fetched_tokens for result in await waiting] == [8] * 10
    for lease in leases:
        lease.release()
