"""TreeObserver: what is said when, each thing once, and enough to know all that is cached."""

from __future__ import annotations

import pytest

from hicache_async.core.node import Node
from hicache_async.core.pool import Owner
from hicache_async.errors import InvariantError
from hicache_async.types import Tier
from tests.core.world import DEVICE, HOST, Mirror, World, page_hashes, prefix_of, prompt_bytes


class Listener(Mirror):
    """A mirror that notes down what it heard."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[str] = []

    def stored(self, tier: Tier, node: Node) -> None:
        super().stored(tier, node)
        self._note("stored", tier, node)

    def removed(self, tier: Tier, node: Node) -> None:
        super().removed(tier, node)
        self._note("removed", tier, node)

    def cleared(self, seed: bytes) -> None:
        super().cleared(seed)
        self._heard.append(f"cleared {seed.decode()!r}")

    def _note(self, what: str, tier: Tier, node: Node) -> None:
        self._heard.append(f"{what} {tier} {prefix_of(node)} {node.num_pages}")

    def heard(self) -> list[str]:
        """Return what was heard since it was last asked."""
        heard, self._heard = self._heard, []
        return heard


def make_world(*prompts: str, host: bool = False, write_back: bool = False) -> tuple[World, Listener]:
    """Return a world that has cached ``prompts``, and its listener, who has been told of them."""
    listener = Listener()
    world = World(write_back=write_back, observer=listener)
    for prompt in prompts:
        for tier in (DEVICE, HOST) if host else (DEVICE,):
            world.graft(tier, prompt, world.match(prompt).local_pages if tier is DEVICE else 0)
    listener.heard()
    return world, listener


# Stored


def test_each_node_that_gets_pages_is_told() -> None:
    """A commit tells of the new node alone, with its tokens, its hashes and the path above it."""
    world, listener = make_world("ab")
    world.graft(DEVICE, "abcde", 2)
    assert listener.heard() == ["stored device abcde 3"]
    world.graft(HOST, "abcde")
    assert listener.heard() == ["stored host ab 2", "stored host abcde 3"]


def test_the_node_is_complete_when_it_is_told() -> None:
    """Whoever hears of a node finds its tokens, its hashes, its pages and the hash before them."""

    class Reader(Listener):
        def stored(self, tier: Tier, node: Node) -> None:
            hashes = page_hashes(prefix_of(node))
            start = len(hashes) - node.num_pages
            assert list(node.hashes) == hashes[start:]
            assert node.segment == prompt_bytes(prefix_of(node)[start:])
            assert node.parent is not None and list(node.parent.hashes[-1:]) == hashes[start - 1 : start][:1]
            pages = node.copy_in(tier).pages
            assert pages is not None and len(pages) == node.num_pages
            super().stored(tier, node)

    listener = Reader()
    world = World(observer=listener)
    world.graft(DEVICE, "ab")
    world.graft(DEVICE, "abc", 2)
    assert listener.heard() == ["stored device ab 2", "stored device abc 1"]


def test_duplicates_are_not_told() -> None:
    """Pages that the tier has already stay with their owner: only what is new is heard."""
    world, listener = make_world("abc")
    world.graft(DEVICE, "abc")
    assert listener.heard() == []
    world.graft(DEVICE, "abxy")
    assert listener.heard() == ["stored device abxy 2"]


def test_what_is_refused_is_not_told() -> None:
    """A put or a take that raises changed nothing, and nobody hears of it."""
    world, listener = make_world("ab")
    node = world.cut("ab")
    pages = world.grab(HOST, 1)
    with pytest.raises(InvariantError):
        world.tree.put(HOST, node, pages, source=Owner.LEASE)
    world.tree.pin(DEVICE, node)
    with pytest.raises(InvariantError):
        world.tree.take(DEVICE, node)
    assert listener.heard() == []


def test_changes_of_shape_are_not_told() -> None:
    """Splitting and joining nodes changes nothing of what is cached."""
    world, listener = make_world("abcd")
    upper = world.cut("ab")
    world.tree.merge(upper)
    assert not upper.attached
    world.match("abc")
    assert listener.heard() == []
    world.tree.prune(world.cut("abcd"))
    assert listener.heard() == ["removed device abcd 4"]


# Removed


def test_each_tier_is_told_by_itself() -> None:
    """What leaves the device and stays on the host is removed from the device only."""
    world, listener = make_world("ab", host=True)
    world.make_room(DEVICE, 16)
    assert listener.heard() == ["removed device ab 2"]
    world.make_room(HOST, 16)
    assert listener.heard() == ["removed host ab 2"]


def test_exactly_what_was_evicted_is_told() -> None:
    """Of a victim that loses its tail the tail is heard, and the rest is still cached."""
    world, listener = make_world("abcd")
    world.make_room(DEVICE, 13)
    assert listener.heard() == ["removed device abcd 1"]
    assert listener.cached[DEVICE] == {(b"", "a"), (b"", "ab"), (b"", "abc")}


def test_a_move_is_told_as_an_arrival_and_a_departure() -> None:
    """Under write_back a victim is on the host before it is off the device: no moment has it nowhere."""
    world, listener = make_world("abcd", write_back=True)
    world.make_room(DEVICE, 14)
    assert listener.heard() == ["stored host abcd 2", "removed device abcd 2"]
    world.finish_all()
    assert listener.heard() == []


def test_what_is_dropped_is_told_from_its_end() -> None:
    """Whoever goes along with a dropped node is heard before it."""
    world, listener = make_world("ab", write_back=True)
    world.graft(HOST, "abc", 2)
    listener.heard()
    world.tree.prune(world.cut("ab"))
    assert listener.heard() == ["removed host abc 1", "removed device ab 2"]


def test_what_is_cut_off_is_told_at_once_and_once() -> None:
    """A match finds detached pages no longer, so all are removed, held or not; their end is silent."""
    world, listener = make_world("ab", "abc", "abd", host=True)
    world.graft(DEVICE, "abe", 2)
    listener.heard()
    held = world.cut("abc")
    world.tree.pin(DEVICE, held)
    world.tree.detach(world.cut("ab"))
    heard = listener.heard()
    expected = [f"removed {tier} {each}" for tier in (DEVICE, HOST) for each in ("ab 2", "abc 1", "abd 1")]
    assert sorted(heard) == sorted([*expected, "removed device abe 1"])
    assert listener.cached == {DEVICE: set(), HOST: set()}
    world.tree.unpin(DEVICE, held)
    assert not world.tree.detached and listener.heard() == []


# Cleared


def test_a_cleared_root_is_told_in_one() -> None:
    """All prompts of a namespace go with one call, held ones too, and their end is silent."""
    world, listener = make_world("ab", "abc", host=True)
    world.graft(DEVICE, "xy", seed=b"tenant")
    listener.heard()
    held = world.cut("abc")
    world.tree.pin(HOST, held)
    world.tree.detach(world.tree.roots[b""])
    assert listener.heard() == ["cleared ''"]
    assert listener.cached == {DEVICE: {(b"tenant", "x"), (b"tenant", "xy")}, HOST: set()}
    world.tree.unpin(HOST, held)
    assert listener.heard() == []
    world.tree.detach(world.tree.roots[b"tenant"])
    assert listener.heard() == ["cleared 'tenant'"]


def test_what_grows_anew_is_told_anew() -> None:
    """A new root's prompts are stored, also while the old ones are still held."""
    world, listener = make_world("ab")
    held = world.cut("ab")
    world.tree.pin(DEVICE, held)
    world.tree.detach(world.tree.roots[b""])
    world.graft(DEVICE, "ab")
    assert listener.heard() == ["cleared ''", "stored device ab 2"]
    world.tree.unpin(DEVICE, held)
    assert listener.heard() == []
    assert listener.cached[DEVICE] == {(b"", "a"), (b"", "ab")}


def test_an_empty_root_that_goes_is_no_clear() -> None:
    """The root that leaves with its last prompt, or with a request that had nothing cached, is not told."""
    world, listener = make_world("ab")
    world.make_room(DEVICE, 16)
    assert not world.tree.roots
    root = world.cut("")
    world.tree.pin(DEVICE, root)
    world.tree.unpin(DEVICE, root)
    assert not world.tree.roots
    assert listener.heard() == ["removed device ab 2"]
