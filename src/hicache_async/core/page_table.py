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
        fences: behind which own pages may be written.
    """

    __slots__ = ("_pool", "fences", "owned", "pages", "reserved")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: Pages = NO_PAGES
        self.owned = _NONE_OWNED
        self.reserved: Pages = NO_PAGES
        self.fences: Sequence[Fence] = ()

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
        self.reserved = np.concatenate((self.reserved, grant.pages))
        self.fences = (*self.fences, *grant.after)

    def take_reserved(self, num_pages: int) -> Pages:
        """Take the first ``num_pages`` out of the reserve, still booked to this request."""
        taken, self.reserved = self.reserved[:num_pages], self.reserved[num_pages:]
        return taken

    def missing_pages(self, total_pages: int) -> int:
        """Return how many pages beyond table and reserve it takes to hold ``total_pages``."""
        return max(0, total_pages - len(self.pages) - len(self.reserved))

    def place(self, total_pages: int) -> Pages:
        """Move reserved pages into the table until it holds ``total_pages``; returns the new ones."""
        new = self.take_reserved(max(0, total_pages - len(self.pages)))
        self.pages = np.concatenate((self.pages, new))
        self.owned = np.concatenate((self.owned, np.ones(len(new), dtype=np.bool_)))
        return new

    def open_fence(self) -> Fence | None:
        """Return one fence behind which own pages may be written; None: at once."""
        fence = combine(self.fences)
        self.fences = () if fence is None else (fence,)
        return fence

    def free_reserved(self, keep_pages: int = 0) -> None:
        """Give back the reserve beyond ``keep_pages``."""
        if len(self.reserved) <= keep_pages:
            return
        spare, self.reserved = self.reserved[keep_pages:], self.reserved[:keep_pages]
        self._pool.free(spare, Owner.LEASE, after=combine(self.fences))

    def free_tail(self, keep_pages: int, after: Fence | None) -> None:
        """Give back own pages of the table from ``keep_pages`` on, to be reused behind ``after``."""
        if len(self.pages) <= keep_pages:
            return
        tail = self.pages[keep_pages:][self.owned[keep_pages:]]
        self._pool.free(tail, Owner.LEASE, after=combine([after, *self.fences]))
        self.pages, self.owned = self.pages[:keep_pages], self.owned[:keep_pages]
