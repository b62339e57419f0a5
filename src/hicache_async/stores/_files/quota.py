"""Quota: limits of a directory that several processes write to, never exceeded. Blocking, for threads.

Every byte is reserved before it is written. What all processes have committed and reserved is in a shared
ledger (ledger.py), so a reservation costs one short critical section and no look at the disk:

    committed + reserved by all + wanted <= max_bytes
    free bytes - reserved by all - wanted >= min_free_bytes

Where it does not fit, a *pass* surveys the disk without holding any lock and removes the oldest objects until
it does. Books and disk are reconciled at the end of each survey, though others went on writing and deleting
meanwhile. With ``added`` and ``removed`` for what they booked in that time, the truth lies between

    surveyed objects - removed - leaving - reserved   and   surveyed objects and temporary files + added + leaving

and the books are moved into that interval. In a quiet directory it is one number; in a busy one it corrects
what can be proven to be wrong, so nobody ever waits for somebody else's survey.

All errors are on one side: what dies between two steps (an object published and not committed, one removed
and not taken off) leaves the books above the disk, until the next pass.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..._log import logger
from .._temp import TempFiles
from .ledger import Books, Ledger
from .survey import Evicted, Found, Survey, evict, key_of, size_on_disk

T = TypeVar("T")

_BATCH = 64
"""Objects removed between two looks at the books."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_LEDGER_NBYTES = 1 << 16  # more than a ledger and its directory entry ever take

_METADATA_NBYTES = 4 * 4096
"""What new directories may take beside a file, which nobody reserves."""

PAUSE_S = 1.0
"""After a pass that could not make room the next comes no sooner: it would most likely find the same."""


class Usage(NamedTuple):
    """What the books say of a directory, in bytes as they count: whole blocks."""

    committed: int
    reserved: int


class Quota:
    """Keep a directory within limits, by reservations and by evicting what was not used for longest.

    Each process that writes there keeps one, or several, with limits of its own. Sizes are those of
    files, and count as whole blocks of 4096 bytes.

    Args:
        directory: has ``objects``, ``temp`` and ``quota``, the ledger, in it; exists when it is used.
        max_bytes: for all objects and files under construction; None: no such limit.
        min_free_bytes: left free on the file system.
        low_water: to what fraction of a limit an eviction goes down, so that not every write evicts; but
            reservations are never taken for something that can be evicted.
        mode: of the ledger.
        on_evicted: told, in the thread of a pass, which keys have gone; of one too long for a file name
            it is not told.
        monotonic: the clock of pauses between passes in vain.

    Ownership: whoever makes it closes it, and ends every reservation by one commit or abort.
    """

    def __init__(
        self,
        directory: str,
        *,
        max_bytes: int | None,
        min_free_bytes: int = 0,
        low_water: float = 0.9,
        mode: int = 0o600,
        on_evicted: Callable[[Sequence[str]], None] = lambda keys: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._min_free_bytes = min_free_bytes
        self._low_water = low_water
        self._on_evicted = on_evicted
        self._monotonic = monotonic
        self._ledger = Ledger(f"{directory}/quota", mode)
        self._temps = TempFiles(f"{directory}/temp")
        self._mutex = threading.Lock()  # of all below, and of the ledger
        self._reserved = 0
        self._leaving = 0
        self._unbooked = 0  # committed, and for the ledger still reserved: the sum is the same
        self._closed = False
        self._passing = threading.Lock()
        self._next_pass_s = -math.inf
        self._undeletable_logged = False

    def reserve(self, nbytes: int, spared: Container[str] = ()) -> bool:
        """Allow a file of ``nbytes`` to be written, after evicting others where that is needed.

        Args:
            spared: paths of objects that are not evicted for it.
        Returns: False: it does not fit, whatever can be evicted.
        Raises: OSError: the ledger cannot be used, or the directory not be looked at.
        """
        nbytes = size_on_disk(nbytes)
        return self._with_room_for_ledger(lambda: self._reserve(nbytes, spared))

    def commit(self, nbytes: int) -> None:
        """End a reservation: its file is an object. The ledger is told with the next one, or when none is left."""
        nbytes = size_on_disk(nbytes)
        with self._mutex:
            self._reserved -= nbytes
            self._unbooked += nbytes
            is_last = not self._reserved
        if is_last:
            self._book()

    def abort(self, nbytes: int) -> None:
        """End a reservation: there is no such file."""
        with self._mutex:
            self._reserved -= size_on_disk(nbytes)
        self._book()

    def release(self, nbytes: int) -> None:
        """Announce that an object is about to be removed; ends by :meth:`removed` or :meth:`kept`."""
        with self._mutex:
            self._leaving += size_on_disk(nbytes)
        self._book()

    def removed(self, nbytes: int) -> None:
        """Take an object off the books that this process has removed."""
        with self._mutex:
            self._leaving = max(0, self._leaving - size_on_disk(nbytes))
        self._book(size_on_disk(nbytes))

    def kept(self, nbytes: int) -> None:
        """Say that an object was not removed after all."""
        with self._mutex:
            self._leaving -= size_on_disk(nbytes)
        self._book()

    def trim(self) -> int:
        """Look at the disk and evict what is beyond the limits; returns the bytes evicted.

        Raises: OSError: the ledger cannot be used, or the directory not be looked at.
        """
        if self._max_bytes == math.inf and not self._min_free_bytes:
            return 0
        with self._passing:
            return self._with_room_for_ledger(lambda: self._evict(self._survey(), 0, _Victims())[1])

    def usage(self) -> Usage:
        """Return what the books say.

        Raises: OSError: the ledger cannot be used.
        """
        with self._books() as books:
            return Usage(books.committed, books.reserved)

    def close(self) -> None:
        """Give the membership up, when the last reservation has ended."""
        self._closed = True
        self._leave_if_done()

    # -- the books

    @contextlib.contextmanager
    def _books(self) -> Iterator[Books]:
        """Hold the books of all processes, with what this one has done since; written unless this raises."""
        with self._mutex:
            reserved = self._reserved
            try:
                with self._ledger.locked() as (books, mine):
                    books.add(self._unbooked)
                    mine.reserved, mine.leaving = self._reserved, self._leaving
                    yield books
                    mine.reserved, mine.leaving = self._reserved, self._leaving
                self._unbooked = 0
            except BaseException:
                self._reserved = reserved
                raise

    def _book(self, removed: int = 0) -> None:
        """Tell the others what has changed; where that fails they think that more is taken than is."""
        with contextlib.suppress(OSError), self._books() as books:
            books.remove(removed)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        with self._mutex:
            done = self._closed and self._ledger.joined and not (self._reserved or self._leaving)
        if done:
            with contextlib.suppress(OSError), self._books():
                pass
            with self._mutex:
                self._ledger.leave()

    def _with_room_for_ledger(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as error:
            if error.errno not in _FULL:
                raise
        # A disk that was full before there was a ledger: some objects make room for it, unbooked.
        self._report(evict(_oldest(self._look().oldest_first(), _LEDGER_NBYTES)))
        return action()

    def _take(self, books: Books, nbytes: int) -> bool:
        fits = self._fits(books, nbytes)
        self._reserved += nbytes * fits
        return fits

    def _fits(self, books: Books, nbytes: int) -> bool:
        wanted = books.reserved + nbytes
        if self._min_free_bytes and self._free_bytes() - wanted < self._min_free_bytes:
            return False
        return self._max_bytes == math.inf or (books.settled and books.committed + wanted <= self._max_bytes)

    def _is_beyond(self, books: Books) -> bool:
        """Return whether a limit is exceeded: it is a new one, or somebody else has filled the disk."""
        return (
            books.committed > self._max_bytes or self._free_bytes() + _METADATA_NBYTES < self._min_free_bytes
        )

    def _limit(self, books: Books) -> float:
        """Return how many bytes may be committed and reserved, as far as the disk has room for them."""
        if not self._min_free_bytes:
            return self._max_bytes
        return min(self._max_bytes, books.committed + self._free_bytes() - self._min_free_bytes)

    def _goal(self, books: Books, limit: float, nbytes: int) -> float:
        """Return how many committed bytes to leave: no reservation is made of bytes that can be evicted."""
        return min(self._low_water * limit, limit - books.reserved - nbytes)

    def _free_bytes(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize - _METADATA_NBYTES

    # -- a pass

    def _reserve(self, nbytes: int, spared: Container[str]) -> bool:
        with self._books() as books:
            if self._take(books, nbytes):
                return True
            self._ledger.bury(books)
            if books.reserved + nbytes > self._max_bytes:
                return False
        with self._passing:
            with self._books() as books:
                if self._take(books, nbytes):
                    return True
            if self._monotonic() < self._next_pass_s:
                return False
            granted, victims = False, _Victims(spared)
            try:
                granted, _ = self._evict(self._survey(), nbytes, victims)
            finally:
                if not granted and not victims.num_spared:  # another call may have those
                    self._next_pass_s = self._monotonic() + PAUSE_S
            return granted

    def _look(self) -> Survey:
        return Survey.of(f"{self._directory}/objects", self._temps.directory)

    def _survey(self) -> Survey:
        """Look at the disk, and correct the books by it."""
        with self._books() as books:
            self._ledger.bury(books)
            before = books.totals
        self._temps.sweep()
        survey = self._look()
        with self._books() as books:
            if survey.error is None:
                books.reconcile(survey.nbytes, survey.temp_nbytes, before)
            elif not books.settled:
                raise survey.error
        return survey

    def _evict(self, survey: Survey, nbytes: int, allowed: _Victims) -> tuple[bool, int]:
        """Remove the oldest objects until ``nbytes`` fit, down to the low water.

        Returns: whether they fit and are reserved, and how many bytes were removed.
        """
        with self._books() as books:
            if self._take(books, nbytes):
                return True, 0
            limit, old = self._limit(books), books.committed
            goal, beyond = self._goal(books, limit, nbytes), self._is_beyond(books)
        if beyond and goal >= 0:
            self._announce(survey, limit, old, goal)
        victims, evicted, leaving, total = allowed.of(survey), Evicted(), 0, 0
        try:
            while True:
                with self._books() as books:
                    books.remove(evicted.nbytes)
                    goal = self._goal(books, limit, nbytes)
                    batch = _oldest(victims, books.committed - goal, _BATCH) if goal >= 0 else []
                    self._leaving -= leaving
                    leaving = sum(found.nbytes for found in batch)
                    self._leaving += leaving
                    if not batch:
                        return self._take(books, nbytes), total
                evicted = evict(batch)
                total += evicted.nbytes
                self._report(evicted)
        finally:
            with self._mutex:
                self._leaving -= leaving

    def _announce(self, survey: Survey, limit: float, old: int, goal: float) -> None:
        doomed = _oldest(survey.oldest_first(), old - goal)
        num_bytes = sum(found.nbytes for found in doomed)
        logger.warning(
            "store.trimming",
            directory=self._directory,
            limit_bytes=int(limit),
            num_bytes=num_bytes,
            num_objects=len(doomed),
            old_bytes=old,
            new_bytes=old - num_bytes,
            old_objects=survey.num_objects,
            new_objects=survey.num_objects - len(doomed),
        )

    def _report(self, evicted: Evicted) -> None:
        keys = [key for path in evicted.paths if (key := key_of(path)) is not None]
        if keys:
            self._on_evicted(keys)
        if evicted.errors and not self._undeletable_logged:
            self._undeletable_logged = True
            logger.warning("store.undeletable", directory=self._directory, error=str(evicted.errors[0]))


class _Victims:
    """Which objects a pass may remove.

    Attributes:
        num_spared: how many would have been next and were not to go.
    """

    def __init__(self, spared: Container[str] = ()) -> None:
        self._spared = spared
        self.num_spared = 0

    def of(self, survey: Survey) -> Iterator[Found]:
        """Yield them, the oldest first."""
        for found in survey.oldest_first():
            if found.path in self._spared:
                self.num_spared += 1
            else:
                yield found


def _oldest(victims: Iterator[Found], nbytes: float, most: int = sys.maxsize) -> list[Found]:
    """Take the next objects, until they make ``nbytes`` or are so many."""
    taken: list[Found] = []
    while nbytes > 0 and len(taken) < most and (found := next(victims, None)) is not None:
        taken.append(found)
        nbytes -= found.nbytes
    return taken
