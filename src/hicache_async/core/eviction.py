"""EvictionQueue: the least recently used node that may lose a tier, at a cost free of the tree's size."""

from __future__ import annotations

import heapq

from ..types import Tier
from .node import Node


class EvictionQueue:
    """A heap of the nodes of one tier that may lose it, put right lazily.

    A node is offered when it may have become evictable. Its place is its ``used`` at that time; when
    it comes to the head and was used since, it is put back, and when it is not evictable any more it
    is forgotten until it is offered again. So a match costs an attribute, never a heap operation.
    """

    __slots__ = ("_entries", "_heap", "_sequence", "_tier")

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._heap: list[tuple[int, int, Node]] = []
        self._entries: dict[Node, int] = {}
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
        """Consider ``node``, unless it is in the queue."""
        if node not in self._entries and self.is_evictable(node):
            self._push(node)

    def pop(self) -> Node | None:
        """Take out the evictable node, its bytes at rest, that was used longest ago; None: there is none."""
        unsettled: list[Node] = []
        found: Node | None = None
        while self._heap and found is None:
            used, sequence, node = heapq.heappop(self._heap)
            if self._entries.get(node) != sequence:
                continue
            del self._entries[node]
            if not self.is_evictable(node):
                continue
            if node.used != used:
                self._push(node)
            elif not node.copy_in(self._tier).is_ready():
                unsettled.append(node)
            else:
                found = node
        for node in unsettled:
            self._push(node)
        return found

    def discard(self, node: Node) -> None:
        """Forget a node that left the tree; its heap entry is dropped when met, or in bulk."""
        if self._entries.pop(node, None) is not None and len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _push(self, node: Node) -> None:
        self._sequence += 1
        self._entries[node] = self._sequence
        heapq.heappush(self._heap, (node.used, self._sequence, node))
