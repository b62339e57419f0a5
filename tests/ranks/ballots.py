"""An oracle for Ballot: it keeps the whole history and derives each answer from it anew, by measured time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_async.ranks.ballot import Timeouts

Result = tuple[int, ...]


@dataclass
class Oracle:
    """What a group of ``size`` ranks should decide."""

    size: int
    timeouts: Timeouts
    votes: dict[bytes, dict[int, Result]] = field(default_factory=dict)
    first_s: dict[bytes, float] = field(default_factory=dict)
    results: dict[bytes, Result] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    pinged_s: dict[int, list[float]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    patient: set[bytes] = field(default_factory=set)

    def missing(self, ticket: bytes) -> set[int]:
        """Return the ranks that have not voted."""
        return set(range(self.size)) - self.votes[ticket].keys()

    def open(self) -> list[bytes]:
        """Return the tickets with a vote and no result, in the order of their first votes."""
        return [ticket for ticket in self.votes if ticket not in self.results]

    def silent_s(self, rank: int, now_s: float) -> float:
        """Return the time since the first ping that nothing of this rank came after; -1: there is none."""
        pings = self.pinged_s.get(rank, [])
        return now_s - pings[0] if pings else -1.0

    def absent(self, now_s: float) -> set[int]:
        """Return the ranks that have left or are mute."""
        limit_s = self.timeouts.consensus_timeout_s
        return self.left | {rank for rank in range(self.size) if self.silent_s(rank, now_s) >= limit_s}

    def is_overdue(self, ticket: bytes, now_s: float) -> bool:
        """Return whether a ticket has been waited for long enough."""
        return ticket not in self.patient and now_s - self.first_s[ticket] >= self.timeouts.ticket_timeout_s

    def settle(self, now_s: float, *, at_tick: bool) -> list[tuple[bytes, Result]]:
        """Settle whatever the rules say; returns that, in order."""
        settled = []
        for ticket in self.open():
            votes, width = self.votes[ticket], len(next(iter(self.votes[ticket].values())))
            overdue = at_tick and self.is_overdue(ticket, now_s)
            absent = self.left if ticket in self.patient else self.absent(now_s)
            if not self.missing(ticket):
                result = tuple(min(vote[i] for vote in votes.values()) for i in range(width))
            elif overdue or self.missing(ticket) & absent or (0,) * width in votes.values():
                result = (0,) * width
            else:
                continue
            self.results[ticket] = result
            settled.append((ticket, result))
        return settled

    def vote(
        self, rank: int, ticket: bytes, vote: Result, now_s: float, *, patient: bool
    ) -> list[tuple[bytes, Result]]:
        """Count a vote."""
        if patient:
            self.patient.add(ticket)
        if ticket not in self.results:
            self.first_s.setdefault(ticket, now_s)
            self.votes.setdefault(ticket, {}).setdefault(rank, vote)
        return self.settle(now_s, at_tick=False)

    def hear(self, rank: int) -> None:
        """Note a message."""
        self.pinged_s[rank] = []

    def leave(self, rank: int, now_s: float) -> list[tuple[bytes, Result]]:
        """Note that a rank leaves."""
        self.left.add(rank)
        self.pinged_s[rank] = []
        return self.settle(now_s, at_tick=False)

    def tick(self, now_s: float) -> tuple[list[tuple[bytes, Result]], set[int], set[int]]:
        """Return what settles, whom to ping, and who is lost."""
        waited = {
            rank
            for ticket in self.open()
            if not self.is_overdue(ticket, now_s)
            for rank in self.missing(ticket)
        }
        unanswered = {rank for rank, pings in self.pinged_s.items() if pings}
        pings = ((waited - self.left) | unanswered) - {0}
        for rank in pings:
            self.pinged_s.setdefault(rank, []).append(now_s)
        settled = self.settle(now_s, at_tick=True)
        limit_s = self.timeouts.group_timeout_s
        return settled, pings, {rank for rank in pings if self.silent_s(rank, now_s) >= limit_s}
