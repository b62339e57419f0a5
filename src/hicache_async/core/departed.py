"""Departed: how often pages that have left every tier had been committed, should they come back."""

from __future__ import annotations

from collections.abc import Sequence

from .node import Node

MAX_PAGES = 1 << 16
"""Pages that are remembered, the last ones to leave; some ten megabytes at most."""


class Departed:
    """Hits by page hash. Without them a prompt that is evicted after each use would stay new for ever."""

    __slots__ = ("_hits", "_max_pages")

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._hits: dict[bytes, int] = {}
        self._max_pages = max_pages

    def __len__(self) -> int:
        return len(self._hits)

    def remember(self, node: Node) -> None:
        """Note that ``node`` leaves its last tier."""
        if not node.hits:
            return
        for page_hash in node.hashes:
            self._hits.pop(page_hash, None)  # the order is that of leaving
            self._hits[page_hash] = node.hits
        while len(self._hits) > self._max_pages:
            del self._hits[next(iter(self._hits))]

    def recall(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Forget the pages that have come back.

        Returns: how many of ``hashes`` are remembered, from the first on, and with how many hits, the least of them.
        """
        known: list[int] = []
        for page_hash in hashes:
            hits = self._hits.pop(page_hash, None)
            if hits is None:
                break
            known.append(hits)
        return len(known), min(known, default=0)

    def clear(self) -> None:
        """Forget all pages."""
        self._hits.clear()
