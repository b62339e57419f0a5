"""PrefixTree: matching, splitting, attaching, letting go, one property at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_async.core.audit import check_owner
from hicache_async.core.pool import NO_PAGES, Owner
from hicache_async.errors import InvariantError
from tests.core.world import DEVICE, HOST, OpenFence, World, page_hashes, prefix_of, prompt_bytes


def lengths(world: World, prompt: str, seed: bytes = b"") -> tuple[int, int]:
    """Return how many pages of a prompt are on the device, and on device or host."""
    match = world.match(prompt, seed)
    return match.device_pages, match.local_pages


# Matching


def test_an_empty_tree_matches_nothing_and_keeps_nothing() -> None:
    """A look leaves no root behind."""
    world = World()
    match = world.match("abc")
    assert (match.device_pages, match.local_pages, match.path, match.tail_pages) == (0, 0, [], 0)
    assert not world.tree.roots


def test_a_match_has_two_ends() -> None:
    """On the device as far as it goes from the root; on device or host as far as either goes."""
    world = World(write_back=True)
    world.graft(DEVICE, "ab")
    world.graft(HOST, "abcd", 2)
    assert lengths(world, "abcdef") == (2, 4)
    assert lengths(world, "abcx") == (2, 3)
    assert lengths(world, "a") == (1, 1)
    assert lengths(world, "ax") == (1, 1)
    assert lengths(world, "x") == (0, 0)


def test_a_match_ends_where_it_is_told_to() -> None:
    """No more pages are looked at than asked for, in the middle of a node as well."""
    world = World()
    world.graft(DEVICE, "abcd")
    match = world.tree.match(b"", prompt_bytes("abcd"), 3)
    assert (match.local_pages, match.tail_pages, len(match.path)) == (3, 3, 1)


def test_tokens_that_differ_inside_a_page_end_the_match_before_it() -> None:
    """A page counts whole or not at all: its first token alone is no match."""
    world = World()
    world.graft(DEVICE, "abcd")
    world.graft(DEVICE, "abX", 2)
    data = bytearray(prompt_bytes("abcd"))
    data[-1] ^= 1
    assert world.tree.match(b"", data, 4).local_pages == 3


def test_a_walk_through_many_nodes_stops_in_the_right_one() -> None:
    """Along a chain of nodes without branches every length and every difference is found."""
    world = World(device_pages=16)
    prompt = "abcdefgh"
    for length in (1, 3, 4, 7, 8):
        world.graft(DEVICE, prompt[:length], world.match(prompt).local_pages)
    ends = [0, 1, 3, 4, 7, 8]
    for length in range(1, 9):
        for data in (prompt[:length], prompt[:length] + "x", prompt[:length] + "xyz"):
            match = world.match(data)
            inside = next(i for i, end in enumerate(ends) if length <= end)
            assert match.local_pages == match.device_pages == length
            assert len(match.path) == inside
            assert match.tail_pages == length - ends[inside - 1]


def test_seeds_are_worlds_apart() -> None:
    """The same tokens under another salt or adapter are another prompt."""
    world = World()
    world.graft(DEVICE, "ab", seed=b"tenant")
    assert lengths(world, "ab") == (0, 0)
    assert lengths(world, "ab", b"tenant") == (2, 2)


def test_a_match_marks_its_whole_path_as_used() -> None:
    """Every node on the path is as young as the match, the one where it ends inside included."""
    world = World()
    world.graft(DEVICE, "a")
    world.graft(DEVICE, "abc", 1)
    world.graft(DEVICE, "xyz")
    before = world.cut("xyz").used
    path = world.match("abx").path
    assert [prefix_of(node) for node in path] == ["a", "abc"]
    assert {node.used for node in path} == {before + 1}
    assert world.tree.match(b"", prompt_bytes("xyz"), 0).path == []


def test_a_commit_marks_what_it_goes_through_and_what_it_adds_as_used() -> None:
    """Nodes from the root to the new end, duplicates included, are younger than all others."""
    world = World()
    world.graft(DEVICE, "ab")
    world.graft(DEVICE, "xy")
    before = world.match("xy").path[0].used
    pages = world.grab(DEVICE, 3)
    parent = world.tree.roots[b""]
    world.tree.graft(DEVICE, parent, prompt_bytes("abc"), page_hashes("abc"), 0, pages, source=Owner.LEASE)
    used = {prefix_of(node): node.used for node in world.all_nodes()}
    assert used == {"ab": before + 1, "abc": before + 1, "xy": before}


# Cutting


def test_a_split_puts_the_new_node_above() -> None:
    """Whoever holds a node still holds the same end after any cut through it, with its pins."""
    world = World()
    holder = world.graft(DEVICE, "abcd")
    pages = world.cached()
    world.tree.pin(DEVICE, holder)
    holder.hits, holder.stored, holder.priority = 3, 5, 7
    upper = world.cut("ab")
    assert upper is not holder and holder.parent is upper
    assert (prefix_of(upper), prefix_of(holder)) == ("ab", "abcd")
    assert (upper.device.pins, holder.device.pins) == (0, 1)
    assert (upper.hits, upper.stored, upper.priority) == (3, 5, 7)
    assert (upper.used, upper.created) == (holder.used, holder.created)
    assert world.cached() == pages
    world.tree.unpin(DEVICE, holder)
    world.audit()


def test_a_cut_at_an_end_splits_nothing() -> None:
    """Where a node ends already, that node is returned; at 0 it is the root."""
    world = World()
    end = world.graft(DEVICE, "ab")
    match = world.match("ab")
    assert world.tree.cut(match, 2) is end
    assert world.tree.cut(match, 0) is world.tree.roots[b""]
    assert world.residency() == {"ab": "device"}


def test_a_cut_beyond_the_match_is_refused() -> None:
    """Nothing is split for a length that is not cached."""
    world = World()
    world.graft(DEVICE, "ab")
    with pytest.raises(InvariantError, match="cut at page 3 of a match of 2 pages"):
        world.tree.cut(world.match("ab"), 3)


def test_a_split_keeps_the_bytes_unready_in_both_parts() -> None:
    """What is on its way to a node is on its way to both halves."""
    world = World()
    node = world.graft(DEVICE, "ab")
    fence = OpenFence()
    node.device.ready = (fence,)
    upper = world.cut("a")
    assert upper.device.ready == node.device.ready == (fence,)


# Attaching


def test_a_commit_over_a_host_node_adopts() -> None:
    """Pages computed again for what only the host had become the node's device pages."""
    world = World()
    node = world.graft(HOST, "abc")
    graft_end = world.graft(DEVICE, "abc")
    assert graft_end is node
    assert world.residency() == {"abc": "both"}
    assert world.pools[DEVICE].owned_by(Owner.TREE).tolist() == [0, 1, 2]


def test_a_commit_over_device_pages_leaves_duplicates() -> None:
    """Pages that the device has already stay with their owner; only what is new is taken."""
    world = World()
    first = world.graft(DEVICE, "abc")
    pages = world.grab(DEVICE, 5)
    graft = world.tree.graft(
        DEVICE, world.cut(""), prompt_bytes("abxyz"), page_hashes("abxyz"), 0, pages, source=Owner.LEASE
    )
    assert graft.taken.tolist() == [False, False, True, True, True]
    assert prefix_of(graft.end) == "abxyz"
    assert first.device.pages is not None and first.device.pages.tolist() == [2]
    check_owner(world.pools[DEVICE], Owner.LEASE, pages[:2])
    assert world.residency() == {"ab": "device", "abc": "device", "abxyz": "device"}


def test_a_commit_adopts_and_extends_in_one_go() -> None:
    """Over device, then host, then nothing: duplicates, adopted pages, a new node."""
    world = World()
    world.graft(DEVICE, "a")
    world.graft(HOST, "abc")
    pages = world.grab(DEVICE, 5)
    graft = world.tree.graft(
        DEVICE, world.cut(""), prompt_bytes("abcde"), page_hashes("abcde"), 0, pages, source=Owner.LEASE
    )
    assert graft.taken.tolist() == [False, True, True, True, True]
    assert world.residency() == {"a": "both", "abc": "both", "abcde": "device"}


def test_prefetched_pages_hang_below_a_device_only_anchor() -> None:
    """Under write_back what a store gave is attached below a node that the host does not have."""
    world = World(write_back=True)
    anchor = world.graft(DEVICE, "ab")
    world.tree.anchor(anchor)
    end = world.graft(HOST, "abcd", 2)
    world.tree.unanchor(anchor)
    assert end.parent is anchor
    assert lengths(world, "abcd") == (2, 4)
    world.audit()


def test_no_pages_leave_no_node() -> None:
    """Attaching nothing changes nothing, below a root that is not there as well."""
    world = World()
    match = world.match("ab")
    graft = world.tree.graft(DEVICE, match.root, b"", [], 0, NO_PAGES, source=Owner.LEASE)
    assert graft.end is match.root and not world.tree.roots


def test_a_root_made_anew_is_found_by_its_seed() -> None:
    """Pages grafted below a root that was dropped meanwhile come below the one in its place."""
    world = World()
    root = world.match("ab").root
    pages = world.grab(DEVICE, 2)
    world.tree.graft(DEVICE, root, prompt_bytes("ab"), page_hashes("ab"), 0, pages, source=Owner.LEASE)
    assert world.tree.roots[b""] is not root
    assert lengths(world, "ab") == (2, 2)


def test_nothing_is_attached_below_a_detached_node() -> None:
    """What no match could reach would be lost: the graft is refused and the pages stay where they were."""
    world = World()
    node = world.graft(DEVICE, "ab")
    world.tree.pin(DEVICE, node)
    world.tree.detach(node)
    pages = world.grab(DEVICE, 1)
    with pytest.raises(InvariantError, match="no match can reach it"):
        world.tree.graft(DEVICE, node, prompt_bytes("abc"), page_hashes("abc"), 2, pages, source=Owner.LEASE)
    check_owner(world.pools[DEVICE], Owner.LEASE, pages)


def test_the_device_is_closed_upwards() -> None:
    """Device pages below a node that is on the host only are refused, by graft and by put."""
    world = World()
    upper = world.graft(HOST, "ab")
    lower = world.graft(HOST, "abc", 2)
    pages = world.grab(DEVICE, 1)
    for data in ("abc", "abx"):
        with pytest.raises(InvariantError, match="would be on the device, .* above it is not"):
            world.tree.graft(
                DEVICE, upper, prompt_bytes(data), page_hashes(data), 2, pages, source=Owner.LEASE
            )
    with pytest.raises(InvariantError, match="would be on the device"):
        world.tree.put(DEVICE, lower, pages, source=Owner.LEASE)
    world.pools[DEVICE].free(pages, Owner.LEASE)
    world.audit()


def test_a_node_takes_pages_once_and_all_of_them() -> None:
    """Pages for a tier that a node has, or too few, are refused: none would be lost track of."""
    world = World()
    node = world.graft(DEVICE, "ab")
    pages = world.grab(DEVICE, 2)
    with pytest.raises(InvariantError, match="cannot take 2 pages of device"):
        world.tree.put(DEVICE, node, pages, source=Owner.LEASE)
    with pytest.raises(InvariantError, match="cannot take 1 pages of host"):
        world.tree.put(HOST, node, world.grab(HOST, 1), source=Owner.LEASE)
    assert node.host.pages is None
    check_owner(world.pools[DEVICE], Owner.LEASE, pages)


def test_pages_that_are_not_the_givers_are_refused_and_leave_no_node() -> None:
    """A graft of pages that somebody else owns raises, and the tree is as before."""
    world = World()
    world.graft(DEVICE, "ab")
    taken = world.cached()
    with pytest.raises(InvariantError, match="0 is tree"):
        world.tree.graft(
            DEVICE,
            world.cut("a"),
            prompt_bytes("ax"),
            page_hashes("ax"),
            1,
            np.array([0]),
            source=Owner.LEASE,
        )
    assert world.cached() == taken
    world.audit()


# Letting go


def test_a_node_losing_its_last_tier_goes_at_once() -> None:
    """No ghost stays: the node is out of the tree with its last pages, and so is an empty root."""
    world = World()
    node = world.graft(DEVICE, "ab")
    world.graft(HOST, "ab")
    world.pools[DEVICE].free(world.tree.take(DEVICE, node), Owner.TREE)
    assert world.residency() == {"ab": "host"}
    world.pools[HOST].free(world.tree.take(HOST, node), Owner.TREE)
    assert not world.tree.roots
    assert node not in world.tree.queues[DEVICE] and node not in world.tree.queues[HOST]


@pytest.mark.parametrize("hold", ["device pin", "host pin", "anchor", "child"])
def test_the_last_tier_of_a_held_node_is_not_taken(hold: str) -> None:
    """Whoever stands on a node keeps it: taking its last pages raises and changes nothing."""
    world = World(write_back=True)
    tier = HOST if hold == "host pin" else DEVICE
    node = world.graft(tier, "ab")
    if hold == "anchor":
        world.tree.anchor(node)
    elif hold == "child":
        world.graft(HOST, "abc", 2)
    else:
        world.tree.pin(tier, node)
    before = world.cached()
    with pytest.raises(InvariantError, match="would lose its"):
        world.tree.take(tier, node)
    assert world.cached() == before


def test_pinned_pages_are_not_taken_from_a_node_with_two_tiers() -> None:
    """A pin on one tier is not satisfied by the other."""
    world = World()
    node = world.graft(DEVICE, "ab")
    world.graft(HOST, "ab")
    world.tree.pin(HOST, node)
    with pytest.raises(InvariantError, match="would lose its host pages"):
        world.tree.take(HOST, node)
    assert len(world.tree.take(DEVICE, node)) == 2


def test_device_pages_with_device_children_are_not_taken() -> None:
    """The device stays closed upwards."""
    world = World()
    for tier in (DEVICE, HOST):
        world.graft(tier, "a")
        world.graft(tier, "ab", 1)
    with pytest.raises(InvariantError, match="would lose its device pages"):
        world.tree.take(DEVICE, world.cut("a"))


def test_more_unpins_than_pins_are_refused() -> None:
    """A pin is undone once; a second holder's pin still protects the node."""
    world = World(device_pages=2)
    node = world.graft(DEVICE, "ab")
    world.tree.pin(DEVICE, node)
    world.tree.pin(DEVICE, node)
    world.tree.unpin(DEVICE, node)
    assert world.make_room(DEVICE, 1).num_pages == 0
    world.tree.unpin(DEVICE, node)
    with pytest.raises(InvariantError, match="unpinned from device more often than pinned"):
        world.tree.unpin(DEVICE, node)
    with pytest.raises(InvariantError, match="let go as an anchor more often than held"):
        world.tree.unanchor(node)
    assert node.device.pins == node.anchors == 0


def test_what_is_not_there_cannot_be_pinned() -> None:
    """A pin on a tier without pages, on a node that left, or on a root not in the tree, is refused."""
    world = World()
    node = world.graft(DEVICE, "ab")
    with pytest.raises(InvariantError, match="has nothing on host to pin"):
        world.tree.pin(HOST, node)
    world.tree.prune(node)
    with pytest.raises(InvariantError, match="has nothing on device to pin"):
        world.tree.pin(DEVICE, node)
    with pytest.raises(InvariantError, match="has nothing on device to pin"):
        world.tree.pin(DEVICE, world.match("ab").root)


def test_a_pinned_root_stays_and_an_empty_one_goes() -> None:
    """A request with nothing cached pins the root; its end takes an empty root along."""
    world = World()
    root = world.cut("")
    world.tree.pin(DEVICE, root)
    world.tree.anchor(root)
    world.tree.unpin(DEVICE, root)
    assert world.tree.roots == {b"": root}
    world.tree.unanchor(root)
    assert not world.tree.roots


def test_prune_frees_all_from_a_node_down() -> None:
    """The node and all below it go, with their pages in both tiers; what is beside it stays."""
    world = World()
    for prompt in ("abcd", "abx", "abxyz", "q"):
        world.graft(DEVICE, prompt)
        world.graft(HOST, prompt)
    assert world.tree.prune(world.cut("ab")) == 7
    assert world.residency() == {"q": "both"}
    world.audit()
