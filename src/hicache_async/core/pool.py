"""PagePool: the book of one tier's pages. Every page has one owner; every change of owner is checked."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .._fence import EngineFence, combine, engine_fence_in
from ..abc import DevicePool, Fence
from ..errors import CapacityError, InvariantError
from ..types import Pages
from .fenced import FencedPages

NO_PAGES: Pages = np.empty(0, dtype=np.int64)

FEW_PAGES = 32
"""Up to so many pages a loop over bytes is faster than NumPy, whose calls cost about 1 us each."""


class Owner(enum.IntEnum):
    """Who may touch or hand on a page."""

    FREE = 0
    LEASE = 1
    HOP = 2
    TREE = 3


class FreeList:
    """A stack of free page ids: what came back last goes out first, in ascending runs where possible."""

    __slots__ = ("_ids", "_top", "capacity")

    def __init__(self, num_pages: int, reserved_pages: Sequence[int] = ()) -> None:
        ids = np.setdiff1d(np.arange(num_pages, dtype=np.int64), np.asarray(reserved_pages, dtype=np.int64))
        self._ids = ids[::-1].copy()
        self._top = len(ids)
        self.capacity = len(ids)

    def take(self, num_pages: int) -> Pages:
        """Take exactly ``num_pages`` pages; raises CapacityError and takes none if fewer are free."""
        if num_pages > self._top:
            raise CapacityError(f"{num_pages} pages asked for, {self._top} free")
        self._top -= num_pages
        return self._ids[self._top : self._top + num_pages][::-1].copy()

    def give_back(self, pages: Pages) -> None:
        """Put pages back."""
        self._ids[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def num_free(self) -> int:
        """Return how many pages can be taken."""
        return self._top


@dataclass(slots=True)
class Grant:
    """Pages taken from a pool, and the fences that a writer must be ordered behind.

    Attributes:
        after: of each stream at most one.
        num_plain: so many of the first pages wait for none of them.
    """

    pages: Pages
    after: Sequence[Fence] = ()
    num_plain: int = 0


class PagePool:
    """The pages of one tier.

    A freed page may carry a fence of the device: it counts as free, goes only to a user of the
    device, and its fence goes along. Behind an EngineFence a page is not free until the fence is set.

    Args:
        name: for messages.
        free_list: who keeps the free ids.
        num_page_ids: ids are 0 .. num_page_ids-1.
        on_freed: called after pages became available later than at the call that freed them.
    """

    def __init__(
        self, name: str, free_list: DevicePool, num_page_ids: int, on_freed: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.capacity = free_list.capacity
        self._free_list = free_list
        # One book, seen twice: as bytes, where single pages are cheap, and as an array, where many are.
        self._owner_bytes = bytearray(num_page_ids)
        self._owners = np.frombuffer(self._owner_bytes, dtype=np.uint8)
        self._fenced = FencedPages()
        self._settling: dict[int, Pages] = {}
        self._settling_count = 0
        self._on_freed = on_freed

    def __repr__(self) -> str:
        free = f"{self.num_free}/{self.capacity} free, {self.num_fenced} of them fenced"
        return f"<PagePool {self.name} {free}>"

    @property
    def num_fenced(self) -> int:
        """Free pages whose fence is still open."""
        self._drain_passed()
        return self._fenced.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, fenced ones included."""
        return self._free_list.num_free() + self._fenced.num_pages

    def available(self, *, fenced: bool) -> int:
        """Return how many pages :meth:`take` can give; ``fenced``: to a user who orders behind fences."""
        self._drain_passed()
        return self.num_free if fenced else self._free_list.num_free()

    def take(self, num_pages: int, owner: Owner, *, fenced: bool) -> Grant:
        """Take exactly ``num_pages`` pages out for ``owner``.

        Raises: CapacityError: fewer are available; InvariantError: the free list gave out what is not free.
            Either way nothing is taken.
        Ownership: of ``owner`` from now on.
        """
        if num_pages < 0:
            raise InvariantError(f"{num_pages} {self.name} pages asked for; a number of pages is 0 or more")
        self._drain_passed()
        num_plain = min(num_pages, self._free_list.num_free())
        num_fenced = num_pages - num_plain
        if num_fenced and num_fenced > (self._fenced.num_pages if fenced else 0):
            available = self.num_free if fenced else num_plain
            raise CapacityError(
                f"{num_pages} {self.name} pages asked for, {available} free of {self.capacity}"
            )
        plain = self._free_list.take(num_plain)
        if num_fenced:
            fenced_pages, after = self._fenced.oldest(num_fenced)
            pages = np.concatenate((plain, fenced_pages))
        else:  # a copy all the same: the engine's free list may hand out a part of itself
            pages, after = plain.copy(), []
        try:
            if len(pages) != num_pages:
                raise InvariantError(f"{num_plain} {self.name} pages asked for, {len(plain)} given out")
            self._rebook(pages, Owner.FREE, owner, "taken")
        except InvariantError:  # the free list may be the engine's own
            self._free_list.give_back(plain)
            raise
        if num_fenced:
            self._fenced.drop_oldest(num_fenced)
        return Grant(pages, after, num_plain)

    def give_back(self, grant: Grant, source: Owner) -> None:
        """Put pages back that were taken and not touched; each waits for what it waited for."""
        self.free(grant.pages[: grant.num_plain], source)
        self.free(grant.pages[grant.num_plain :], source, after=combine(grant.after))

    def move(self, pages: Pages, source: Owner, target: Owner) -> None:
        """Change the owner of ``pages``.

        Raises: InvariantError: a page is not ``source``'s, or stands twice; nothing is changed.
        """
        self._rebook(pages, source, target, "moved")

    def free(self, pages: Pages, source: Owner, *, after: Fence | None = None) -> None:
        """Put ``pages`` of ``source`` back, to be reused only behind ``after``.

        Raises: InvariantError: as :meth:`move`; nothing is changed.
        """
        if not len(pages):
            return
        if after is None or after.passed():
            self._rebook(pages, source, Owner.FREE, "freed")
            self._free_list.give_back(pages)
        elif (engine_fence := engine_fence_in(after)) is not None:
            self._rebook(pages, source, Owner.HOP, "freed")
            self._settle_later(pages.copy(), engine_fence, after)
        else:
            self._rebook(pages, source, Owner.FREE, "freed")
            self._fenced.add(pages, after)

    def _settle_later(self, pages: Pages, engine_fence: EngineFence, after: Fence) -> None:
        self._settling_count += 1
        number = self._settling_count
        self._settling[number] = pages

        def settled() -> None:
            del self._settling[number]
            self.free(pages, Owner.HOP, after=combine([after]))
            self._on_freed()

        engine_fence.add_callback(settled)

    def _drain_passed(self) -> None:
        if self._fenced.num_pages and len(passed := self._fenced.drain()):
            self._free_list.give_back(passed)

    def _rebook(self, pages: Pages, source: Owner, target: Owner, verb: str) -> None:
        # Everything is checked before anything is written, at a cost of the pages given, never of the pool.
        if len(pages) <= FEW_PAGES:
            page_ids, owners, end = pages.tolist(), self._owner_bytes, len(self._owner_bytes)
            for page in page_ids:
                if not 0 <= page < end or owners[page] != source:
                    raise self._refusal(pages, source, verb)
            if len(page_ids) > 1 and len(set(page_ids)) != len(page_ids):
                raise self._refusal(pages, source, verb)
            for page in page_ids:
                owners[page] = target
            return
        ordered = np.sort(pages)
        if (
            ordered[0] < 0
            or ordered[-1] >= len(self._owners)
            or (ordered[1:] == ordered[:-1]).any()
            or (self._owners[pages] != source).any()
        ):
            raise self._refusal(pages, source, verb)
        self._owners[pages] = target

    def _refusal(self, pages: Pages, source: Owner, verb: str) -> InvariantError:
        strange = pages[(pages < 0) | (pages >= len(self._owners))]
        if len(strange):
            return InvariantError(f"{self.name} has no pages {strange[:8].tolist()}; they cannot be {verb}")
        wrong = pages[self._owners[pages] != source]
        if len(wrong):
            held = (f"{page} is {Owner(self._owners[page]).name.lower()}" for page in wrong[:8].tolist())
            return InvariantError(
                f"{self.name} pages {verb} as {source.name.lower()}'s are not: {', '.join(held)}"
            )
        ids, counts = np.unique(pages, return_counts=True)
        return InvariantError(f"{self.name} pages {verb} twice in one call: {ids[counts > 1][:16].tolist()}")

    def owned_by(self, owner: Owner) -> Pages:
        """Return the ids that ``owner`` holds, ascending; for audits. Cost: the size of the pool."""
        return np.flatnonzero(self._owners == owner)

    def settling(self) -> list[Pages]:
        """Return the pages that wait for an EngineFence; the book has them as a hop's."""
        return list(self._settling.values())
