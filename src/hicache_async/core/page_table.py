"""PageTable: the device pages of one request in logical order, and the room promised to it beyond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .._fence import combine
from ..abc import Fence
from ..types import Pages
from .pool import NO_PAGES, Grant, Owner, PagePool

_NONE_OWNED: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)


class PageTable:
    """Device pages of one request.

    Args:
        pool: the book of device pages.
    Attributes:
        pages: page ids from token 0 on, int64.
        owned: which of ``pages`` are this request's own; the others are the tree's.
        reserved: own pages that have no place in the table yet.
        fences: behind which own pages of the table may be written.
    """

    __slots__ = ("_behind", "_pool", "fences", "owned", "pages", "reserved")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: Pages = NO_PAGES
        self.owned = _NONE_OWNED
        self.reserved: Pages = NO_PAGES
        self.fences: Sequence[Fence] = ()
        # Parts [start, end) of the reserve and the fences before them, in order; the rest waits for nothing.
        self._behind: list[tuple[int, int, Sequence[Fence]]] = []

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def holds_pages(self) -> bool:
        """Whether anything would come back if the request were released."""
        return bool(len(self.pages) or len(self.reserved))

    def own_pages(self) -> Pages:
        """Return the pages booked to this request."""
        return np.concatenate((self.pages[self.owned], self.reserved))

    def begin(self, pages: Pages) -> None:
        """Start with ``pages``, all of them the tree's."""
        self.pages, self.owned = pages, np.zeros(len(pages), dtype=np.bool_)

    def reserve(self, grant: Grant) -> None:
        """Add pages that are booked to this request already."""
        start = len(self.reserved)
        self.reserved = np.concatenate((self.reserved, grant.pages))
        if grant.after:
            self._behind.append((start + grant.num_plain, len(self.reserved), grant.after))

    def first_reserved(self, num_pages: int) -> Grant:
        """Return the first ``num_pages`` of the reserve, which stay there, and what they wait for."""
        behind = [part for part in self._behind if part[0] < num_pages]
        after = [fence for *_, fences in behind for fence in fences]
        return Grant(self.reserved[:num_pages], after, behind[0][0] if behind else num_pages)

    def take_reserved(self, num_pages: int) -> Grant:
        """Take the first ``num_pages`` out of the reserve, still booked to this request."""
        grant = self.first_reserved(num_pages)
        self.reserved = self.reserved[num_pages:]
        self._behind = [
            (max(0, start - num_pages), end - num_pages, fences)
            for start, end, fences in self._behind
            if end > num_pages
        ]
        return grant

    def missing_pages(self, total_pages: int) -> int:
        """Return how many pages beyond table and reserve it takes to hold ``total_pages``."""
        return max(0, total_pages - len(self.pages) - len(self.reserved))

    def place(self, total_pages: int) -> Pages:
        """Move reserved pages into the table until it holds ``total_pages``; returns the new ones."""
        grant = self.take_reserved(max(0, total_pages - len(self.pages)))
        self.fences = (*self.fences, *grant.after)
        self.pages = np.concatenate((self.pages, grant.pages))
        self.owned = np.concatenate((self.owned, np.ones(len(grant.pages), dtype=np.bool_)))
        return grant.pages

    def open_fence(self) -> Fence | None:
        """Return one fence behind which own pages may be written; None: at once."""
        fence = combine(self.fences)
        self.fences = () if fence is None else (fence,)
        return fence

    def free_reserved(self, keep_pages: int = 0) -> None:
        """Give back the reserve beyond ``keep_pages``, each page to wait for what it waited for."""
        while len(self.reserved) > keep_pages:
            start, end, fences = self._behind[-1] if self._behind else (0, 0, ())
            if end < len(self.reserved):  # what comes last waits for nothing
                start, fences = end, ()
            elif start >= keep_pages:
                self._behind.pop()
            else:
                self._behind[-1] = (start, keep_pages, fences)
            start = max(start, keep_pages)
            spare, self.reserved = self.reserved[start:], self.reserved[:start]
            self._pool.free(spare, Owner.LEASE, after=combine(fences))

    def free_tail(self, keep_pages: int, after: Fence | None) -> None:
        """Give back own pages of the table from ``keep_pages`` on, to be reused behind ``after``."""
        if len(self.pages) <= keep_pages:
            return
        tail = self.pages[keep_pages:][self.owned[keep_pages:]]
        self._pool.free(tail, Owner.LEASE, after=combine([after, *self.fences]))
        self.pages, self.owned = self.pages[:keep_pages], self.owned[:keep_pages]
