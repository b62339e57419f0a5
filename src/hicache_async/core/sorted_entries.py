"""SortedEntries: nodes by their keys, in order at any time, at a cost that hardly grows with their number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TypeAlias

from ..eviction import Comparable
from .node import Node

Entry: TypeAlias = tuple[Comparable, int, Node]
"""A key, a number that no other entry has, and the node; two entries never compare their nodes."""


class SortedEntries:
    """A sorted list in blocks: to add or to remove is two binary searches and the shift of one short block.

    A heap cannot remove, so what left it or has risen stays at its head until somebody has to clear it
    away: an eviction after a long time of hits alone would stop the loop for all of them.

    Args:
        block_length: entries of one block before it is cut in two.
    """

    __slots__ = ("_block_length", "_blocks", "_lasts")

    def __init__(self, block_length: int = 512) -> None:
        self._block_length = block_length
        self._blocks: list[list[Entry]] = []
        self._lasts: list[Entry] = []  # the last entry of each block

    def add(self, entry: Entry) -> None:
        """Put ``entry`` in its place."""
        if not self._blocks:
            self._blocks.append([])
            self._lasts.append(entry)
        place = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[place]
        insort(block, entry)
        self._lasts[place] = block[-1]
        if len(block) > self._block_length:
            half = len(block) // 2
            self._blocks[place : place + 1] = block[:half], block[half:]
            self._lasts.insert(place, block[half - 1])

    def remove(self, entry: Entry) -> None:
        """Take ``entry``, which is there, out."""
        place, index = self._find(entry)
        block = self._blocks[place]
        del block[index]
        if not block:
            del self._blocks[place], self._lasts[place]
        else:
            self._lasts[place] = block[-1]

    def after(self, entry: Entry | None) -> Entry | None:
        """Return the first entry behind ``entry``, which need not be there, or of all; None: there is none."""
        if entry is None:
            return self._blocks[0][0] if self._blocks else None
        place = bisect_right(self._lasts, entry)
        if place == len(self._blocks):
            return None
        block = self._blocks[place]
        return block[bisect_right(block, entry)]

    def _find(self, entry: Entry) -> tuple[int, int]:
        if self._blocks[0][0] is entry:
            return 0, 0
        place = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[place]
        index = min(bisect_left(block, entry), len(block) - 1)
        if block[index] is entry:
            return place, index
        # Keys that have no order, against what is demanded of them, are found all the same.
        places = ((place, index) for place, block in enumerate(self._blocks) for index in range(len(block)))
        return next((place, index) for place, index in places if self._blocks[place][index] is entry)
