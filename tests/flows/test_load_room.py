"""A load waits for device pages whose copy to the host is under way, and for nothing else."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import PrefixLease
from tests.flows.rig import Opener, Rig, turns

pytestmark = pytest.mark.asyncio

SHORT = "load_tokens_without_device_room"


async def full_of_copies(open_cache: Opener) -> tuple[Rig, PrefixLease]:
    """Return a device whose pages are all being copied out, and a lease with a prefix on the host."""
    rig = await open_cache(device_pages=5, write_policy="write_through")
    await rig.serve("abc")
    rig.virtual.auto = False
    with rig.lease("vwxyz") as other:
        await other.load()
        allocation = other.allocate_nowait(20)
        allocation.block()
        rig.compute(other)
        other.commit(20)
    assert rig.where("vwxyz") == "bbbbb"
    return rig, rig.lease("abc")


async def test_pages_in_copy_are_waited_for(open_cache: Opener) -> None:
    """With every page in a running copy, load returns the whole prefix once the copy has ended."""
    rig, lease = await full_of_copies(open_cache)
    loading = asyncio.create_task(lease.load())
    await turns()
    assert not loading.done()
    rig.virtual.advance_all()
    assert (await loading).tokens == 12
    rig.virtual.advance_all()
    await loading.result().finished()
    rig.check(lease, 12)
    lease.release()


async def test_a_hung_copy_is_not_waited_for(open_cache: Opener) -> None:
    """A copy that does not end costs a load one second and the prefix, and fails nothing."""
    rig, lease = await full_of_copies(open_cache)
    loading = asyncio.create_task(lease.load())
    await turns()
    rig.clock.advance(1)
    assert (await loading).tokens == 0
    assert rig.counters[SHORT] == 12
    lease.release()
    rig.virtual.advance_all()


async def test_pages_of_other_requests_are_not_waited_for(open_cache: Opener) -> None:
    """With every page held by a request, load returns at once with what fits."""
    rig = await open_cache(device_pages=5, write_policy="write_through")
    await rig.serve("abc")
    with rig.lease("vwxyz") as other:
        await other.load()
        other.allocate_nowait(20).block()
        lease = rig.lease("abc")
        assert (await lease.load()).tokens == 0
        lease.release()


async def test_a_copy_behind_an_unset_fence_is_not_waited_for(open_cache: Opener) -> None:
    """A copy that waits for the engine's forward is left alone: the engine may be the one who loads."""
    rig = await open_cache(device_pages=5, write_policy="write_through")
    await rig.serve("abc")
    with rig.lease("vwxyz") as other:
        await other.load()
        other.allocate_nowait(20).block()
        rig.compute(other)
        fence = rig.cache.host_fence()
        other.commit(20, after=fence)
        other.release(after=fence)
        lease = rig.lease("abc")
        assert (await lease.load()).tokens == 0
        lease.release()
        fence.set()
        await rig.cache.admin.flush()


async def test_a_cancelled_wait_leaves_nothing(open_cache: Opener) -> None:
    """A load that is cancelled while it waits for room holds nothing after its release."""
    rig, lease = await full_of_copies(open_cache)
    loading = asyncio.create_task(lease.load())
    await turns()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    rig.cache.audit()
    lease.release()
    rig.virtual.advance_all()
    await rig.cache.admin.flush()
    rig.virtual.auto = True
    assert (await rig.serve("abc")).tokens == 12
