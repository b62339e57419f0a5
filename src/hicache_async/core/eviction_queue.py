"""EvictionQueue: the node that goes first among those that may lose a tier, at a cost free of the tree's size."""

from __future__ import annotations

from collections.abc import Generator

from .._log import logger
from ..eviction import Comparable, EvictionPolicy, Lru
from ..types import Tier
from .node import Node
from .sorted_entries import Entry, SortedEntries


class EvictionQueue:
    """The nodes of one tier that may lose it, by their keys, put right when somebody looks.

    A node is offered when it may have become evictable. Its place is its key at that time, or at the
    last offer since; when it comes to the head and its key has risen, it is put back, and when it is not
    evictable any more it is forgotten until it is offered again. So a match costs an attribute and
    nothing here, and an eviction pays only for those that were matched, and not offered, since the last.

    A policy whose keys fall or rise by themselves gets a wrong order, and nothing worse: who was asked
    for a key in one search is not asked again. One that raises, or whose keys have no order, is replaced by
    lru, and the log says so.

    Args:
        policy: whose keys order the nodes, the smallest first; among equals the one that waits longest.
    Attributes:
        key: of the policy.
    """

    __slots__ = ("_entries", "_sequence", "_sorted", "_tier", "key")

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self._tier = tier
        self.key = policy.key
        self._sorted = SortedEntries()
        self._entries: dict[Node, Entry] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def is_evictable(self, node: Node) -> bool:
        """Return whether ``node`` may lose the tier: nothing pins it and no child stands on it."""
        copy = node.copy_in(self._tier)
        return node.attached and copy.pages is not None and not copy.pins and not copy.children

    def offer(self, node: Node) -> None:
        """Consider ``node``; one that is in the queue goes by its key of now."""
        if not self.is_evictable(node):
            return
        try:
            key, entry = self.key(node), self._entries.get(node)
            if entry is None or entry[0] < key:
                self._place(node, key)
        except Exception as error:  # noqa: BLE001 - a policy is the user's code, and its bug no request's
            self._fall_back(error, node)

    def pop(self) -> Node | None:
        """Take out the evictable node, its bytes at rest, that goes first; None: there is none."""
        key = self.key
        node = next(self.coldest(), None)
        if node is None and self.key is not key:  # the policy has just failed
            node = next(self.coldest(), None)
        if node is not None:
            self.discard(node)
        return node

    def coldest(self) -> Generator[Node]:
        """Yield the evictable nodes, their bytes at rest, in the order in which they would go; all stay.

        Between two of them the queue may be used, and any node changed; one that is put further back
        by an offer comes again.
        """
        newest, last = self._sequence, None
        while (entry := self._sorted.after(last)) is not None:
            _, sequence, node = entry
            if not self.is_evictable(node):
                self.discard(node)
                continue
            try:
                has_risen = sequence <= newest and self._has_risen(entry)
            except Exception as error:  # noqa: BLE001 - as above
                self._fall_back(error)
                return
            if not has_risen:
                last = entry
                if node.copy_in(self._tier).is_ready():
                    yield node

    def discard(self, node: Node) -> None:
        """Forget a node, if it is there."""
        entry = self._entries.pop(node, None)
        if entry is not None:
            self._sorted.remove(entry)

    def _has_risen(self, entry: Entry) -> bool:
        known, _, node = entry
        key = self.key(node)
        if known < key:
            self._place(node, key)
            return True
        return False

    def _fall_back(self, error: Exception, node: Node | None = None) -> None:
        # From now on by last use, which cannot fail.
        logger.error("eviction.policy_failed", tier=self._tier.value, error=repr(error), hint="it is lru now")
        self.key = Lru().key
        nodes = [*self._entries, *([node] if node is not None else ())]
        self._entries, self._sorted = {}, SortedEntries()
        for each in dict.fromkeys(nodes):
            self.offer(each)

    def _place(self, node: Node, key: Comparable) -> None:
        self._sequence += 1
        entry = (key, self._sequence, node)
        self._sorted.add(entry)  # raises where keys cannot be compared: before anything is changed
        self.discard(node)
        self._entries[node] = entry
