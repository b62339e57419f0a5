"""Room: who leaves a tier, where to, and what never leaves."""

from __future__ import annotations

from collections import Counter

import pytest

from hicache_async.core.pool import Owner
from hicache_async.types import Tier
from tests.core.world import DEVICE, HOST, OpenFence, World


def backed_up(world: World, *prompts: str) -> None:
    """Cache prompts on the device and on the host."""
    for prompt in prompts:
        world.graft(DEVICE, prompt)
        world.graft(HOST, prompt)


# Device room


def test_free_pages_are_room_and_nobody_goes() -> None:
    """Where enough pages are free, or fenced, nothing is evicted."""
    world = World(device_pages=4)
    world.graft(DEVICE, "ab")
    fenced = world.grab(DEVICE, 1)
    world.pools[DEVICE].free(fenced, Owner.LEASE, after=OpenFence())
    plan = world.make_room(DEVICE, 2)
    assert (plan.num_pages, plan.moves) == (2, [])
    assert world.residency() == {"ab": "device"}


def test_a_clean_victim_just_loses_its_device_pages() -> None:
    """A device victim that has a host copy stays cached on the host; nothing is copied or dropped."""
    world = World(device_pages=3)
    backed_up(world, "abc")
    plan = world.make_room(DEVICE, 2)
    assert (plan.num_pages, plan.moves) == (2, [])
    assert world.residency() == {"a": "both", "abc": "host"}
    assert world.room.evicted_pages == {DEVICE: 2, HOST: 0}
    assert world.room.dropped_pages == Counter()
    world.audit()


def test_under_write_through_an_unbacked_victim_is_dropped() -> None:
    """Without a host copy a device victim leaves for good, counted as unbacked; host room is not used."""
    world = World(device_pages=3)
    world.graft(DEVICE, "abc")
    plan = world.make_room(DEVICE, 2)
    assert (plan.num_pages, plan.moves) == (2, [])
    assert world.residency() == {"a": "device"}
    assert world.room.dropped_pages == {"unbacked_eviction": 2}
    world.audit()
    assert world.make_room(DEVICE, 3).num_pages == 3
    assert world.residency() == {} and not world.tree.roots
    assert world.room.dropped_pages == {"unbacked_eviction": 3}
    assert world.pools[HOST].num_free == 16
    world.audit()


def test_under_write_back_an_unbacked_victim_moves_to_the_host() -> None:
    """The victim is on the host at once, behind its copy; its device pages are room behind the same fence."""
    world = World(device_pages=3, write_back=True)
    world.graft(DEVICE, "abc")
    plan = world.make_room(DEVICE, 2)
    assert plan.num_pages == 2
    assert [(move.device_pages.tolist(), move.host_pages.tolist()) for move in plan.moves] == [
        ([1, 2], [0, 1])
    ]
    assert world.residency() == {"a": "device", "abc": "host"}
    assert not world.cut("abc").host.is_ready()
    assert world.pools[DEVICE].available(fenced=False) == 0
    assert world.room.evicted_pages == {DEVICE: 2, HOST: 0}
    assert world.room.dropped_pages == Counter()
    world.audit()
    world.grab(DEVICE, 2)  # finishes the copy first
    assert world.cut("abc").host.is_ready()
    world.audit(owned={(DEVICE, Owner.LEASE): world.pools[DEVICE].owned_by(Owner.LEASE)})


def test_a_moved_node_keeps_what_hangs_below_it_on_the_host() -> None:
    """A device node above a host node moves and the host node stays reachable."""
    world = World(device_pages=1, write_back=True)
    world.graft(DEVICE, "a")
    world.graft(HOST, "ab", 1)
    world.make_room(DEVICE, 1)
    assert world.residency() == {"a": "host", "ab": "host"}
    assert world.match("ab").local_pages == 2


def test_host_victims_make_room_for_a_move() -> None:
    """A full host gives up its own oldest node for a device victim."""
    world = World(device_pages=2, host_pages=3, write_back=True)
    for prompt in ("a", "b", "c"):
        world.graft(HOST, prompt)
    world.graft(DEVICE, "x")
    world.graft(DEVICE, "y")
    world.match("a")
    world.make_room(DEVICE, 1)
    assert world.residency() == {"a": "host", "c": "host", "x": "host", "y": "device"}
    assert world.room.evicted_pages == {DEVICE: 1, HOST: 1}
    assert world.room.dropped_pages == {"host_eviction_unstored": 1}
    world.audit()


def test_under_write_back_a_victim_is_dropped_when_the_host_is_full() -> None:
    """Where all host pages are held, a device victim leaves for good, counted as host_full."""
    world = World(device_pages=1, host_pages=1, write_back=True)
    world.tree.pin(HOST, world.graft(HOST, "h"))
    world.graft(DEVICE, "x")
    plan = world.make_room(DEVICE, 1)
    assert (plan.num_pages, plan.moves) == (1, [])
    assert world.residency() == {"h": "host"}
    assert world.room.dropped_pages == {"host_full": 1}


def test_of_more_pages_than_the_host_has_the_first_ones_move() -> None:
    """Of more victims at once than the host can take the last ones are dropped, and what stays is a prefix."""
    world = World(device_pages=4, host_pages=2, write_back=True)
    world.graft(HOST, "hi")
    world.graft(DEVICE, "wxyz")
    assert world.make_room(DEVICE, 3).num_pages == 3
    assert world.residency() == {"w": "device", "wxy": "host"}
    assert world.room.dropped_pages == {"host_eviction_unstored": 2, "host_full": 1}
    world.audit()


def test_a_node_longer_than_the_host_moves_page_by_page() -> None:
    """What counts is what has to go, not how long the victim is: its tail fits on a host it would not fit on."""
    world = World(device_pages=4, host_pages=2, write_back=True)
    world.graft(HOST, "h")
    world.graft(DEVICE, "wxyz")
    assert len(world.make_room(DEVICE, 1).moves) == 1
    assert world.residency() == {"h": "host", "wxy": "device", "wxyz": "host"}
    assert world.room.dropped_pages == Counter()
    world.audit()


def test_what_hangs_below_a_dropped_node_goes_too() -> None:
    """Host pages below a dropped device node could not be reached any more: they are freed and counted."""
    world = World(device_pages=3, host_pages=3, write_back=True)
    held = world.graft(HOST, "hi")
    world.tree.pin(HOST, held)
    world.graft(DEVICE, "xyz")
    world.graft(HOST, "xyzw", 3)
    assert world.make_room(DEVICE, 3).num_pages == 3
    assert world.residency() == {"hi": "host", "x": "host"}
    assert world.room.dropped_pages == {"host_eviction_unstored": 1, "host_full": 2}
    world.audit({DEVICE: Counter(), HOST: Counter({held: 1})})


def test_a_dropped_node_with_somebody_below_stays() -> None:
    """A device victim above a held host node is skipped whole, and is a candidate again later."""
    world = World(device_pages=3, host_pages=1, write_back=True)
    world.graft(DEVICE, "xyz")
    held = world.graft(HOST, "xyzw", 3)
    world.tree.pin(HOST, held)
    assert world.make_room(DEVICE, 1).num_pages == 0
    assert world.residency() == {"xyz": "device", "xyzw": "host"}
    world.tree.unpin(HOST, held)
    assert world.make_room(DEVICE, 2).num_pages == 2
    assert world.residency() == {"x": "device", "xy": "host"}
    world.audit()


def test_a_skipped_victim_does_not_stop_the_search() -> None:
    """Behind a victim that has to stay the next one is tried."""
    world = World(device_pages=2)
    world.tree.anchor(world.graft(DEVICE, "a"))
    world.graft(DEVICE, "b")
    assert world.make_room(DEVICE, 1).num_pages == 1
    assert world.residency() == {"a": "device"}


def test_the_pages_of_one_move_make_no_room_for_the_next() -> None:
    """Host pages that a move has just been given are empty as yet: the next victim does not get them."""
    world = World(device_pages=2, host_pages=1, write_back=True)
    world.graft(DEVICE, "a")
    world.graft(DEVICE, "b")
    plan = world.make_room(DEVICE, 2)
    assert [move.node for move in plan.moves] == [world.cut("a")]
    assert plan.num_pages == 2
    assert world.residency() == {"a": "host"}
    assert world.room.dropped_pages == {"host_full": 1}
    world.audit()


def test_a_plan_leaves_no_pins() -> None:
    """What a plan held while it was made it has let go: its moves are victims like all others."""
    world = World(device_pages=1, host_pages=1, write_back=True)
    world.graft(DEVICE, "a")
    world.make_room(DEVICE, 1)
    world.finish(world.copies[0])
    world.make_room(HOST, 1)
    assert world.residency() == {}


def test_pinned_nodes_and_those_above_never_go() -> None:
    """A pin keeps its node and everything above it on the device; the branch beside it goes."""
    world = World(device_pages=7)
    backed_up(world, "abcd", "abx")
    pinned = world.cut("abc")
    world.tree.pin(DEVICE, pinned)
    assert world.make_room(DEVICE, 7).num_pages == 4
    assert world.residency() == {"ab": "both", "abc": "both", "abcd": "host", "abx": "host"}
    world.tree.unpin(DEVICE, pinned)
    assert world.make_room(DEVICE, 7).num_pages == 7


def test_a_pin_on_the_host_does_not_keep_the_device() -> None:
    """A tier is held by its own pins alone."""
    world = World(device_pages=1)
    backed_up(world, "a")
    world.tree.pin(HOST, world.cut("a"))
    assert world.make_room(DEVICE, 1).num_pages == 1
    assert world.residency() == {"a": "host"}


def test_an_anchor_keeps_the_last_tier_only() -> None:
    """An anchored node may lose the device while it has the host, and neither when it has one."""
    world = World(device_pages=2, host_pages=1)
    backed_up(world, "a")
    world.graft(DEVICE, "b")
    for prompt in "ab":
        world.tree.anchor(world.cut(prompt))
    assert world.make_room(DEVICE, 2).num_pages == 1
    assert world.make_room(HOST, 1).num_pages == 0
    assert world.residency() == {"a": "host", "b": "device"}


def test_what_is_still_on_its_way_does_not_go() -> None:
    """A node whose bytes have not arrived is no victim, and is one afterwards."""
    world = World(device_pages=1)
    backed_up(world, "a")
    world.cut("a").device.ready = (OpenFence(),)
    assert world.make_room(DEVICE, 1).num_pages == 0
    world.cut("a").device.ready = ()
    assert world.make_room(DEVICE, 1).num_pages == 1


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_no_more_goes_than_is_asked_for(tier: Tier) -> None:
    """Of ten prompts that may go, three go for three pages, those used longest ago."""
    world = World(device_pages=10, host_pages=10)
    backed_up(world, *"abcdefghij")
    for prompt in "cab":
        world.match(prompt)
    assert world.make_room(tier, 3).num_pages == 3
    assert {prompt for prompt, tiers in world.residency().items() if tiers != "both"} == set("def")


def test_parents_follow_their_children() -> None:
    """When the last node below it has gone, the node above is a candidate in the same plan."""
    world = World(device_pages=3)
    world.graft(DEVICE, "a")
    world.graft(DEVICE, "ab", 1)
    world.graft(DEVICE, "abc", 2)
    assert world.make_room(DEVICE, 2).num_pages == 2
    assert world.residency() == {"a": "device"}
    assert world.make_room(DEVICE, 3).num_pages == 3


def test_what_was_used_longest_ago_goes_first_across_prompts() -> None:
    """A match counts as use: the other prompt goes, all of it before any page of the one that was used."""
    world = World(device_pages=4)
    world.graft(DEVICE, "ab")
    world.graft(DEVICE, "xy")
    world.match("ab")
    for expected in ({"ab": "device", "x": "device"}, {"ab": "device"}, {"a": "device"}):
        world.make_room(DEVICE, world.pools[DEVICE].num_free + 1)
        assert world.residency() == expected


# Host room


def test_a_host_victim_on_the_device_too_loses_its_copy_only() -> None:
    """A node that the device still has stays cached; nothing counts as dropped."""
    world = World(host_pages=3)
    backed_up(world, "abc")
    assert world.make_room(HOST, 2).num_pages == 2
    assert world.residency() == {"a": "both", "abc": "device"}
    assert world.room.evicted_pages == {DEVICE: 0, HOST: 2}
    assert world.room.dropped_pages == Counter()
    world.audit()


def test_a_host_only_victim_leaves_and_is_counted_by_whether_it_is_stored() -> None:
    """What the store has is no loss; what it never had, or had before it was changed, is told apart."""
    world = World(host_pages=3)
    for prompt in "abc":
        world.graft(HOST, prompt)
    world.cut("a").stored = world.tree.store_epoch
    world.cut("b").stored = world.tree.store_epoch - 1
    world.make_room(HOST, 3)
    assert world.residency() == {}
    assert world.room.dropped_pages == {"host_eviction": 1, "host_eviction_unstored": 2}


def test_host_pins_are_respected() -> None:
    """A host node that is read from, and those above it, stay; the plan says how little there is."""
    world = World(host_pages=4)
    world.graft(HOST, "ab")
    world.graft(HOST, "xy")
    world.tree.pin(HOST, world.cut("a"))
    assert world.make_room(HOST, 4).num_pages == 3
    assert world.residency() == {"a": "host"}


def test_host_room_never_touches_the_device() -> None:
    """However much host room is asked for, device pages stay where they are."""
    world = World(write_back=True)
    world.graft(DEVICE, "abc")
    assert world.make_room(HOST, 100).num_pages == 16
    assert world.residency() == {"abc": "device"}


def test_children_on_the_device_do_not_keep_the_host() -> None:
    """A node whose children have no host pages may lose its own."""
    world = World(host_pages=1)
    world.graft(DEVICE, "a")
    world.graft(DEVICE, "ab", 1)
    world.graft(HOST, "a")
    assert world.make_room(HOST, 1).num_pages == 1
    assert world.residency() == {"a": "device", "ab": "device"}
    world.audit()


def test_what_is_at_rest_is_not_put_behind_the_copy_of_another() -> None:
    """A host page that is there stays readable while its neighbour is copied."""
    world = World(device_pages=2, write_back=True)
    world.graft(DEVICE, "ab")
    world.copy_nodes(DEVICE, [world.cut("a")], world.grab(HOST, 1))
    world.finish_all()
    plan = world.make_room(
        DEVICE, 2
    )  # "b" moves; "a" just loses its device page, and is merged into the move
    assert [(len(move.host_pages), move.node.num_pages) for move in plan.moves] == [(1, 1)]
    assert world.cut("a").host.is_ready()


def test_the_host_gives_up_nothing_in_vain() -> None:
    """Where the host cannot take all that has to go it takes what it can, or keeps what it has."""
    world = World(device_pages=4, host_pages=4, write_back=True)
    world.tree.pin(HOST, world.graft(HOST, "p"))
    world.graft(HOST, "xyz")
    world.graft(DEVICE, "abcd")
    world.make_room(DEVICE, 4)
    local = world.match("abcd").local_pages + world.match("xyz").local_pages
    assert local == 3
