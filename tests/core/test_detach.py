"""PrefixTree.detach: what is cut off from matching, and who keeps it until when."""

from __future__ import annotations

from collections import Counter

import pytest

from hicache_async.core.audit import check_tree
from hicache_async.core.pool import Owner
from hicache_async.errors import InvariantError
from tests.core.world import DEVICE, HOST, World, page_hashes, prefix_of, prompt_bytes


def lengths(world: World, prompt: str, seed: bytes = b"") -> tuple[int, int]:
    """Return how many pages of a prompt are on the device, and on device or host."""
    match = world.match(prompt, seed)
    return match.device_pages, match.local_pages


# A node


def test_a_detached_node_can_be_split() -> None:
    """A backup that is under way in a node that was cleared meanwhile may still divide it."""
    world = World()
    node = world.graft(DEVICE, "abc")
    world.tree.pin(DEVICE, node)
    world.tree.detach(node)
    world.graft(DEVICE, "abx")
    upper = world.tree.split(node, 1)
    assert world.tree.detached == {node, upper}
    assert (prefix_of(upper), prefix_of(node)) == ("a", "abc")
    assert lengths(world, "abx") == (3, 3), "the nodes that took its place are out of reach"
    world.audit({DEVICE: Counter({node: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, node)
    assert not world.tree.detached
    world.close()


def test_detached_pinned_nodes_are_freed_at_their_last_unpin_leaf_first() -> None:
    """What nobody holds goes at once; of a held chain each node goes with the last pin on it or below."""
    world = World()
    world.graft(DEVICE, "a")
    middle = world.graft(DEVICE, "ab", 1)
    leaf = world.graft(DEVICE, "abc", 2)
    beside = world.graft(DEVICE, "abx", 2)
    for node in (middle, leaf, leaf):
        world.tree.pin(DEVICE, node)
    top = world.cut("a")
    world.tree.detach(top)
    assert lengths(world, "abc") == (0, 0)
    assert world.tree.detached == {top, middle, leaf}
    assert beside.device.pages is None
    world.tree.unpin(DEVICE, middle)
    world.tree.unpin(DEVICE, leaf)
    assert world.tree.detached == {top, middle, leaf}
    world.tree.unpin(DEVICE, leaf)
    assert not world.tree.detached
    world.close()


def test_each_tier_of_detached_nodes_is_freed_when_nothing_holds_it() -> None:
    """The device pages of a detached path go with its device pin, though a host pin still holds the path."""
    world = World()
    for tier in (DEVICE, HOST):
        world.graft(tier, "a")
        world.graft(tier, "ab", 1)
    leaf = world.cut("ab")
    world.tree.pin(DEVICE, leaf)
    world.tree.pin(HOST, leaf)
    world.tree.detach(world.cut("a"))
    world.tree.unpin(DEVICE, leaf)
    assert world.pools[DEVICE].num_free == 16
    assert world.pools[HOST].num_free == 14
    world.tree.unpin(HOST, leaf)
    world.close()


def test_an_anchored_detached_node_waits_without_pages() -> None:
    """Whoever anchors a node that was cleared can still let go of it, and finds that it was cleared."""
    world = World()
    node = world.graft(DEVICE, "ab")
    world.tree.anchor(node)
    world.tree.detach(node)
    assert not node.attached and node.device.pages is None
    assert world.tree.detached == {node}
    check_tree(world.tree, write_through=True)
    world.tree.unanchor(node)
    world.close()


def test_a_cleared_prefix_can_be_cached_again_beside_the_held_one() -> None:
    """The old pages stay with their holder; the new ones are another node's."""
    world = World()
    old = world.graft(DEVICE, "ab")
    world.tree.pin(DEVICE, old)
    world.tree.detach(old)
    new = world.graft(DEVICE, "ab")
    assert new is not old and new.device.pages is not None and old.device.pages is not None
    assert not set(new.device.pages.tolist()) & set(old.device.pages.tolist())
    world.audit({DEVICE: Counter({old: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, old)
    world.close()


def test_a_detached_holder_keeps_the_nodes_above_the_cut() -> None:
    """A request whose last pages were cut off still reads those before them: they stay until it lets go."""
    world = World(device_pages=3)
    above = world.graft(DEVICE, "ab")
    world.graft(HOST, "ab")
    branch = world.graft(DEVICE, "abc", 2)
    world.tree.pin(DEVICE, branch)
    world.tree.detach(branch)
    assert branch.path() == [above, branch] and above.is_held
    assert world.make_room(DEVICE, 2).num_pages == 0
    world.audit({DEVICE: Counter({branch: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, branch)
    assert world.make_room(DEVICE, 3).num_pages == 3
    assert world.residency() == {"ab": "host"}
    world.close()


def test_a_detached_holder_keeps_a_host_node_above_a_device_only_one() -> None:
    """A dropped device node does not take host pages along on which a detached holder stands."""
    world = World(device_pages=3, host_pages=2, write_back=True)
    world.graft(DEVICE, "xyz")
    world.graft(HOST, "xyzv", 3)
    read = world.graft(HOST, "xyzvw", 4)
    world.tree.pin(HOST, read)
    world.tree.detach(read)
    assert world.make_room(DEVICE, 3).num_pages == 0
    assert world.residency() == {"xyz": "device", "xyzv": "host"}
    world.tree.unpin(HOST, read)
    assert world.make_room(DEVICE, 3).num_pages == 3
    assert world.residency() == {"xy": "host"}
    world.close()


def test_a_branch_cut_off_can_be_cached_again_below_the_same_node() -> None:
    """The new branch takes the old one's place; letting go of the old one leaves the new one alone."""
    world = World()
    world.graft(DEVICE, "ab")
    old = world.graft(DEVICE, "abc", 2)
    world.tree.pin(DEVICE, old)
    world.tree.detach(old)
    new = world.graft(DEVICE, "abcd", 2)
    world.audit({DEVICE: Counter({old: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, old)
    assert world.residency() == {"ab": "device", "abcd": "device"} and new.attached
    world.audit()
    world.close()


def test_a_root_stays_for_what_was_cut_off_below_it() -> None:
    """A root outlives its children while a detached one is held, so that it is not made twice."""
    world = World()
    node = world.graft(DEVICE, "ab")
    world.tree.pin(DEVICE, node)
    world.tree.detach(node)
    root = world.tree.roots[b""]
    world.graft(DEVICE, "xy")
    assert world.tree.roots[b""] is root
    world.tree.unpin(DEVICE, node)
    assert lengths(world, "xy") == (2, 2)
    world.close()


# A root


def test_a_cleared_root_takes_all_its_prompts_along() -> None:
    """Everything below it that nobody holds is freed at once, in both tiers; other namespaces stay."""
    world = World()
    for prompt in ("abc", "abx", "q"):
        world.graft(DEVICE, prompt)
        world.graft(HOST, prompt)
    world.graft(DEVICE, "abc", seed=b"tenant")
    world.tree.detach(world.tree.roots[b""])
    assert list(world.tree.roots) == [b"tenant"] and not world.tree.detached
    assert lengths(world, "abc") == (0, 0)
    assert lengths(world, "abc", b"tenant") == (3, 3)
    assert (world.pools[DEVICE].num_free, world.pools[HOST].num_free) == (13, 16)
    world.audit()
    world.close()


def test_what_is_held_below_a_cleared_root_lives_until_it_is_let_go() -> None:
    """The path of each holder stays whole, beside it all goes, and the root goes with the last of them."""
    world = World()
    for prompt in ("ab", "abcd", "abx"):
        world.graft(DEVICE, prompt)
    root, held, beside = world.tree.roots[b""], world.cut("abc"), world.cut("abx")
    world.tree.pin(DEVICE, held)
    world.tree.detach(root)
    assert held.path() == [held.parent, held] and [prefix_of(node) for node in held.path()] == ["ab", "abc"]
    assert world.tree.detached == {root, *held.path()}
    assert not root.attached and beside.device.pages is None
    assert world.pools[DEVICE].num_free == 13
    world.audit({DEVICE: Counter({held: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, held)
    assert not world.tree.detached
    world.close()


def test_a_new_root_grows_beside_a_cleared_one() -> None:
    """The same prompt is cached anew in pages of its own; letting go of the old ones leaves the new ones alone."""
    world = World()
    old = world.graft(DEVICE, "ab")
    root = world.tree.roots[b""]
    world.tree.pin(DEVICE, old)
    world.tree.detach(root)
    new = world.graft(DEVICE, "abc")
    assert world.tree.roots[b""] is not root and new.path() == [new]
    assert old.device.pages is not None and new.device.pages is not None
    assert not set(old.device.pages.tolist()) & set(new.device.pages.tolist())
    world.audit({DEVICE: Counter({old: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, old)
    assert world.residency() == {"abc": "device"}
    world.audit()
    world.close()


@pytest.mark.parametrize("hold", ["device pin", "host pin", "anchor"])
def test_a_held_root_waits_for_its_holder(hold: str) -> None:
    """Whoever stands on the root alone, as a request with nothing cached does, can still let go of it."""
    world = World()
    world.graft(DEVICE, "ab")
    root, tree = world.tree.roots[b""], world.tree
    if hold == "anchor":
        tree.anchor(root)
    else:
        tree.pin(DEVICE if hold == "device pin" else HOST, root)
    tree.detach(root)
    assert tree.detached == {root} and world.pools[DEVICE].num_free == 16
    check_tree(tree, write_through=True)
    new = tree.root(b"")
    tree.pin(DEVICE, new)
    assert new is not root, "the cleared root came back"
    if hold == "anchor":
        tree.unanchor(root)
    else:
        tree.unpin(DEVICE if hold == "device pin" else HOST, root)
    assert not tree.detached and tree.roots == {b"": new}
    tree.unpin(DEVICE, new)
    world.close()


def test_nothing_is_attached_below_a_cleared_root() -> None:
    """What no match could reach would be lost: it is refused, whether a new root has grown or not; a pin is not."""
    world = World()
    world.graft(DEVICE, "ab")
    root = world.tree.roots[b""]
    world.tree.anchor(root)
    world.tree.detach(root)
    pages = world.grab(DEVICE, 2)
    for again in range(2):
        with pytest.raises(InvariantError, match="no match can reach it"):
            world.tree.graft(
                DEVICE, root, prompt_bytes("ab"), page_hashes("ab"), 0, pages, source=Owner.LEASE
            )
        world.tree.pin(DEVICE, root)  # whoever holds it may hold it once more
        world.tree.unpin(DEVICE, root)
        assert len(world.tree.roots) == again
        world.graft(DEVICE, "xy")
    world.tree.unanchor(root)
    with pytest.raises(InvariantError, match="has nothing on device to pin"):
        world.tree.pin(DEVICE, root)
    assert world.residency() == {"xy": "device"}


def test_what_was_cut_off_before_its_root_outlives_it() -> None:
    """A branch that was detached on its own stands on the cleared root until it is let go."""
    world = World()
    world.graft(DEVICE, "ab")
    branch = world.graft(DEVICE, "abc", 2)
    world.tree.pin(DEVICE, branch)
    world.tree.detach(branch)
    root, above = world.tree.roots[b""], branch.parent
    world.tree.detach(root)
    assert world.tree.detached == {root, above, branch}
    world.audit({DEVICE: Counter({branch: 1}), HOST: Counter()})
    world.tree.unpin(DEVICE, branch)
    assert not world.tree.detached
    world.close()


def test_a_cleared_root_without_a_holder_leaves_nothing() -> None:
    """Neither node nor page stays, and nothing of it is a victim any more."""
    world = World(device_pages=2)
    node = world.graft(DEVICE, "ab")
    world.graft(HOST, "ab")
    world.tree.detach(world.tree.roots[b""])
    assert not world.tree.roots and not world.tree.detached
    assert node not in world.tree.queues[DEVICE] and node not in world.tree.queues[HOST]
    assert world.make_room(DEVICE, 2).num_pages == 2
    world.close()
