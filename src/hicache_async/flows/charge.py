"""Charge: host pages that count against the prefetch quota, from reservation until nobody needs them pinned."""

from __future__ import annotations

from ..core.pool import NO_PAGES
from ..types import Pages
from .context import Context


class Charge:
    """What one fetch has reserved.

    Pages count while they are being read, and then as long as a request that waited for them has
    neither loaded nor gone.

    Attributes:
        num_pages: how many count now.
        unread: those that no read has been started for.
        holders: requests that keep the attached pages pinned.
        is_reading: whether a read is still running.
    """

    __slots__ = ("_ctx", "holders", "is_reading", "num_pages", "unread")

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.num_pages = 0
        self.unread: Pages = NO_PAGES
        self.holders = 0
        self.is_reading = True
        ctx.charges.add(self)

    def book(self, pages: Pages) -> None:
        """Count freshly reserved pages."""
        self.unread = pages
        self._set(len(pages))

    def take_unread(self, num_pages: int) -> Pages:
        """Take up to ``num_pages`` out for a read."""
        taken, self.unread = self.unread[:num_pages], self.unread[num_pages:]
        return taken

    def hold(self) -> None:
        """Count one more request that keeps the pages."""
        self.holders += 1

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        self.holders -= 1
        self._close_if_over()

    def end_reading(self, num_attached: int, num_hung: int = 0) -> None:
        """Stop counting what was not attached; the caller frees it.

        Args:
            num_hung: pages that a read which does not end may still fill: they count until this is
                called again. So a store that hangs holds a share of the host and no more.
        """
        self.unread = NO_PAGES
        self.is_reading = num_hung > 0
        self._set(num_attached + num_hung)
        self._close_if_over()

    def _set(self, num_pages: int) -> None:
        self._ctx.prefetch_pages += num_pages - self.num_pages
        self.num_pages = num_pages

    def _close_if_over(self) -> None:
        if not self.is_reading and self.holders <= 0:
            self._set(0)
            self._ctx.charges.discard(self)
