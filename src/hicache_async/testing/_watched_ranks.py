"""Ranks that keep what was voted and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..abc import Ranks
from ..errors import ConsensusError

Ballots = list[tuple[bytes, tuple[int, ...]]]


@dataclass(slots=True)
class BallotRecord:
    """What one rank voted and heard, in order; see :class:`WatchedRanks`.

    Attributes:
        given_up: tickets that somebody stopped waiting for: what is heard of them later is in no order.
        lost: tickets that were waited for when a rank was lost.
    """

    rank: int
    votes: Ballots
    results: Ballots
    given_up: Collection[bytes] = ()
    lost: Collection[bytes] = ()


class WatchedRanks:
    """Pass votes on to ``inner``, and keep them and what came of them.

    Attributes:
        votes: of this rank, in the order cast, the first for each ticket.
        results: in the order in which those who waited for them went on.
        given_up, lost: as in :class:`BallotRecord`.
    """

    def __init__(self, inner: Ranks) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.votes: Ballots = []
        self.results: Ballots = []
        self.given_up: set[bytes] = set()
        self.lost: set[bytes] = set()
        self._voted: set[bytes] = set()

    def _note(self, ticket: bytes, vote: Sequence[int]) -> None:
        if ticket not in self._voted:
            self._voted.add(ticket)
            self.votes.append((ticket, tuple(vote)))

    def cast(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> None:
        """Vote without waiting."""
        self._note(ticket, vote)
        self.inner.cast(ticket, vote, patient=patient)

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Vote and wait for the result."""
        self._note(ticket, vote)
        try:
            result = await self.inner.agree(ticket, vote, patient=patient)
        except asyncio.CancelledError:
            self.given_up.add(ticket)
            raise
        except ConsensusError:
            self.lost.add(ticket)
            raise
        self.results.append((ticket, tuple(result)))
        return result

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        """Call ``callback`` when a rank is lost."""
        self.inner.when_lost(callback)

    def ballots(self) -> BallotRecord:
        """Return what was voted and heard so far."""
        return BallotRecord(self.rank, self.votes, self.results, self.given_up, self.lost)

    async def aclose(self) -> None:
        """Leave the group."""
        await self.inner.aclose()
