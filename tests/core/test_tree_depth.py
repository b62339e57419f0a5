"""PrefixTree at depth: a long decode is a long chain of nodes, and none of it recurses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hicache_async.core import walk
from hicache_async.core.audit import check_tree
from hicache_async.core.node import Node
from hicache_async.core.pool import Owner
from tests.core.world import DEVICE, HOST, PAGE_NBYTES, World, prompt_bytes

DEPTH = 5_000


def deep_world() -> tuple[World, str]:
    """Return a world with one chain of one-page nodes, as long decoding makes it."""
    world = World(DEPTH + 100, DEPTH + 100, write_back=True)
    prompt = "".join("abc"[i % 3] for i in range(DEPTH))
    node = world.graft(DEVICE, prompt)
    for _ in range(DEPTH - 1):
        world.tree.split(node, 1)
    return world, prompt


def test_depth_is_no_limit_to_matching_and_letting_go() -> None:
    """A chain of 5,000 nodes is walked, matched, cut, held, audited, moved, detached and reaped."""
    world, prompt = deep_world()
    match = world.match(prompt)
    assert (match.device_pages, len(match.path)) == (DEPTH, DEPTH)
    end = world.tree.cut(match, DEPTH)
    assert [node.num_pages for node in end.path()] == [1] * DEPTH
    assert len(list(match.path[0].subtree())) == DEPTH
    assert all(below.parent is above for above, below in pairwise(match.path))
    repr(end), repr(match.path[0])
    check_tree(world.tree, write_through=False)
    assert len(world.make_room(DEVICE, DEPTH).moves) == DEPTH - 100
    world.graft(HOST, prompt + "z", DEPTH)
    for copy in world.copies:  # let them all go at once: to finish one looks at every node
        world.tree.unpin(HOST, copy.pins[0][1])
    world.copies.clear()
    end = world.cut(prompt)
    world.tree.pin(HOST, end)
    world.tree.detach(match.path[0])
    assert len(world.tree.detached) == DEPTH
    world.tree.unpin(HOST, end)
    assert not world.tree.detached and not world.tree.roots


def test_depth_is_no_limit_to_taking_and_pruning() -> None:
    """A chain of 5,000 nodes is emptied from its end, or pruned from its top, and forgotten."""
    world, prompt = deep_world()
    match = world.match(prompt)
    for node in reversed(match.path[DEPTH // 2 :]):
        world.pools[DEVICE].free(world.tree.take(DEVICE, node), Owner.TREE)
    assert world.match(prompt).local_pages == DEPTH // 2
    assert world.tree.prune(match.path[0]) == DEPTH // 2
    assert not world.tree.roots
    node: Node = match.path[0]
    del match, world
    assert node.children is None


def test_a_walk_of_any_depth_compares_in_runs() -> None:
    """Matching a chain looks up one key at most, not one for each node."""
    world, prompt = deep_world()
    lookups = 0

    class CountingKey(bytearray):
        def __getitem__(self, index: object) -> bytearray:
            nonlocal lookups
            lookups += 1
            return super().__getitem__(index)  # type: ignore[index, return-value]

    match = world.tree.match(b"", CountingKey(prompt_bytes(prompt)), DEPTH)
    assert match.local_pages == DEPTH == len(prompt_bytes(prompt)) // PAGE_NBYTES
    assert lookups <= 1


def test_long_nodes_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of nodes that are too long to copy matches as far as one that is compared in runs."""
    world, prompt = deep_world()
    questions = [prompt[:length] + tail for length in (0, 1, 2, 100, DEPTH) for tail in ("", "z", "zz")]
    expected = [(len(match.path), match.local_pages) for match in map(world.match, questions)]
    runs: list[Node] = []
    monkeypatch.setattr(walk, "run_from", lambda child, num_pages: runs.append(child))
    monkeypatch.setattr(walk, "LONG_NBYTES", PAGE_NBYTES)
    found = [(len(match.path), match.local_pages) for match in map(world.match, questions)]
    assert found == expected
    assert not runs
