"""Announcements: who is about to compute which pages, so that equal prompts compute once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .holding import Holding


@dataclass(slots=True, eq=False)
class _Announcement:
    owner: object
    waiters: list[Callable[[], None]] = field(default_factory=list)


class Announcements:
    """Page hashes that a lease has announced and not yet committed.

    Looking and announcing are sync, so of many equal prompts exactly one announces. An announcement
    ends page by page at commit and, for the rest, at release; then those who wait look again and
    one of them takes over.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[bytes, _Announcement] = {}

    def __len__(self) -> int:
        return len(self._open)

    def announce(self, owner: object, hashes: Sequence[bytes]) -> list[bytes]:
        """Announce the pages that nobody has announced; returns their hashes."""
        mine = [page_hash for page_hash in hashes if page_hash not in self._open]
        for page_hash in mine:
            self._open[page_hash] = _Announcement(owner)
        return mine

    def end(self, hashes: Sequence[bytes]) -> None:
        """End announcements and call those who wait for them."""
        for page_hash in hashes:
            announcement = self._open.pop(page_hash, None)
            if announcement is not None:
                for waiter in announcement.waiters:
                    waiter()

    def pending(self, owner: object, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes``, from the first on, somebody other than ``owner`` has announced."""
        count = 0
        for page_hash in hashes:
            announcement = self._open.get(page_hash)
            if announcement is None or announcement.owner is owner:
                break
            count += 1
        return count

    def when_ended(self, hashes: Sequence[bytes], callback: Callable[[], None]) -> None:
        """Call ``callback`` once the run of ``hashes`` that the first one's announcer announced has ended."""
        owner = self._open[hashes[0]].owner
        last = self._open[hashes[0]]
        for page_hash in hashes:
            announcement = self._open.get(page_hash)
            if announcement is None or announcement.owner is not owner:
                break
            last = announcement
        last.waiters.append(callback)


class Claim:
    """What one request has announced, page by page."""

    __slots__ = ("_all", "_holding", "_open")

    def __init__(self, announcements: Announcements, holding: Holding) -> None:
        self._all = announcements
        self._holding = holding
        self._open: dict[int, bytes] = {}

    def announce(self, start_page: int, end_page: int) -> None:
        """Announce those of pages ``[start_page, end_page)`` that nobody has announced."""
        hashes = self._holding.hashes(end_page)
        mine = set(self._all.announce(self, hashes[start_page:end_page]))
        self._open = {page: hashes[page] for page in range(start_page, end_page) if hashes[page] in mine}

    def pending_pages(self, start_page: int) -> int:
        """Return how many pages from ``start_page`` on, of those it could reuse, others have announced."""
        limit = self._holding.limit_pages
        return self._all.pending(self, self._holding.hashes(limit)[start_page:limit])

    def committed(self, start_page: int, end_page: int) -> None:
        """End what was announced of pages ``[start_page, end_page)``."""
        if self._open:
            pages = range(start_page, end_page)
            self._all.end([self._open.pop(page) for page in pages if page in self._open])

    def end(self) -> None:
        """End all of it: the request has gone."""
        if self._open:
            self._all.end(list(self._open.values()))
            self._open.clear()
