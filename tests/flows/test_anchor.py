"""Anchors: a node that is to stay in some tier, whichever; every one is accounted for in the books."""

from __future__ import annotations

import pytest

from hicache_async import InvariantError, PrefetchPolicy, Tier
from hicache_async.core.node import Node
from hicache_async.core.tokens import token_bytes
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.flows.rig import Opener, Rig, tokens

pytestmark = pytest.mark.asyncio


def end_of(rig: Rig, letters: str) -> Node:
    """Return the node that ends where a cached prompt does."""
    match = rig.ctx.tree.match(b"", token_bytes(tokens(letters)), len(letters))
    return rig.ctx.tree.cut(match, len(letters))


async def test_an_anchored_prefix_keeps_one_tier(open_cache: Opener) -> None:
    """The device may give it up while the host has it, and the host then not; when let go it leaves."""
    rig = await open_cache(device_pages=4, host_pages=4)
    await rig.serve("abc")
    await rig.cache.admin.flush(Tier.HOST)
    kept = rig.ctx.anchor(end_of(rig, "ab"))
    rig.cache.audit()
    assert rig.ctx.room.plan_room(Tier.DEVICE, 4).num_pages == 4
    assert rig.ctx.room.plan_room(Tier.HOST, 4).num_pages == 2
    assert rig.where("abc") == "hh"
    rig.check_local("ab")
    rig.cache.audit()
    rig.ctx.unpin(kept)
    assert rig.ctx.room.plan_room(Tier.HOST, 4).num_pages == 4
    assert rig.where("abc") == ""


async def test_an_anchored_prefix_that_only_the_device_has_stays_there(open_cache: Opener) -> None:
    """Whichever tier is the last one is kept; beside it all goes."""
    rig = await open_cache(device_pages=6, write_policy="write_through_selective")
    for letters in ("abc", "xy"):
        await rig.serve(letters)
    kept = rig.ctx.anchor(end_of(rig, "ab"))
    assert rig.ctx.room.plan_room(Tier.DEVICE, 6).num_pages == 4
    assert (rig.where("abc"), rig.where("xy")) == ("dd", "")
    rig.ctx.unpin(kept)
    assert rig.ctx.room.plan_room(Tier.DEVICE, 6).num_pages == 6


async def test_each_anchor_counts_by_itself(open_cache: Opener) -> None:
    """Two holders of one node are two anchors; the audit misses one that was let go beside the books."""
    rig = await open_cache()
    await rig.serve("ab")
    first, second = (rig.ctx.anchor(end_of(rig, "ab")) for _ in range(2))
    rig.cache.audit()
    assert first.node is second.node and first.node.anchors == 2
    rig.ctx.unpin(first)
    rig.cache.audit()
    assert second.node.anchors == 1
    rig.ctx.tree.unanchor(second.node)
    with pytest.raises(InvariantError, match="anchors are .* and should be"):
        rig.cache.audit()
    rig.ctx.tree.anchor(second.node)
    rig.ctx.unpin(second)
    rig.cache.audit()


@pytest.mark.parametrize(("cached", "expected"), [("", 0), ("ab", 2)])
async def test_a_prefetch_under_way_is_booked_as_an_anchor(
    open_cache: Opener, cached: str, expected: int
) -> None:
    """While it reads, the node that its pages will hang below is anchored, be it the root; afterwards nothing is."""
    store = HeldStore(MemoryStore(), set())
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    if cached:
        await rig.serve(cached, prefetch=False)
        await rig.cache.admin.flush()
    store.hold("read")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.wait_complete())
        await store.arrived()
        rig.cache.audit()
        (anchor,) = [pinned.node for pinned in rig.ctx.moves if not pinned.tiers]
        assert sum(node.num_pages for node in anchor.path()) == expected
        anchor.anchors += 1
        with pytest.raises(InvariantError, match="anchors are .* and should be"):
            rig.cache.audit()
        anchor.anchors -= 1
        store.open("read")
        assert (await prefetch.settled()).fetched_tokens == (4 - expected) * 4
        assert not [pinned for pinned in rig.ctx.moves if not pinned.tiers]
        rig.cache.audit()
