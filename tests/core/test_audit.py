"""The proofs themselves: each kind of damage is found, and an undamaged cache passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from hicache_async.core.audit import (
    check_anchors,
    check_capacity,
    check_owner,
    check_pins,
    check_tree,
    tree_pages,
)
from hicache_async.core.node import Node
from hicache_async.core.pool import Owner
from hicache_async.core.tree import PrefixTree
from hicache_async.errors import InvariantError
from hicache_async.types import Residency
from tests.core.world import DEVICE, HOST, World


def make_world() -> tuple[World, Node, Node]:
    """Return a world where "ab" and below it "abc" are on both tiers."""
    world = World()
    for tier in (DEVICE, HOST):
        world.graft(tier, "ab")
        world.graft(tier, "abc", 2)
    return world, world.cut("ab"), world.cut("abc")


def misfile(tree: PrefixTree, upper: Node, lower: Node) -> None:
    assert upper.children is not None
    upper.children = {b"wrong   ": lower}


def lose_last_tier(tree: PrefixTree, upper: Node, lower: Node) -> None:
    for tier in (DEVICE, HOST):
        lower.copy_in(tier).pages = None
        upper.copy_in(tier).children = 0


def lose_upper_tier(tier_name: str) -> Callable[[PrefixTree, Node, Node], None]:
    def damage(tree: PrefixTree, upper: Node, lower: Node) -> None:
        copy = upper.device if tier_name == "device" else upper.host
        copy.pages = None
        root = upper.parent
        assert root is not None
        (root.device if tier_name == "device" else root.host).children = 0

    return damage


DAMAGES: dict[str, tuple[Callable[[PrefixTree, Node, Node], object], str]] = {
    "empty root": (lambda tree, upper, lower: tree.root(b"tenant"), "empty or misfiled"),
    "misfiled root": (
        lambda tree, upper, lower: tree.roots.update({b"x": tree.roots[b""]}),
        "empty or misfiled",
    ),
    "misfiled child": (misfile, "is misfiled below"),
    "wrong parent": (
        lambda tree, upper, lower: setattr(lower, "parent", tree.roots[b""]),
        "is misfiled below",
    ),
    "only child": (lambda tree, upper, lower: setattr(upper, "only_child", None), "as the only one"),
    "children": (
        lambda tree, upper, lower: setattr(upper.host, "children", 0),
        "counts 0 children on host, has 1",
    ),
    "detached child": (
        lambda tree, upper, lower: setattr(upper, "detached_children", 1),
        "counts 1 detached",
    ),
    "tokens": (lambda tree, upper, lower: setattr(lower, "hashes", (*lower.hashes, b"")), "bytes of tokens"),
    "pages": (lambda tree, upper, lower: setattr(lower.host, "pages", np.arange(2)), "has 2 pages on host"),
    "pins below zero": (lambda tree, upper, lower: setattr(lower.host, "pins", -1), "is pinned -1 times"),
    "pinned air": (
        lambda tree, upper, lower: setattr(lower.host, "pages", None),
        "counts 1 children on host",
    ),
    "ghost": (lose_last_tier, "can be reached and holds nothing"),
    "unattached": (lambda tree, upper, lower: setattr(lower, "attached", False), "can be reached"),
    "recency": (lambda tree, upper, lower: setattr(lower, "used", upper.used + 1), "was used after"),
    "device hole": (lose_upper_tier("device"), "is on the device, .* above it is not"),
    "host hole": (lose_upper_tier("host"), "is on the host, .* above it is not"),
    "queue": (lambda tree, upper, lower: tree.queues[DEVICE].discard(lower), "may lose device and nobody"),
    "detached": (lambda tree, upper, lower: tree.detached.add(lower), "detached nodes for no reason"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_the_tree_is_found(damage: str) -> None:
    """A tree that breaks any one of its promises does not pass, and says which."""
    world, upper, lower = make_world()
    check_tree(world.tree, write_through=True)
    inflict, message = DAMAGES[damage]
    inflict(world.tree, upper, lower)
    with pytest.raises(InvariantError, match=message):
        check_tree(world.tree, write_through=True)


def test_a_pin_without_pages_is_found() -> None:
    """Holding what is not there is a fault even where every count is right."""
    world, _, lower = make_world()
    world.pools[HOST].free(world.tree.take(HOST, lower), Owner.TREE)
    check_tree(world.tree, write_through=True)
    lower.own_copy(HOST).pins = 1
    with pytest.raises(InvariantError, match="is pinned 1 times on host, its pages are None"):
        check_tree(world.tree, write_through=True)


def test_write_back_may_have_holes_on_the_host() -> None:
    """Only under the write-through policies must the host have all ancestors of what it has."""
    world = World(write_back=True)
    world.graft(DEVICE, "ab")
    world.graft(HOST, "abc", 2)
    check_tree(world.tree, write_through=False)
    with pytest.raises(InvariantError, match="is on the host, .* above it is not"):
        check_tree(world.tree, write_through=True)


def test_a_detached_node_that_nobody_holds_is_found() -> None:
    """A node cut off from matching has to be held by somebody, or its pages leak."""
    world, upper, lower = make_world()
    world.tree.pin(DEVICE, lower)
    world.tree.detach(upper)
    check_tree(world.tree, write_through=True)
    lower.device.pages = None
    upper.device.children = lower.device.pins = 0
    assert lower.residency is Residency.GHOST
    with pytest.raises(InvariantError, match="detached nodes for no reason"):
        check_tree(world.tree, write_through=True)


def test_a_cleared_root_that_nobody_holds_is_found() -> None:
    """A root is kept beside the tree only for those who stand on it."""
    world, upper, lower = make_world()
    root = world.tree.roots[b""]
    world.tree.pin(HOST, lower)
    world.tree.detach(root)
    check_tree(world.tree, write_through=True)
    assert len(tree_pages(world.tree, HOST)) == 3 and not len(tree_pages(world.tree, DEVICE))
    root.detached_children = 1
    with pytest.raises(InvariantError, match="counts 1 detached"):
        check_tree(world.tree, write_through=True)
    root.detached_children, root.children, root.only_child, root.host.children = 0, None, None, 0
    world.tree.detached -= {upper, lower}
    with pytest.raises(InvariantError, match="detached nodes for no reason"):
        check_tree(world.tree, write_through=True)


def test_anchors_are_compared_with_those_who_should_hold_them() -> None:
    """An anchor too many or too few is found, on a node, on a root and on what was cut off alike."""
    world, upper, lower = make_world()
    root = world.tree.roots[b""]
    for node in (root, lower, lower):
        world.tree.anchor(node)
    held = Counter({root: 1, lower: 2})
    check_anchors(world.tree, held)
    for expected in (
        Counter[Node](),
        Counter({lower: 2}),
        held + Counter({lower: 1}),
        held + Counter([upper]),
    ):
        with pytest.raises(InvariantError, match="anchors are .* and should be"):
            check_anchors(world.tree, expected)
    world.tree.detach(upper)
    check_anchors(world.tree, held)
    with pytest.raises(InvariantError, match="anchors are .* and should be"):
        check_anchors(world.tree, Counter({root: 1}))


def test_pins_are_compared_with_those_who_should_hold_them() -> None:
    """A pin too many or too few is named with both numbers."""
    world, _, lower = make_world()
    world.tree.pin(DEVICE, lower)
    check_pins(world.tree, {DEVICE: Counter({lower: 1}), HOST: Counter()})
    for expected in (Counter[Node](), Counter({lower: 2})):
        with pytest.raises(InvariantError, match=f"has 1, should have {expected[lower]}"):
            check_pins(world.tree, {DEVICE: expected, HOST: Counter()})


def test_pages_are_compared_with_the_book() -> None:
    """A page that is booked and not found, or found and not booked, or found twice, is named."""
    world, _, _ = make_world()
    pool, pages = world.pools[DEVICE], tree_pages(world.tree, DEVICE)
    check_owner(pool, Owner.TREE, pages)
    for wrong, named in (
        (pages[:-1], r"booked and not found \[\d\]"),
        (np.append(pages, 9), r"found and not booked \[9\]"),
        (np.append(pages[:-1], pages[0]), r"booked and not found \[\d\]"),
        (np.append(pages, pages[0]), "3 pages are booked to tree, 4 found"),
    ):
        with pytest.raises(InvariantError, match=named):
            check_owner(pool, Owner.TREE, wrong)


def test_a_page_that_nobody_has_is_missed() -> None:
    """Free, leased, in hops and in the tree have to add up to the capacity."""
    world, _, _ = make_world()
    check_capacity(world.pools[DEVICE])
    world.pools[DEVICE]._free_list.take(1)
    with pytest.raises(InvariantError, match="do not add up to 16"):
        check_capacity(world.pools[DEVICE])
