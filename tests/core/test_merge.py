"""PrefixTree.merge: a split is undone where nothing tells the halves apart, and peeling leaves no chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hicache_async.core.node import Node
from hicache_async.core.pool import Owner
from tests.core.room_proof import proven_room
from tests.core.world import DEVICE, HOST, OpenFence, World, letters, page_hashes, prefix_of

NUM_PAGES = 64
PROMPT = "".join("abc"[page % 3] for page in range(NUM_PAGES))


def halves(*, host: bool = False, device_pages: int = 16) -> tuple[World, Node, Node]:
    """Return a world where "abcd" was cached as one node and then split behind "ab"."""
    world = World(device_pages=device_pages)
    lower = world.graft(DEVICE, "abcd")
    if host:
        world.graft(HOST, "abcd")
    return world, world.cut("ab"), lower


def num_nodes(world: World) -> int:
    """Return how many nodes there are, the roots left out."""
    return len(world.residency())


# What is joined


@pytest.mark.parametrize("host", [False, True])
def test_a_split_is_undone(host: bool) -> None:
    """The lower half becomes the node it was, with all tokens, hashes and pages of each tier, in order."""
    world, upper, lower = halves(host=host)
    pages = world.cached()
    world.tree.merge(upper)
    assert world.all_nodes() == [lower]
    assert (letters(lower), list(lower.hashes)) == ("abcd", page_hashes("abcd"))
    assert lower.parent is world.tree.roots[b""] and not upper.attached
    assert world.cached() == pages
    world.audit()
    assert world.match("abcd").path == [lower] and world.match("abc").local_pages == 3
    world.close()


def test_a_joined_node_keeps_its_children() -> None:
    """What stood on the lower half stands on the joined node, and is found below it."""
    world, upper, _ = halves()
    for prompt in ("abcdx", "abcdyz"):
        world.graft(DEVICE, prompt, 4)
    world.tree.merge(upper)
    assert world.residency() == {"abcd": "device", "abcdx": "device", "abcdyz": "device"}
    world.audit()


def test_siblings_of_the_joined_node_stay() -> None:
    """The place among the children of the node above is taken over, and no other one is touched."""
    world, upper, _ = halves()
    world.graft(DEVICE, "xy")
    world.tree.merge(upper)
    assert world.residency() == {"abcd": "device", "xy": "device"}
    assert world.tree.roots[b""].only_child is None
    world.audit()


def test_the_upper_half_is_nobodys_victim_any_more() -> None:
    """A node that was taken into its child leaves the eviction queues; its pages go with the joined node."""
    world, upper, lower = halves(device_pages=4)
    for node in (upper, lower):
        world.copy_nodes(DEVICE, [node], world.grab(HOST, 2))
        world.finish_all()
    assert upper in world.tree.queues[HOST], "it was a victim while it was alone on the host"
    world.tree.merge(upper)
    for queue in world.tree.queues.values():
        assert upper not in queue and lower in queue
    assert proven_room(world, DEVICE, 4).num_pages == 4
    assert world.residency() == {"abcd": "host"}


def test_whoever_holds_the_lower_half_still_holds_the_same_end() -> None:
    """Pins and anchors of the lower half protect the joined node and are undone as before."""
    world, upper, lower = halves(host=True)
    for tier in (DEVICE, HOST):
        world.tree.pin(tier, lower)
    world.tree.anchor(lower)
    world.tree.merge(upper)
    assert world.cut("abcd") is lower and prefix_of(lower) == "abcd"
    pins = Counter({lower: 1})
    world.audit({DEVICE: pins, HOST: pins}, anchors=pins)
    assert world.make_room(DEVICE, 16).num_pages == 12
    for tier in (DEVICE, HOST):
        world.tree.unpin(tier, lower)
    world.tree.unanchor(lower)
    assert world.make_room(DEVICE, 16).num_pages == 16
    world.close()


# What is not joined


def unlike(attribute: str) -> Callable[[World, Node, Node], None]:
    def change(world: World, upper: Node, lower: Node) -> None:
        setattr(upper, attribute, getattr(upper, attribute) + 1)

    return change


def take_host(world: World, upper: Node, lower: Node) -> None:
    world.pools[HOST].free(world.tree.take(HOST, lower), Owner.TREE)


def take_device(world: World, upper: Node, lower: Node) -> None:
    world.pools[DEVICE].free(world.tree.take(DEVICE, lower), Owner.TREE)


def cut_off_a_child(world: World, upper: Node, lower: Node) -> None:
    branch = world.graft(DEVICE, "abx", 2)
    world.tree.pin(DEVICE, branch)
    world.tree.detach(branch)
    lower.used = upper.used


DIFFERENCES: dict[str, Callable[[World, Node, Node], object]] = {
    "hits": unlike("hits"),
    "stored": unlike("stored"),
    "used": unlike("used"),
    "created": unlike("created"),
    "priority": unlike("priority"),
    "the lower one has lost the host": take_host,
    "the lower one has lost the device": take_device,
    "device bytes of the upper one on their way": lambda world, upper, lower: setattr(
        upper.device, "ready", (OpenFence(),)
    ),
    "host bytes of the upper one on their way": lambda world, upper, lower: setattr(
        upper.host, "ready", (OpenFence(),)
    ),
    "device bytes of the lower one on their way": lambda world, upper, lower: setattr(
        lower.device, "ready", (OpenFence(),)
    ),
    "host bytes of the lower one on their way": lambda world, upper, lower: setattr(
        lower.host, "ready", (OpenFence(),)
    ),
    "a device pin between them": lambda world, upper, lower: world.tree.pin(DEVICE, upper),
    "a host pin between them": lambda world, upper, lower: world.tree.pin(HOST, upper),
    "an anchor between them": lambda world, upper, lower: world.tree.anchor(upper),
    "a held branch that was cut off between them": cut_off_a_child,
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_halves_that_differ_stay_apart(difference: str) -> None:
    """One difference is enough, and somebody who stands between the halves is one."""
    world, upper, lower = halves(host=True)
    DIFFERENCES[difference](world, upper, lower)
    before = world.residency(), world.cached()
    world.tree.merge(upper)
    assert (world.residency(), world.cached()) == before
    assert upper.attached and lower.parent is upper


def test_a_node_with_a_branch_stays() -> None:
    """Where prompts part a node has to end."""
    world, upper, lower = halves()
    world.graft(DEVICE, "abx", 2).used = lower.used = upper.used
    world.tree.merge(upper)
    assert world.residency() == {"ab": "device", "abcd": "device", "abx": "device"}


def test_roots_leaves_and_detached_nodes_stay() -> None:
    """There is nothing to join for a root, for a node without children, or for one that was cut off."""
    world, upper, lower = halves()
    for node in (world.tree.roots[b""], lower):
        world.tree.merge(node)
    assert world.residency() == {"ab": "device", "abcd": "device"}
    world.tree.pin(DEVICE, lower)
    world.tree.detach(upper)
    world.tree.merge(upper)
    assert world.tree.detached == {upper, lower} and lower.path() == [upper, lower]
    world.audit({DEVICE: Counter({lower: 1}), HOST: Counter()})


# Peeling


def peel(world: World, afterwards: Callable[[World], None] = lambda world: None) -> list[int]:
    """Take one page more of the device at a time; returns how many nodes there were after each."""
    counts = []
    for free in range(1, NUM_PAGES + 1):
        assert proven_room(world, DEVICE, free).num_pages == free
        afterwards(world)
        world.audit()
        counts.append(num_nodes(world))
    return counts


def test_peeling_what_the_host_has_leaves_two_nodes() -> None:
    """Page by page the device loses a prompt: what it still has is one node, what only the host has another."""
    world = World(NUM_PAGES, NUM_PAGES)
    world.graft(DEVICE, PROMPT)
    world.graft(HOST, PROMPT)
    assert peel(world) == [2] * (NUM_PAGES - 1) + [1]
    assert world.residency() == {PROMPT: "host"}
    world.close()


def test_peeling_the_host_leaves_two_nodes() -> None:
    """Page by page the host loses its copies of what the device keeps."""
    world = World(NUM_PAGES, NUM_PAGES)
    world.graft(DEVICE, PROMPT)
    world.graft(HOST, PROMPT)
    for free in range(1, NUM_PAGES + 1):
        assert proven_room(world, HOST, free).num_pages == free
        assert num_nodes(world) == (2 if free < NUM_PAGES else 1)
    assert world.residency() == {PROMPT: "device"}
    world.audit()


def test_peeling_what_nobody_else_has_leaves_one_node() -> None:
    """Page by page a prompt without a copy gets shorter."""
    world = World(NUM_PAGES, NUM_PAGES)
    world.graft(DEVICE, PROMPT)
    assert peel(world) == [1] * (NUM_PAGES - 1) + [0]


def test_peeling_under_write_back_leaves_two_nodes_at_each_step() -> None:
    """Page by page a prompt moves to the host; a page that has arrived joins those below it."""
    world = World(NUM_PAGES, NUM_PAGES, write_back=True)
    world.graft(DEVICE, PROMPT)
    assert peel(world, World.finish_all) == [2] * (NUM_PAGES - 1) + [1]
    assert world.residency() == {PROMPT: "host"}
    world.close()


def test_peeling_faster_than_the_copies_leaves_one_node_when_they_are_at_rest() -> None:
    """Pages on their way are nodes of their own; when the copies have ended, in their order, none is left over."""
    world = World(NUM_PAGES, NUM_PAGES, write_back=True)
    world.graft(DEVICE, PROMPT)
    counts = peel(world)
    assert counts == [*range(2, NUM_PAGES + 1), NUM_PAGES]
    world.finish_all()
    assert world.residency() == {PROMPT: "host"}
    world.audit()
    world.close()


def test_peeling_prompts_that_share_their_head() -> None:
    """Each prompt leaves by itself, oldest tail first, and where they part is the only cut that stays."""
    world = World(12, 12, write_back=True)
    world.graft(DEVICE, "aaaabbbb")
    world.graft(DEVICE, "aaaacccc", 4)
    for free in range(1, 13):
        proven_room(world, DEVICE, free)
        world.finish_all()
        assert num_nodes(world) <= 4
    assert world.residency() == {"aaaa": "host", "aaaabbbb": "host", "aaaacccc": "host"}
    world.close()
