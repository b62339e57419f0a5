"""Allocate: room that was promised, room in turn, and an error instead of a wait without end."""

from __future__ import annotations

import asyncio
import random

import pytest

from hicache_async import CapacityError, LeaseError, PrefixLease
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, turns

pytestmark = pytest.mark.asyncio


async def holder(rig: Rig, letters: str, num_pages: int) -> PrefixLease:
    """Start a request that holds ``num_pages`` and computes nothing yet."""
    lease = rig.lease(letters)
    await lease.load(total_tokens=num_pages * PAGE_TOKENS)
    lease.allocate_nowait(num_pages * PAGE_TOKENS)
    return lease


async def test_allocate_is_idempotent(open_cache: Opener) -> None:
    """Asking for what is held returns no page, asking for more returns only the new ones, in order."""
    rig = await open_cache()
    with rig.lease("abcdef") as lease:
        await lease.load()
        first = lease.allocate_nowait(5).pages.tolist()
        assert len(first) == 2
        for total in (0, 5, 8):
            assert lease.allocate_nowait(total).pages.tolist() == []
            assert (await lease.allocate(total)).pages.tolist() == []
        more = (await lease.allocate(17)).pages.tolist()
        assert len(more) == 3
        assert lease.pages.tolist() == first + more
        assert len(set(first + more)) == 5


async def test_the_reserve_is_nobody_elses(open_cache: Opener) -> None:
    """Within tokens + reserved_tokens allocate_nowait cannot fail, whoever asks in between."""
    rig = await open_cache()
    with rig.lease("abcd") as lease:
        loading = await lease.load(total_tokens=40)
        assert loading.reserved_tokens == 40
        with rig.lease("wxyz") as greedy:
            with pytest.raises(CapacityError):
                greedy_loading = await greedy.load(total_tokens=1000)
                assert greedy_loading.reserved_tokens == 24
                greedy.allocate_nowait(25)
            for total in range(1, 41):
                lease.allocate_nowait(total)


async def test_capacity_error_says_what_is_missing(open_cache: Opener) -> None:
    """The error names what is needed, what can be had, and what to do; nothing is taken."""
    rig = await open_cache(device_pages=8)
    first = await holder(rig, "abcd", 5)
    with rig.lease("wxyz") as lease:
        await lease.load(total_tokens=0)
        with pytest.raises(
            CapacityError, match="4 more device pages are needed to hold 4, 3 of 8 can be had"
        ):
            lease.allocate_nowait(16)
        assert rig.cache.stats().device.free == 3
        with pytest.raises(CapacityError, match="preempt a request"):
            await lease.allocate(9 * PAGE_TOKENS)
        rig.cache.audit()
    first.release()


async def test_cached_pages_make_room(open_cache: Opener) -> None:
    """What nobody holds is evicted for who computes, the oldest first."""
    rig = await open_cache(device_pages=8)
    await rig.serve("ab")
    await rig.serve("wx")
    await rig.cache.admin.flush()
    with rig.lease("ijkl") as lease:
        await lease.load(total_tokens=0)
        await lease.allocate(24)
    assert (rig.where("ab"), rig.where("wx")) == ("hh", "bb")


async def test_a_large_waiter_is_served_in_turn(open_cache: Opener) -> None:
    """64 pages are handed over page by page to the one at the head, however many small requests keep coming."""
    rig = await open_cache(device_pages=80)
    small = [await holder(rig, f"{chr(1000 + i)}z", 1) for i in range(80)]
    large = rig.lease("abcd")
    await large.load(total_tokens=0)
    waiting = asyncio.create_task(large.allocate(64 * PAGE_TOKENS))
    await turns()
    rng = random.Random(1)
    late: list[asyncio.Task[int]] = []

    async def another(number: int) -> int:
        with rig.lease(f"{chr(2000 + number)}z") as lease:
            await lease.load(total_tokens=0)
            await lease.allocate(PAGE_TOKENS)
            return number

    for number in range(64):
        assert not waiting.done()
        late.append(asyncio.create_task(another(number)))
        await turns(3)
        small.pop(rng.randrange(len(small))).release()
    assert len((await waiting).pages) == 64
    assert not any(task.done() for task in late)
    large.release()
    assert await asyncio.gather(*late) == list(range(64))
    for lease in small:
        lease.release()


async def test_waiters_are_served_in_order(open_cache: Opener) -> None:
    """A later and smaller waiter does not overtake."""
    rig = await open_cache(device_pages=8)
    first = await holder(rig, "abcd", 4)
    second = await holder(rig, "wxyz", 4)
    leases = [rig.lease(letters) for letters in ("ij", "kl")]
    for lease in leases:
        await lease.load(total_tokens=0)
    large, little = (
        asyncio.create_task(lease.allocate(pages * PAGE_TOKENS))
        for lease, pages in zip(leases, (5, 1), strict=True)
    )
    await turns()
    first.release()
    await turns()
    assert not large.done()
    assert not little.done()
    rig.cache.audit()
    second.release()
    assert [len((await task).pages) for task in (large, little)] == [5, 1]
    for lease in leases:
        lease.release()


async def test_when_all_wait_the_last_is_refused(open_cache: Opener) -> None:
    """If everybody who holds pages waits for more, the one who came last gets CapacityError and keeps what it had."""
    rig = await open_cache(device_pages=8)
    leases = [await holder(rig, letters, 4) for letters in ("ab", "wx")]
    waiting = [asyncio.create_task(lease.allocate(6 * PAGE_TOKENS)) for lease in leases]
    await turns()
    assert not waiting[0].done()
    with pytest.raises(CapacityError, match="every request that holds device pages waits for more"):
        await waiting[1]
    assert len(leases[1].pages) == 4
    rig.cache.audit()
    leases[1].release()
    assert len((await waiting[0]).pages) == 2
    leases[0].release()


async def test_one_alone_is_refused_at_once(open_cache: Opener) -> None:
    """Who waits for pages that nobody could ever give back is told so."""
    rig = await open_cache(device_pages=8)
    with rig.lease("abcdefgh") as lease:
        await lease.load()
        lease.allocate_nowait(32)
        rig.compute(lease)
        with pytest.raises(CapacityError):
            await lease.allocate(36)


async def test_a_hung_store_keeps_nobody_waiting_for_pages(open_cache: Opener) -> None:
    """A store call that hangs gives no device page back, so it does not count as hope."""
    store = HangingStore(MemoryStore(), "write")
    rig = await open_cache(store=store, device_pages=8)
    await rig.serve("A")
    await turns()
    assert store.num_hanging == 1
    leases = [await holder(rig, letters, 4) for letters in ("ab", "wx")]
    waiting = [asyncio.create_task(lease.allocate(6 * PAGE_TOKENS)) for lease in leases]
    await turns()
    with pytest.raises(CapacityError):
        await waiting[1]
    leases[1].release()
    await waiting[0]
    leases[0].release()
    store.release()


async def test_a_waiter_that_is_cancelled_passes_its_turn_on(open_cache: Opener) -> None:
    """The next in line is served once the cancelled one is out of the way, and gets its pages at release."""
    rig = await open_cache(device_pages=8)
    first = await holder(rig, "abcd", 5)
    second = await holder(rig, "wxyz", 3)
    head, tail = rig.lease("ij"), rig.lease("kl")
    for lease in (head, tail):
        await lease.load(total_tokens=0)
    leading = asyncio.create_task(head.allocate(6 * PAGE_TOKENS))
    following = asyncio.create_task(tail.allocate(2 * PAGE_TOKENS))
    await turns()
    second.release()
    await turns()
    assert not following.done()
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert not following.done()  # what the head had been given is still its own
    rig.cache.audit()
    head.release()
    assert len((await following).pages) == 2
    for lease in (first, tail):
        lease.release()
    assert rig.cache.stats().device.free == 8


async def test_a_cancelled_head_without_pages_lets_the_next_go(open_cache: Opener) -> None:
    """Pages that came free for a head that is gone by then go to the next."""
    rig = await open_cache(device_pages=8)
    first, second = await holder(rig, "abcd", 4), await holder(rig, "wxyz", 4)
    head, tail = rig.lease("ij"), rig.lease("kl")
    for lease in (head, tail):
        await lease.load(total_tokens=0)
    leading = asyncio.create_task(head.allocate(8 * PAGE_TOKENS))
    following = asyncio.create_task(tail.allocate(4 * PAGE_TOKENS))
    await turns()
    leading.cancel()
    first.release()
    assert len((await following).pages) == 4
    for lease in (second, head, tail):
        lease.release()


async def test_granted_and_cancelled_in_the_same_turn(open_cache: Opener) -> None:
    """A cancel that meets the grant loses no page: they stay with the lease until its release."""
    rig = await open_cache(device_pages=8)
    first = await holder(rig, "abcd", 8)
    with rig.lease("ij") as lease:
        await lease.load(total_tokens=0)
        waiting = asyncio.create_task(lease.allocate(4 * PAGE_TOKENS))
        await turns()
        first.release()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rig.cache.audit()
        assert len((await lease.allocate(4 * PAGE_TOKENS)).pages) == 4
    assert rig.cache.stats().device.free == 8


async def test_released_while_it_waits(open_cache: Opener) -> None:
    """A lease that is released while it waits for pages hears so, and the next is served."""
    rig = await open_cache(device_pages=8)
    first = await holder(rig, "abcd", 8)
    gone, tail = rig.lease("ij"), rig.lease("kl")
    for lease in (gone, tail):
        await lease.load(total_tokens=0)
    waiting = asyncio.create_task(gone.allocate(8 * PAGE_TOKENS))
    following = asyncio.create_task(tail.allocate(4 * PAGE_TOKENS))
    await turns()
    gone.release()
    with pytest.raises(LeaseError, match="released"):
        await waiting
    first.release()
    await following
    tail.release()


async def test_pages_that_come_back_behind_an_offload(open_cache: Opener) -> None:
    """Under write_back a waiter gets the pages of a victim together with the fence of its copy."""
    rig = await open_cache(device_pages=8, write_policy="write_back")
    await rig.serve("abcdef")
    rig.virtual.auto = False
    with rig.lease("wxyz") as lease:
        await lease.load(total_tokens=0)
        allocation = await lease.allocate(16)
        assert len(allocation.pages) == 4
        assert allocation.after is not None
        assert not allocation.after.passed()
        assert lease.allocate_nowait(16).after is not None
        rig.virtual.advance_all()
        assert allocation.after.passed()
        assert lease.allocate_nowait(16).after is None
        rig.check_local("abcdef")
