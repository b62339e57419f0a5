"""What a match finds, and what others may do meanwhile, in each state of a node and with each move in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from hicache_async import HostFence
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from hicache_async.types import Residency
from tests.flows.rig import Opener, Rig, on_host, turns

pytestmark = pytest.mark.asyncio


def residency(rig: Rig, letters: str) -> Residency:
    """Return which tiers hold a prompt of one node; GHOST where there is none."""
    nodes = [node for root in rig.ctx.tree.roots.values() for node in root.subtree() if node.parent]
    found = [node.residency for node in nodes if node.num_pages == len(letters)]
    return found[0] if rig.where(letters) else Residency.GHOST


async def on_device_only(open_cache: Opener) -> Rig:
    """Nothing copies it down."""
    rig = await open_cache(write_policy="write_back", write_back_low_water=0.0)
    await rig.serve("abc")
    return rig


async def on_device_and_host(open_cache: Opener) -> Rig:
    """It was copied at its commit."""
    rig = await open_cache(write_policy="write_through")
    await rig.serve("abc")
    await rig.cache.admin.flush()
    return rig


async def on_host_only(open_cache: Opener) -> Rig:
    """It was fetched and not loaded yet."""
    return await on_host(open_cache, "abc")


async def nowhere(open_cache: Opener) -> Rig:
    """It was evicted before anything copied it down."""
    rig = await open_cache(device_pages=4, write_policy="write_through_selective")
    await rig.serve("abc")
    await rig.serve("xyz")
    return rig


@pytest.mark.parametrize(
    ("make", "held_by", "device_pages", "local_pages"),
    [
        (on_device_only, Residency.DEVICE, 3, 3),
        (on_device_and_host, Residency.BOTH, 3, 3),
        (on_host_only, Residency.HOST, 0, 3),
        (nowhere, Residency.GHOST, 0, 0),
    ],
)
async def test_a_match_at_rest(
    open_cache: Opener,
    make: Callable[[Opener], Awaitable[Rig]],
    held_by: Residency,
    device_pages: int,
    local_pages: int,
) -> None:
    """What the device holds counts for both ends of a match, what only the host holds for one, a ghost for none."""
    rig = await make(open_cache)
    assert residency(rig, "abc") is held_by
    with rig.lease("abc") as lease:
        assert (lease.device_tokens, lease.local_tokens) == (4 * device_pages, 4 * local_pages)
        loading = await lease.load()
        assert loading.tokens == 4 * local_pages
        assert loading.loaded_tokens == 4 * (local_pages - device_pages)
        assert loading.done == (local_pages == device_pages)
        if rig.virtual.pending:
            rig.virtual.advance_all()
        rig.check(lease, loading.tokens)
    rig.cache.audit()


async def check_in_flight(rig: Rig, held_by: Residency, end: Callable[[], object], *, joins: bool) -> None:
    """A match counts what moves as there; who loads it waits, for the same move or for one behind it."""
    assert residency(rig, "abc") is held_by
    on_device = 0 if held_by is Residency.HOST else 12
    num_copies = len(rig.virtual.pending)
    with rig.lease("abc") as lease:
        assert (lease.device_tokens, lease.local_tokens) == (on_device, 12)
        loading = await lease.load(total_tokens=0)
        assert loading.tokens == 12
        assert not loading.done
        assert len(rig.virtual.pending) == num_copies + (not joins)
        rig.cache.audit()
        end()
        rig.virtual.advance_all()
        await loading.finished()
        rig.check(lease, 12)


async def test_a_load_in_flight(open_cache: Opener) -> None:
    """Pages on their way to the device count as there, and a second load joins the first."""
    rig = await on_host(open_cache, "abc")
    with rig.lease("abc") as first:
        await first.load()
        await check_in_flight(rig, Residency.BOTH, lambda: None, joins=True)


async def computed_behind(rig: Rig, fence: HostFence | None) -> None:
    """Compute and commit a prompt, and leave it."""
    with rig.lease("abc") as lease:
        await lease.load()
        lease.allocate_nowait(13)
        rig.compute(lease)
        lease.commit(13, after=fence)


async def test_a_forward_in_flight(open_cache: Opener) -> None:
    """Pages that a forward still writes count as there; they are copied nowhere before it is over."""
    rig = await open_cache(write_policy="write_through")
    rig.virtual.auto = False
    fence = rig.cache.host_fence()
    await computed_behind(rig, fence)
    assert not rig.virtual.pending
    await check_in_flight(rig, Residency.DEVICE, fence.set, joins=True)
    await turns()
    assert len(rig.virtual.pending) == 1


async def test_an_offload_in_flight(open_cache: Opener) -> None:
    """Pages that are being copied down are used in place, and written to no store before the copy has ended."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, write_policy="write_through")
    rig.virtual.auto = False
    await computed_behind(rig, None)
    assert residency(rig, "abc") is Residency.BOTH
    with rig.lease("abc") as lease:
        loading = await lease.load()
        assert (lease.device_tokens, loading.done) == (12, True)
        rig.check(lease, 12)
    await turns()
    assert not store.waiting
    rig.virtual.advance_all()
    await store.arrived()
    store.open()


async def test_an_eviction_in_flight(open_cache: Opener) -> None:
    """Pages that are leaving the device count as the host's, and a load of them is queued behind their copy."""
    rig = await open_cache(device_pages=8, write_policy="write_back", write_back_low_water=0.0)
    await rig.serve("abc")
    rig.virtual.auto = False
    with rig.lease("uvwxyz") as other:
        await other.load(total_tokens=0)
        other.allocate_nowait(8 * 4)
        assert rig.where("abc") == "hhh"
    await check_in_flight(rig, Residency.HOST, lambda: None, joins=False)
