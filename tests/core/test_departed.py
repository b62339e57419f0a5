"""What is remembered of pages that left every tier."""

from __future__ import annotations

from hicache_async.core.departed import Departed
from hicache_async.core.node import Node


def node_of(names: str, hits: int) -> Node:
    """Return a node of one page a letter."""
    node = Node(None, names.encode(), [name.encode() for name in names])
    node.hits = hits
    return node


def hashes(names: str) -> list[bytes]:
    """Return the hashes of pages."""
    return [name.encode() for name in names]


def test_pages_that_come_back_bring_their_hits_once() -> None:
    """The first pages that are known count, with the least of their hits, and only the first time."""
    departed = Departed()
    departed.remember(node_of("cd", 1))
    departed.remember(node_of("ab", 3))
    assert departed.recall(hashes("abcx")) == (3, 1)
    assert departed.recall(hashes("abcx")) == (0, 0)
    assert departed.recall(hashes("d")) == (1, 1)
    assert len(departed) == 0


def test_what_was_never_committed_is_not_remembered() -> None:
    """Pages without a hit would only push out others."""
    departed = Departed()
    departed.remember(node_of("ab", 0))
    assert len(departed) == 0


def test_the_memory_is_bounded_and_keeps_what_left_last() -> None:
    """Of more pages than are remembered those that left first are forgotten; to leave again is to leave now."""
    departed = Departed(max_pages=3)
    for names in ("a", "b", "c", "a", "d"):
        departed.remember(node_of(names, 1))
    assert len(departed) == 3
    assert [departed.recall(hashes(name))[0] for name in "abcd"] == [1, 0, 1, 1]


def test_all_is_forgotten_by_clear() -> None:
    """After a clear nothing was ever here."""
    departed = Departed()
    departed.remember(node_of("ab", 1))
    departed.clear()
    assert departed.recall(hashes("ab")) == (0, 0)
