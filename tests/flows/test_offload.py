"""Offload: at commit, behind the forward's fence, bounded, and never trusted when it failed."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from hicache_async import CapacityError, CpuDevice, Tier
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import Opener, Rig, turns

pytestmark = pytest.mark.asyncio

Logs = list[MutableMapping[str, Any]]


async def computed(rig: Rig, letters: str, *, commit: bool = True, fenced: bool = False):  # type: ignore[no-untyped-def]
    """Compute a cold prompt; returns its lease and, if it was committed behind one, the unset fence."""
    lease = rig.lease(letters)
    await lease.load(wait_pending=False)
    lease.allocate_nowait(lease.num_tokens)
    rig.compute(lease)
    fence = rig.cache.host_fence() if fenced else None
    if commit:
        lease.commit(lease.num_tokens, after=fence)
    return lease, fence


async def test_committed_pages_reach_the_host(open_cache: Opener) -> None:
    """A commit under write_through copies the pages out, ancestors first, chunk by chunk."""
    rig = await open_cache()
    rig.virtual.auto = False
    lease, _ = await computed(rig, "abcdef", commit=False)
    for end in (8, 12, 12, 25):
        lease.commit(end)
    assert [len(copy.plan.device_pages) for copy in rig.virtual.pending] == [2, 1, 3]
    rig.cache.audit()
    rig.virtual.advance_all()
    await rig.cache.admin.flush(Tier.HOST)
    rig.check_local("abcdef")
    assert rig.counters["offloaded_pages"] == 6
    lease.release()


async def test_an_offload_waits_for_the_forward(open_cache: Opener) -> None:
    """Pages committed behind an unset host fence are copied out only when it is set; no copy is queued before."""
    rig = await open_cache(store=MemoryStore())
    lease, fence = await computed(rig, "abc", fenced=True)
    await turns()
    assert not rig.virtual.pending
    assert rig.where("abc") == "ddd"
    assert await rig.check_stored("abc") == 0
    rig.cache.audit()
    fence.set()
    await turns()
    await rig.cache.admin.flush()
    await rig.check_everywhere("abc")
    assert await rig.check_stored("abc") == 3
    lease.release()


async def test_a_long_forward_is_no_fault_of_the_store(open_cache: Opener, logs: Logs) -> None:
    """However long a forward takes, the store is not blamed, and what it computed is stored in the end."""
    rig = await open_cache(store=MemoryStore())
    pairs = [await computed(rig, letters, fenced=True) for letters in ("ab", "cd", "ef")]
    for _ in pairs:
        await turns()
        rig.clock.advance(60)
    await turns()
    for lease, fence in pairs:
        fence.set()
        lease.release()
    await turns()
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in ("ab", "cd", "ef")] == [2, 2, 2]
    blamed = [
        name for name, count in rig.counters.items() if count and ("store_" in name or "failed" in name)
    ]
    assert set(blamed) <= {"store_calls_count_prefix", "store_calls_write"}
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


async def test_two_chunks_behind_two_fences(open_cache: Opener) -> None:
    """Nodes that were committed behind different fences are copied out ancestors first: a later fence waits."""
    rig = await open_cache(write_policy="write_through_selective")
    lease, _ = await computed(rig, "abcd", commit=False)
    fences = [rig.cache.host_fence() for _ in range(2)]
    lease.commit(8, after=fences[0])
    lease.commit(16, after=fences[1])
    with rig.lease("abcd") as second:
        loading = await second.load()
        assert loading.tokens == 16
        assert not loading.done
        second.allocate_nowait(17)
        second.commit(16)
        fences[1].set()
        await turns()
        assert rig.where("abcd") == "dddd"
        fences[0].set()
        await turns()
        await loading.finished()
    lease.release()
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abcd") == "bbbb"
    rig.check_local("abcd")


async def test_a_failed_forward_takes_its_pages_along(open_cache: Opener) -> None:
    """When the host fence fails, what was committed behind it is no longer matched, in any tier."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("ab")
    lease = rig.lease("abcd")
    await lease.load()
    lease.allocate_nowait(17)
    rig.compute(lease, start=8)
    fence = rig.cache.host_fence()
    lease.commit(16, after=fence)
    assert rig.where("abcd") == "bbdd"
    with rig.lease("abcd") as follower:
        loading = await follower.load()
        assert loading.tokens == 16
        fence.fail(RuntimeError("out of luck"))
        with pytest.raises(RuntimeError, match="out of luck"):
            await loading.finished()
        await turns()
        assert rig.where("abcd") == "bb"
        rig.cache.audit()
    lease.release()
    rig.cache.audit()
    await rig.cache.admin.flush()
    assert rig.cache.stats().device.in_tree == rig.cache.stats().host.in_tree == 2
    assert await rig.check_stored("abcd") == 2
    assert rig.counters["doubted_pages"] == 2
    assert (await rig.serve("abcd")).tokens == 8


async def test_a_fence_that_has_failed_already(open_cache: Opener) -> None:
    """A commit behind a failed fence publishes nothing."""
    rig = await open_cache()
    lease, _ = await computed(rig, "abc", commit=False)
    fence = rig.cache.host_fence()
    fence.fail(RuntimeError("no"))
    assert lease.commit(13, after=fence) == 0
    assert rig.where("abc") == ""
    lease.release()
    assert rig.cache.stats().device.free == 16


async def test_released_pages_wait_for_the_forward(open_cache: Opener) -> None:
    """After release(after=fence) nobody gets the request's pages, private or shared, before the fence is set."""
    rig = await open_cache(device_pages=6)
    lease, _ = await computed(rig, "abc")
    await rig.cache.admin.flush(Tier.HOST)
    lease.extend([1, 2, 3, 4])
    lease.allocate_nowait(lease.num_tokens)
    pages = set(lease.pages.tolist())
    assert len(pages) == 5
    fence = rig.cache.host_fence()
    lease.release(after=fence)
    rig.cache.audit()
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        assert not set(other.allocate_nowait(4).pages.tolist()) & pages
        with pytest.raises(CapacityError, match="0 of 6 can be had"):
            other.allocate_nowait(8)
        fence.set()
        await turns()
        other.allocate_nowait(24)
        rig.cache.audit()
    assert rig.where("abc") == "hhh"
    rig.check_local("abc")


async def test_a_waiter_gets_pages_that_only_a_fence_kept(open_cache: Opener) -> None:
    """Committed pages whose forward is over go to who waits, with nothing else happening."""
    rig = await open_cache(device_pages=4, write_policy="write_through_selective")
    lease = rig.lease("abc")
    await lease.load()
    lease.allocate_nowait(12)
    rig.compute(lease, 12)
    fence = rig.cache.host_fence()
    lease.commit(12, after=fence)
    lease.release()
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        waiting = rig.ctx.loop.create_task(other.allocate(16))
        await turns()
        assert not waiting.done()
        fence.set()
        assert len((await waiting).pages) == 4


async def test_a_failed_copy_out(open_cache: Opener) -> None:
    """A failed copy leaves no host page to be matched; the device's own stay out of doubt's way, too."""
    rig = await open_cache(store=MemoryStore())
    rig.virtual.auto = False
    lease, _ = await computed(rig, "abc")
    rig.virtual.pending[0].fail(OSError("the bus is on fire"))
    await turns()
    assert rig.where("abc") == ""
    rig.cache.audit()
    lease.release()
    rig.cache.audit()
    assert rig.cache.stats().device.free == 16
    assert rig.cache.stats().host.free == 32
    assert rig.counters["failed_copies"] == 1
    rig.virtual.auto = True
    await rig.serve("abc")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abc") == 3


async def test_a_waiter_gets_pages_that_only_a_failed_copy_kept(open_cache: Opener) -> None:
    """The end of a copy frees its pages for who waits, however it ends."""
    rig = await open_cache(device_pages=4)
    rig.virtual.auto = False
    lease = rig.lease("abc")
    await lease.load()
    lease.allocate_nowait(12)
    rig.compute(lease, 12)
    lease.commit(12)
    lease.release()
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        waiting = rig.ctx.loop.create_task(other.allocate(16))
        await turns()
        assert not waiting.done()
        rig.virtual.pending[0].fail(OSError("no"))
        assert len((await waiting).pages) == 4


async def test_offloads_in_flight_are_bounded(open_cache: Opener) -> None:
    """A copy beyond max_offloads_in_flight is skipped and counted, and made up for at the next commit."""
    rig = await open_cache(max_offloads_in_flight=1)
    rig.virtual.auto = False
    first, _ = await computed(rig, "ab")
    second, _ = await computed(rig, "wx")
    assert rig.counters["offloads_skipped_queue_full"] == 1
    assert rig.where("wx") == "dd"
    rig.virtual.advance_all()
    await rig.cache.admin.flush(Tier.HOST)
    second.commit(8)
    rig.virtual.advance_all()
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("wx") == "bb"
    rig.check_local("wx")
    for lease in (first, second):
        lease.release()


async def test_a_full_host_takes_what_fits(open_cache: Opener) -> None:
    """A path longer than the host is copied as far as it fits, from its beginning, and the rest counted."""
    rig = await open_cache(host_pages=4)
    await rig.serve("abcdef")
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abcdef") == "bbbbdd"
    rig.check_local("abcdef")
    await rig.serve("abcdefg")
    assert rig.where("abcdefg") == "bbbbddd"
    assert rig.counters["offloads_skipped_no_host_room"] > 0
    rig.cache.audit()


async def test_a_preempted_request_keeps_its_work(open_cache: Opener) -> None:
    """release(offload=True) copies committed pages to the host whatever the policy."""
    rig = await open_cache(device_pages=4, write_policy="write_back")
    lease = rig.lease("abc")
    await rig.run(lease, prefetch=False)
    lease.release(offload=True)
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abc") == "bbb"
    rig.check_local("abc")
    assert (await rig.serve("abc")).books.device == 12


async def test_the_pages_of_a_copy_in_flight_are_nobodys_prey(open_cache: Opener) -> None:
    """While pages are copied out, neither tier evicts them."""
    rig = await open_cache(device_pages=4, host_pages=4)
    rig.virtual.auto = False
    lease, _ = await computed(rig, "abc")
    lease.release()
    with rig.lease("wx") as other:
        await other.load(total_tokens=0)
        with pytest.raises(CapacityError):
            other.allocate_nowait(8)
        assert rig.ctx.room.plan_room(Tier.HOST, 2).num_pages == 1
        assert rig.where("abc") == "bbb"
        rig.virtual.advance_all()
        await rig.cache.admin.flush(Tier.HOST)
        other.allocate_nowait(8)
        assert rig.where("abc") == "bbh"
        other.allocate_nowait(16)
    assert rig.where("abc") == "hhh"
    rig.check_local("abc")
    assert rig.cache.stats().dropped_tokens == {}


async def test_peeling_a_long_prompt_leaves_a_handful_of_nodes(open_cache: Opener) -> None:
    """A prompt that leaves the device page by page is one node again when its copies are at rest, and reads right."""
    letters = "".join(chr(ord("A") + page) for page in range(64))
    rig = await open_cache(
        device_pages=65, host_pages=64, write_policy="write_back", write_back_low_water=0.0
    )
    await rig.serve(letters)
    rig.virtual.auto = False
    with rig.lease("z" * 65) as other:
        await other.load(total_tokens=0)
        for num_pages in range(2, 66):
            other.allocate_nowait(num_pages * 4)
            if num_pages % 3 == 0:
                rig.virtual.advance_all()
                await turns()
        rig.virtual.advance_all()
        await rig.cache.admin.flush(Tier.HOST)
        rig.cache.audit()
        assert rig.where(letters) == "h" * 64
        root = rig.ctx.tree.roots[b""]
        assert len(list(root.subtree())) == 2
        rig.check_local(letters)
        assert rig.counters["offloaded_pages"] == 64
    rig.virtual.auto = True
    assert (await rig.serve(letters)).books.host == 256


async def test_a_forward_is_never_kept_from_its_own_pages(open_cache: Opener) -> None:
    """An eviction made for a forward is not queued behind a copy that waits for this very forward."""
    rig = await open_cache(device_pages=8, write_policy="write_back", device=CpuDevice())
    await rig.serve("ab")
    lease, fence = await computed(rig, "wxyz", fenced=True)
    lease.release(after=fence, offload=True)
    with rig.lease("ijk") as other:
        await other.load(total_tokens=0)
        allocation = other.allocate_nowait(12)
        await asyncio.to_thread(allocation.block)
        fence.set()
    await rig.cache.admin.flush()
    rig.check_local("wxyz")


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective"])
async def test_a_preempted_request_is_copied_when_its_forward_is_over(
    open_cache: Opener, write_policy: str
) -> None:
    """release(offload=True) behind an unset fence brings the pages to the host once it is set."""
    rig = await open_cache(write_policy=write_policy)
    lease, fence = await computed(rig, "abc", fenced=True)
    lease.release(after=fence, offload=True)
    await turns()
    assert rig.where("abc") == "ddd"
    fence.set()
    await turns()
    await rig.cache.admin.flush()
    assert rig.where("abc") == "bbb"
    rig.check_local("abc")
