"""Member: one rank of a group as its cache sees it, whatever carries the votes."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from .._threads import check_process
from ..errors import ConfigError, ConsensusError, WrongLoopError
from ._book import Book
from ._frames import MAX_VALUE, MAX_VALUES, TICKET_NBYTES
from .ballot import Result


class Role(Protocol):
    """What a rank does for the group: count the votes, or send its own."""

    def vote(self, ticket: bytes, vote: Result, *, patient: bool) -> None:
        """Bring in the first vote of this rank for a ticket."""
        ...

    def leave(self) -> None:
        """Say that this rank leaves."""
        ...


class Member:
    """The calls of :class:`~hicache_async.abc.Ranks`, over a book and a role."""

    def __init__(self, rank: int, size: int, book: Book, role: Role) -> None:
        self.rank = rank
        self.size = size
        self._book = book
        self._role = role
        self._pid = os.getpid()
        self._has_left = False

    def cast(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> None:
        """Vote without waiting. The first vote of this rank for a ticket counts, later ones do nothing.

        Args:
            ticket: 16 bytes, the same on every rank.
            vote: 1 to 8 integers, 0 .. 2**63-1, as many on every rank.
            patient: whether a mute rank is waited for; the same on every rank.
        Raises:
            ConfigError: a ticket or a vote of another form.
            WrongLoopError: another loop or thread, or a fork. Never for the group's state.
        """
        self._check_loop()
        numbers = _checked_vote(ticket, vote)
        if self._book.open(ticket, len(numbers)):
            self._role.vote(ticket, numbers, patient=patient)

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Cast ``vote`` before the first suspension, and return the element-wise MIN of all ranks' votes.

        Raises:
            ConsensusError: a rank was lost, or this one has left the group.
            ConfigError, WrongLoopError: as :meth:`cast`.
        Cancellation: ends the wait; the vote stands, and others who wait for the ticket hear of it.
        """
        self.cast(ticket, vote, patient=patient)
        book = self._book
        if book.ended is not None:  # also for what had settled: others may never have heard of it
            raise ConsensusError(book.ended)
        result = book.result(ticket)
        if result is None:
            return await book.wait(ticket)
        # Settled by this vote, or before: who waits for an earlier ticket has been woken and goes on first.
        await asyncio.sleep(0)
        return result

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        """Call ``callback`` once a rank is lost, before any waiter hears of it; at once if one has been."""
        self._check_loop()
        self._book.when_lost(callback)

    def _leave(self) -> None:
        """Say once that this rank leaves; who waits here raises ConsensusError."""
        self._check_loop()
        if not self._has_left:
            self._has_left = True
            self._book.close(f"rank {self.rank} has left its group")
            self._role.leave()

    def _check_loop(self) -> None:
        check_process(self._pid, "this rank", "join a group of its own")
        try:
            here = asyncio.get_running_loop() is self._book.loop
        except RuntimeError:
            here = False
        if not here:
            raise WrongLoopError("ranks are used on the loop that they were joined on, and on no other")


def _checked_vote(ticket: bytes, vote: Sequence[int]) -> Result:
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_NBYTES:
        raise ConfigError(f"ticket is {ticket!r}; give {TICKET_NBYTES} bytes")
    try:
        numbers = tuple(map(operator.index, vote))
    except TypeError:
        numbers = ()
    if not 1 <= len(numbers) <= MAX_VALUES or min(numbers) < 0 or max(numbers) > MAX_VALUE:
        raise ConfigError(f"vote is {vote!r}; give 1 to {MAX_VALUES} integers in 0 .. 2**63-1")
    return numbers
