"""Ballot: how rank 0 decides each ticket once. Pure and sync: integers in, decisions out, time as an argument.

A ticket is open from its first vote until it settles, and it settles

- at the element-wise minimum when every rank has voted,
- at zeros as soon as one vote is all zeros: nobody waits for the rest,
- at zeros when a rank whose vote is missing is mute or has left,
- at zeros when ``ticket_timeout_s`` is over since the first vote, though the missing rank answers.

A *patient* ticket is about what cannot be missed: it waits for a mute rank as long as that is not lost.

A rank is *mute* when it was pinged and nothing at all came from it for ``consensus_timeout_s``, and *lost*
when that has lasted for ``group_timeout_s``. Any message ends it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..errors import ConsensusError

HUB_RANK = 0
"""The rank that decides."""

PINGS_PER_TIMEOUT = 3
"""Pings within ``consensus_timeout_s``: one or two may be late without making a rank mute."""

MAX_RESULTS = 1 << 16
"""Results that are remembered for those who vote late."""

MAX_OPEN = 1 << 16
"""Tickets that may be open; beyond it the oldest settles at zeros."""

Result = tuple[int, ...]
Settled = tuple[bytes, Result]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a group waits, in seconds; the names are those of CacheConfig."""

    consensus_timeout_s: float = 1.0
    ticket_timeout_s: float = 30.0
    group_timeout_s: float = 60.0

    @property
    def period_s(self) -> float:
        """Time between two pings."""
        return self.consensus_timeout_s / PINGS_PER_TIMEOUT


class Silence:
    """How many pings in a row a process has left unanswered.

    Counted and not measured: a time through which the process that counts was itself stopped counts as
    one ping, so whoever wakes up does not take the others for dead.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.num_pings = 0

    @property
    def seconds(self) -> float:
        """Time since the first ping that was not answered, when the last one was sent."""
        return max(0, self.num_pings - 1) * self._timeouts.period_s

    @property
    def is_mute(self) -> bool:
        """Whether nothing came for ``consensus_timeout_s``."""
        return self.num_pings > PINGS_PER_TIMEOUT

    @property
    def is_lost(self) -> bool:
        """Whether nothing came for ``group_timeout_s``."""
        allowed = math.ceil(self._timeouts.group_timeout_s / self._timeouts.period_s - 1e-9)
        return self.num_pings > allowed


class RecentResults:
    """The results of the last tickets; the oldest is forgotten for one too many."""

    def __init__(self, max_results: int = MAX_RESULTS) -> None:
        self._max_results = max_results
        self._results: dict[bytes, Result] = {}

    def __len__(self) -> int:
        return len(self._results)

    def get(self, ticket: bytes) -> Result | None:
        """Return what a ticket settled at; None: it has not, or that is forgotten."""
        return self._results.get(ticket)

    def add(self, ticket: bytes, result: Result) -> None:
        """Remember the result of a ticket that is not in here."""
        if len(self._results) >= self._max_results:
            del self._results[next(iter(self._results))]
        self._results[ticket] = result


@dataclass(slots=True)
class _Open:
    minimum: Result
    missing: int
    """The ranks that have not voted, one bit each."""
    since_s: float
    patient: bool


@dataclass(slots=True)
class Turn:
    """What is to be done once a period: whom to ping, what has settled, who is lost after how many seconds."""

    settled: list[Settled] = field(default_factory=list)
    pings: list[int] = field(default_factory=list)
    lost: list[tuple[int, float]] = field(default_factory=list)


class Ballot:
    """Count the votes of a group of ``size`` ranks.

    Whoever performs the decisions delivers them in the order returned, calls :meth:`hear` for every message
    of a rank, and :meth:`tick` every ``timeouts.period_s`` for as long as :attr:`is_waiting`.
    """

    def __init__(
        self, size: int, timeouts: Timeouts, *, max_open: int = MAX_OPEN, max_results: int = MAX_RESULTS
    ) -> None:
        self._everybody = (1 << size) - 1
        self._timeouts = timeouts
        self._max_open = max_open
        self._results = RecentResults(max_results)
        self._open: dict[bytes, _Open] = {}  # oldest first
        self._silences: dict[int, Silence] = {}  # of ranks with pings that they have not answered
        self._left = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a vote or an answer is missing, so that time matters."""
        return bool(self._open or self._silences)

    @property
    def num_open(self) -> int:
        """How many tickets have a vote and no result."""
        return len(self._open)

    def result(self, ticket: bytes) -> Result | None:
        """Return what a ticket settled at; None: it has not, or that is forgotten."""
        return self._results.get(ticket)

    def hear(self, rank: int) -> None:
        """Note that a message came from ``rank``, whatever it says: it is not mute."""
        self._silences.pop(rank, None)

    def vote(
        self, rank: int, ticket: bytes, vote: Result, now_s: float, *, patient: bool = False
    ) -> list[Settled]:
        """Count a vote, the first of this rank for this ticket; returns what it settles.

        Args:
            patient: whether the ticket is; its first vote says so.
        Raises: ConsensusError: another rank voted on more or fewer numbers; nothing was counted.
        """
        if self._results.get(ticket) is not None:
            return []
        bit = 1 << rank
        entry = self._open.get(ticket)
        if entry is None:
            entry = self._open[ticket] = _Open(vote, self._everybody, now_s, patient)
        elif len(entry.minimum) != len(vote):
            raise ConsensusError(f"rank {rank} voted on {len(vote)} numbers, others on {len(entry.minimum)}")
        if not entry.missing & bit:
            return []
        entry.missing &= ~bit
        entry.minimum = tuple(map(min, entry.minimum, vote))
        if not entry.missing:
            return [self._settle(ticket, entry.minimum)]
        if not any(vote) or entry.missing & (self._left if entry.patient else self._absent()):
            return [self._settle_at_zeros(ticket)]
        if len(self._open) > self._max_open:
            return [self._settle_at_zeros(next(iter(self._open)))]
        return []

    def leave(self, rank: int) -> list[Settled]:
        """Count ``rank`` as voting zeros from now on; returns what that settles."""
        self._left |= 1 << rank
        self._silences.pop(rank, None)
        return self._settle_missing(1 << rank, patient=True)

    def settle_all(self) -> list[Settled]:
        """Settle every open ticket at zeros, because nobody will count any more; returns them."""
        return [self._settle_at_zeros(ticket) for ticket in list(self._open)]

    def tick(self, now_s: float) -> Turn:
        """Return what is due once a period: pings for ranks that are waited for, and what silence has cost."""
        turn = Turn(settled=self._settle_overdue(now_s))
        for rank in self._awaited():
            silence = self._silences.setdefault(rank, Silence(self._timeouts))
            silence.num_pings += 1
            turn.pings.append(rank)
            if silence.is_lost:
                turn.lost.append((rank, silence.seconds))
        turn.settled += self._settle_missing(self._absent(), patient=False)
        return turn

    def _awaited(self) -> list[int]:
        missing = 0
        for entry in self._open.values():
            missing |= entry.missing
        ranks = range(HUB_RANK + 1, self._everybody.bit_length())
        return [rank for rank in ranks if rank in self._silences or (missing & ~self._left) & (1 << rank)]

    def _absent(self) -> int:
        """Return the bits of the ranks whose missing vote counts as zeros."""
        mute = sum(1 << rank for rank, silence in self._silences.items() if silence.is_mute)
        return self._left | mute

    def _settle_overdue(self, now_s: float) -> list[Settled]:
        latest_s = now_s - self._timeouts.ticket_timeout_s
        overdue = [
            ticket for ticket, entry in self._open.items() if entry.since_s <= latest_s and not entry.patient
        ]
        return [self._settle_at_zeros(ticket) for ticket in overdue]

    def _settle_missing(self, absent: int, *, patient: bool) -> list[Settled]:
        hopeless = [
            ticket
            for ticket, entry in self._open.items()
            if entry.missing & absent and (patient or not entry.patient)
        ]
        return [self._settle_at_zeros(ticket) for ticket in hopeless]

    def _settle_at_zeros(self, ticket: bytes) -> Settled:
        return self._settle(ticket, (0,) * len(self._open[ticket].minimum))

    def _settle(self, ticket: bytes, result: Result) -> Settled:
        del self._open[ticket]
        self._results.add(ticket, result)
        return ticket, result
