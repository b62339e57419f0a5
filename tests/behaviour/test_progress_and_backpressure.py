"""Everything comes to its end by itself, nothing waits for what it does not need, and every queue has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from hicache_async import PrefetchPolicy, PrefixLease, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore
from tests.flows.rig import Opener, Rig, prefetched, turns
from tests.flows.stores import PageByPageStore
from tests.flows.test_cancellation import check_all_given_back

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

BEST_EFFORT = PrefetchPolicy.best_effort()


# A prefetch given up in each of its stages


@dataclass
class Stage:
    """A prefetch of "abcd" in the middle of its life.

    Attributes:
        work: what its request waits for.
        let_go: lets everything that is held go on.
        others: leases of other requests.
    """

    rig: Rig
    lease: PrefixLease
    work: Awaitable[object]
    let_go: Callable[[], object]
    others: list[PrefixLease] = field(default_factory=list)


async def held_at(open_cache: Opener, verb: str, **options: object) -> tuple[Rig, HeldStore]:
    store = HeldStore(MemoryStore(), {verb})
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    await rig.put_in_store("abcd")
    await rig.put_in_store("wxyz")
    return rig, store


async def waiting_to_look(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "count_prefix", max_prefetches_in_flight=1)
    other, lease = rig.lease("wxyz"), rig.lease("abcd")
    other.start_prefetch(BEST_EFFORT)
    await store.arrived()
    return Stage(rig, lease, lease.prefetch(BEST_EFFORT), store.open, [other])


async def looking(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "count_prefix")
    lease = rig.lease("abcd")
    return Stage(rig, lease, lease.prefetch(BEST_EFFORT), store.open)


async def waiting_to_read(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "count_prefix", max_prefetches_in_flight=1)
    other, lease = rig.lease("wxyz"), rig.lease("abcd")
    work = asyncio.ensure_future(lease.prefetch(BEST_EFFORT))
    await store.arrived()
    other.start_prefetch(BEST_EFFORT, priority=1)
    store.let_in("count_prefix")
    await turns()
    assert rig.ctx.admission._small.head() == (0, True)
    return Stage(rig, lease, work, store.open, [other])


async def reading(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "read")
    lease = rig.lease("abcd")
    return Stage(rig, lease, lease.prefetch(BEST_EFFORT), store.open)


async def between_two_reads(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "read", store_batch_pages=1)
    lease = rig.lease("abcd")
    store.hold("read")
    work = asyncio.ensure_future(lease.prefetch(BEST_EFFORT))
    await store.arrived()
    store.let_in("read")
    await store.arrived()
    return Stage(rig, lease, work, store.open)


async def joined(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "read")
    other, lease = rig.lease("abcd"), rig.lease("abcd")
    other.start_prefetch(BEST_EFFORT)
    await store.arrived()
    return Stage(rig, lease, lease.prefetch(BEST_EFFORT), store.open, [other])


async def scattering(open_cache: Opener) -> Stage:
    rig, store = await held_at(open_cache, "read", host_layout="layer_first")
    lease = rig.lease("abcd")
    return Stage(rig, lease, lease.prefetch(BEST_EFFORT), store.open)


async def loading(open_cache: Opener) -> Stage:
    rig, _ = await held_at(open_cache, "write")
    lease = rig.lease("abcd")
    await lease.prefetch(BEST_EFFORT)
    rig.virtual.auto = False

    async def load() -> None:
        await (await lease.load()).finished()

    def let_go() -> None:
        rig.virtual.auto = True
        rig.virtual.advance_all()

    return Stage(rig, lease, load(), let_go)


STAGES = [waiting_to_look, looking, waiting_to_read, reading, between_two_reads, joined, scattering, loading]
MakeStage = Callable[[Opener], Awaitable[Stage]]


@pytest.mark.parametrize("make", STAGES)
async def test_a_request_that_goes_in_any_stage_leaves_nothing(open_cache: Opener, make: MakeStage) -> None:
    """Cancelled and released in any stage a request leaves no page, pin, slot or hop, and its prompt is served."""
    stage = await make(open_cache)
    rig = stage.rig
    waiting = asyncio.ensure_future(stage.work)
    await turns()
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stage.lease.release()
    rig.cache.audit()
    stage.let_go()
    for other in stage.others:
        other.release()
    await check_all_given_back(rig)
    assert (len(rig.ctx.admission), len(rig.ctx.deadlines)) == (0, 0)
    with rig.lease("abcd") as again:
        await again.prefetch(BEST_EFFORT)
        assert again._holding.match().local_pages == 4
        rig.check_local("abcd")


@pytest.mark.parametrize("make", STAGES)
async def test_what_was_given_up_ends_without_further_traffic(open_cache: Opener, make: MakeStage) -> None:
    """When the store answers after its only request has gone everything is given back, though nobody calls again."""
    stage = await make(open_cache)
    waiting = asyncio.ensure_future(stage.work)
    await turns()
    for lease in (stage.lease, *stage.others):
        lease.release()
    stage.let_go()
    await turns()
    await check_all_given_back(stage.rig)
    assert stage.rig.cache.stats().hops == 0
    assert waiting.done()
    waiting.exception()


# How it ends


async def test_nothing_done_of_nothing_known_is_not_complete(open_cache: Opener) -> None:
    """While the store has not even said what it has a prefetch that waits for all of it is not over."""
    rig, store = await held_at(open_cache, "count_prefix")
    with rig.lease("abcd") as lease:
        waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.wait_complete()))
        for _ in range(20):
            await turns(5)
            rig.clock.advance(0.1)
            assert not waiting.done()
        store.open()
        result = await waiting
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (16, 16, Stop.COMPLETE)


POLICIES = {
    "timeout": PrefetchPolicy.timeout(base_s=1, per_ki_token_s=0),
    "best_effort": BEST_EFFORT,
    "wait_complete": PrefetchPolicy.wait_complete(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [waiting_to_look, looking, reading, joined])
async def test_a_deadline_counts_in_any_stage(open_cache: Opener, make: MakeStage, policy: str) -> None:
    """Past its deadline timeout ends, whatever it waits for; the other two wait on and get all of it."""
    stage = await make(open_cache)
    rig = stage.rig
    asyncio.ensure_future(stage.work).cancel()
    await turns(2)
    with rig.lease("abcd") as lease:
        waiting = asyncio.create_task(lease.prefetch(POLICIES[policy]))
        await turns()
        rig.clock.advance(1.0)
        await turns()
        rig.clock.advance(0.02)  # the page in hand has its moment
        await turns()
        assert waiting.done() == (policy == "timeout")
        stage.let_go()
        result = await waiting
        if policy == "timeout":
            assert (result.fetched_tokens, result.stop) == (0, Stop.DEADLINE)
        else:
            assert (result.fetched_tokens, result.stop) == (16, Stop.COMPLETE)
    for each in (stage.lease, *stage.others):
        each.release()


async def test_a_deadline_leaves_the_caller_with_something(open_cache: Opener) -> None:
    """Two of four pages are there when the third hangs: two is the answer, and what comes later changes nothing."""
    store = HangingStore(MemoryStore(), "read", after_calls=2)
    rig = await open_cache(store=store, store_batch_pages=1)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.timeout(base_s=1, per_ki_token_s=0)))
        await store.hung()
        rig.clock.advance(1.0)
        await turns()
        rig.clock.advance(0.02)
        result = await waiting
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (16, 8, Stop.DEADLINE)
        served = await rig.run(lease, prefetch=False)
        assert (served.books.store, served.books.computed) == (8, 9)
        where = rig.where("abcd")
        store.release()
        await turns()
        assert rig.where("abcd") == where
        assert lease._prefetch is not None and await lease._prefetch.settled() == result
    await rig.cache.admin.flush()
    await check_all_given_back(rig)


# Nobody is stuck


async def test_the_last_request_reaches_the_store_without_another(open_cache: Opener) -> None:
    """What one request has computed is stored though nobody calls again, and another process finds it."""
    shared = MemoryStore()
    rig = await open_cache(store=shared)
    await rig.serve("abcd")
    await turns(200)
    other = await open_cache(store=shared)
    assert await prefetched(other, "abcd") == (16, 16, Stop.COMPLETE)


@pytest.mark.parametrize(("slots", "small_first"), [(2, True), (1, False)])
async def test_a_page_does_not_wait_for_a_hundred(open_cache: Opener, slots: int, small_first: bool) -> None:
    """With two slots one page is there long before a hundred slow ones; with one slot it waits its turn."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store, host_pages=200, max_prefetches_in_flight=slots, store_batch_pages=10)
    letters = "".join(chr(0x100 + page) for page in range(100))
    await rig.put_in_store(letters)
    await rig.put_in_store("z")
    large, small = rig.lease(letters), rig.lease("z")
    slow = asyncio.create_task(large.prefetch(BEST_EFFORT))
    await turns(200)
    quick = asyncio.create_task(small.prefetch(BEST_EFFORT))
    await turns()
    store.let_read(20)
    await turns(200)
    assert quick.done() == small_first
    assert not slow.done()
    store.let_read(100)
    assert ((await slow).fetched_tokens, (await quick).fetched_tokens) == (400, 4)
    large.release()
    small.release()


async def test_a_declined_prefetch_says_so_and_is_served_later(open_cache: Opener) -> None:
    """Of four equal prefetches with room for three the fourth is declined with its reason, and served afterwards."""
    rig = await open_cache(store=MemoryStore(), host_pages=24, prefetch_capacity_fraction=0.5)
    prompts = ("abcd", "ijkl", "qrst", "wxyz")
    for letters in prompts:
        await rig.put_in_store(letters)
    leases = [rig.lease(letters) for letters in prompts]
    results = [await lease.prefetch(BEST_EFFORT) for lease in leases]
    assert [result.stop for result in results] == [Stop.COMPLETE] * 3 + [Stop.RATE_LIMITED]
    assert rig.unfulfilled() == {Stop.RATE_LIMITED: 16}
    leases[0].release()
    assert await prefetched(rig, "wxyz") == (16, 16, Stop.COMPLETE)
    for lease in leases[1:]:
        lease.release()
    assert rig.ctx.prefetch_pages == 0
    assert not rig.ctx.charges


async def test_a_store_that_hangs_bounds_what_waits_to_be_written(open_cache: Opener) -> None:
    """However much is computed while no write ends, so many paths wait, the rest is counted and made up for."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, device_pages=64, host_pages=256, max_backups_pending=4)
    prompts = [chr(0x200 + number) + "z" for number in range(24)]
    for letters in prompts:
        await rig.serve(letters, prefetch=False)
        await turns()
        assert len(rig.cache._movers.backups) <= 4
    assert rig.counters["backups_skipped_queue_full"] >= len(prompts) - 5
    assert rig.cache.stats().hops <= 1
    store.open()
    await rig.cache.admin.flush()
    for letters in prompts:
        await rig.serve(letters, prefetch=False)
        await rig.cache.admin.flush()
        assert await rig.check_stored(letters) == 2
