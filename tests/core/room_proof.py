"""What making room may change: proven by comparing all that a small world holds before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hicache_async.core.node import Node
from hicache_async.core.room import RoomPlan
from hicache_async.core.tree import TIERS
from hicache_async.types import Residency, Tier
from tests.core.world import DEVICE, HOST, Prefix, World


class Traits(NamedTuple):
    """What tells runs of pages apart besides where they are."""

    hits: int
    stored: int
    used: int
    created: int
    priority: int


def traits(world: World) -> dict[Prefix, Traits]:
    """Return for every cached prefix what its node knows of it."""
    return {
        prefix: Traits(node.hits, node.stored, node.used, node.created, node.priority)
        for prefix, node, _ in world.pages()
    }


def pages_at_rest(world: World) -> dict[tuple[Prefix, Tier], int]:
    """Return the pages whose bytes are there."""
    copies = [
        (prefix, tier, node.copy_in(tier), place) for prefix, node, place in world.pages() for tier in TIERS
    ]
    return {
        (prefix, tier): int(copy.pages[place])
        for prefix, tier, copy, place in copies
        if copy.pages is not None and copy.is_ready()
    }


def could_go(world: World, tier: Tier, node: Node) -> bool:
    """Return whether a plan for ``tier`` may evict pages of ``node``."""
    if not world.tree.queues[tier].is_evictable(node) or not node.copy_in(tier).is_ready():
        return False
    return node.residency is Residency.BOTH or not any(below.is_held for below in node.subtree())


@dataclass(slots=True)
class _Before:
    cached: dict[Prefix, dict[Tier, int]]
    traits: dict[Prefix, Traits]
    evicted: dict[Tier, int]
    dropped: int
    available: int
    at_rest: dict[tuple[Prefix, Tier], int]


def proven_room(world: World, tier: Tier, num_pages: int) -> RoomPlan:
    """Make room, and prove that exactly what was missing went, that it was allowed to go, and that it is counted.

    Where not enough could go, all went that could.
    """
    room, pool = world.room, world.pools[tier]
    available = pool.available(fenced=tier is DEVICE)
    before = _Before(
        world.cached(),
        traits(world),
        dict(room.evicted_pages),
        room.dropped_pages.total(),
        available,
        pages_at_rest(world),
    )
    plan = world.make_room(tier, num_pages)
    after = world.cached()
    left = _pages_that_left(before.cached, after, plan)
    assert left == {each: count - before.evicted[each] for each, count in room.evicted_pages.items()}
    assert room.dropped_pages.total() - before.dropped == len(before.cached) - len(after)
    assert tier is DEVICE or not left[DEVICE], "host room was made on the device"
    assert world.write_back or not plan.moves
    now = traits(world)
    assert now == {prefix: before.traits[prefix] for prefix in now}, "what stays is worth as much as before"
    resting = pages_at_rest(world)
    for (prefix, held_in), page in before.at_rest.items():
        if after.get(prefix, {}).get(held_in) == page:
            assert (prefix, held_in) in resting, "what was at rest waits for a copy"
    assert plan.num_pages == pool.available(fenced=tier is DEVICE) == before.available + left[tier]
    if plan.num_pages >= num_pages:
        assert plan.num_pages == max(num_pages, before.available), "more went than was missing"
    else:
        for node in world.all_nodes():
            assert not could_go(world, tier, node), f"{node!r} could have gone"
    return plan


def _pages_that_left(
    before: dict[Prefix, dict[Tier, int]], after: dict[Prefix, dict[Tier, int]], plan: RoomPlan
) -> dict[Tier, int]:
    # Counts the pages that left each tier; one that moved to the host may have taken the place of another.
    moved = {page for move in plan.moves for page in move.host_pages.tolist()}
    arrived: set[int] = set()
    left = dict.fromkeys(TIERS, 0)
    for prefix, tiers in before.items():
        now = after.get(prefix, {})
        is_moved = now.get(HOST) in moved
        if is_moved:
            arrived.add(now[HOST])
            assert DEVICE in tiers and DEVICE not in now, "only what leaves the device moves to the host"
        for held_in, page in tiers.items():
            left[held_in] += held_in not in now or (held_in is HOST and is_moved)
            assert now.get(held_in, page) == page or is_moved, "a page changed its place"
    assert after.keys() <= before.keys() and arrived == moved
    return left
