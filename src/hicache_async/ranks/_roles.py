"""The two roles of a group: rank 0 counts the votes, every other rank sends its own to it.

Both are sync and know links only: what carries the frames is a TCP connection, or a test's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..abc import Clock, TimerHandle
from ..errors import ConsensusError
from ._book import Book
from ._frames import Cause, Frame, Kind, loss_text
from .ballot import HUB_RANK, Ballot, Result, Settled, Silence, Timeouts

VOTES = (Kind.VOTE, Kind.PATIENT_VOTE)


class Link(Protocol):
    """Carries frames to one other rank, in order. Nothing in it waits, and nothing calls back from within."""

    def send(self, frame: Frame) -> None:
        """Queue a frame; one that has ended takes it and does nothing."""
        ...

    def close(self) -> None:
        """End it when what was sent has gone out."""
        ...


class Pulse:
    """One timer, running for as long as something is waited for.

    Args:
        beat: called once a period.
    """

    def __init__(self, clock: Clock, period_s: float, beat: Callable[[], None]) -> None:
        self._clock = clock
        self._period_s = period_s
        self._beat = beat
        self._timer: TimerHandle | None = None

    def keep(self, *, running: bool) -> None:
        """Start the timer, let it run on, or stop it."""
        if running and self._timer is None:
            self._timer = self._clock.call_later(self._period_s, self._fire)
        elif not running and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._beat()


class CountingRole:
    """Rank 0: counts the votes of all and tells them what was decided.

    Args:
        links: to every other rank, by rank.
    """

    def __init__(self, book: Book, timeouts: Timeouts, links: Mapping[int, Link], clock: Clock) -> None:
        self._book = book
        self._links = dict(links)
        self._clock = clock
        self._ballot = Ballot(1 + len(links), timeouts)
        self._pulse = Pulse(clock, timeouts.period_s, self._tick)
        self._over = False
        """Nothing is decided any more: a rank was lost, or this one left."""

    def vote(self, ticket: bytes, vote: Result, *, patient: bool) -> None:
        """Count this rank's own vote."""
        self._count(HUB_RANK, ticket, vote, patient)

    def leave(self) -> None:
        """Settle what is open at zeros, and tell the others that nobody counts any more."""
        if not self._over:
            self._deliver(self._ballot.settle_all())
            self._stop()
        self._send_all(Frame(Kind.LEAVE))

    def on_frame(self, rank: int, frame: Frame) -> None:
        """Do what a message of ``rank`` asks for."""
        if rank not in self._links:  # it has left
            return
        if frame.kind is Kind.LEAVE:
            self._links.pop(rank).close()
        if self._over:
            return
        self._ballot.hear(rank)
        if frame.kind in VOTES and frame.values:
            self._on_vote(rank, frame)
        elif frame.kind is Kind.LEAVE:
            self._deliver(self._ballot.leave(rank))
        elif frame.kind is Kind.PING:
            self._links[rank].send(Frame(Kind.PONG))
        elif frame.kind is not Kind.PONG:
            self._lose(rank, Cause.DISAGREES)
        self._keep_time()

    def on_end(self, rank: int, cause: Cause) -> None:
        """Note that the link to ``rank`` has ended, unless it said so before."""
        if self._links.pop(rank, None) is not None:
            self._lose(rank, cause)

    def _on_vote(self, rank: int, frame: Frame) -> None:
        result = self._ballot.result(frame.ticket)
        if result is not None:  # it may have been told already, and takes it once
            self._links[rank].send(Frame(Kind.RESULT, frame.ticket, result))
        else:
            self._count(rank, frame.ticket, frame.values, frame.kind is Kind.PATIENT_VOTE)

    def _count(self, rank: int, ticket: bytes, vote: Result, patient: bool) -> None:
        try:
            now_s = self._clock.monotonic()
            settled = self._ballot.vote(rank, ticket, vote, now_s, patient=patient)
        except ConsensusError:
            self._lose(rank, Cause.DISAGREES)
        else:
            self._deliver(settled)
            self._keep_time()

    def _deliver(self, settled: list[Settled]) -> None:
        for ticket, result in settled:
            self._send_all(Frame(Kind.RESULT, ticket, result))
            self._book.settle(ticket, result)

    def _send_all(self, frame: Frame) -> None:
        for link in self._links.values():
            link.send(frame)

    def _lose(self, rank: int, cause: Cause, silent_s: float = 0.0) -> None:
        if self._over:
            return
        self._stop()
        loss = (rank, int(cause), round(1000 * silent_s))
        self._send_all(Frame(Kind.LOST, values=loss))
        self._book.lose(loss_text(*loss))

    def _stop(self) -> None:
        self._over = True
        self._keep_time()

    def _keep_time(self) -> None:
        self._pulse.keep(running=self._ballot.is_waiting and not self._over)

    def _tick(self) -> None:
        turn = self._ballot.tick(self._clock.monotonic())
        self._deliver(turn.settled)
        for rank, silent_s in turn.lost:
            self._lose(rank, Cause.MUTE, silent_s)
        if not self._over:
            for rank in turn.pings:
                self._links[rank].send(Frame(Kind.PING))
        self._keep_time()


class VotingRole:
    """Any rank but 0: sends its votes to rank 0 and hears the results.

    Args:
        link: to rank 0.
    """

    def __init__(self, book: Book, timeouts: Timeouts, link: Link, clock: Clock) -> None:
        self._book = book
        self._link = link
        self._silence = Silence(timeouts)
        self._pulse = Pulse(clock, timeouts.period_s, self._tick)
        self._hub_left = False

    def vote(self, ticket: bytes, vote: Result, *, patient: bool) -> None:
        """Send this rank's vote; without a rank 0 to count it the ticket settles at zeros."""
        if self._hub_left:
            self._book.settle(ticket, (0,) * len(vote))
        else:
            self._link.send(Frame(VOTES[patient], ticket, vote))
            self._keep_time()

    def leave(self) -> None:
        """Tell rank 0 that this rank votes no more."""
        if not self._hub_left:
            self._link.send(Frame(Kind.LEAVE))
        self._keep_time()

    def on_frame(self, frame: Frame) -> None:
        """Do what a message of rank 0 asks for."""
        self._silence.num_pings = 0
        if frame.kind is Kind.RESULT:
            self._book.settle(frame.ticket, frame.values)
        elif frame.kind is Kind.PING:
            self._link.send(Frame(Kind.PONG))
        elif frame.kind is Kind.LEAVE:
            self._hub_left = True
            self._link.close()
            self._book.settle_all_at_zeros()
        elif frame.kind is Kind.LOST and len(frame.values) == 3:
            self._book.lose(loss_text(*frame.values))
        elif frame.kind is not Kind.PONG:
            self._lose(Cause.DISAGREES)
        self._keep_time()

    def on_end(self, cause: Cause) -> None:
        """Note that the link to rank 0 has ended, unless it said so before."""
        if not self._hub_left:
            self._lose(cause)
            self._keep_time()

    def _lose(self, cause: Cause) -> None:
        # Closing tells rank 0, when it comes round, that this rank does not trust it any more.
        self._link.close()
        self._book.lose(loss_text(HUB_RANK, cause, round(1000 * self._silence.seconds)))

    def _keep_time(self) -> None:
        self._pulse.keep(running=self._book.is_waiting)

    def _tick(self) -> None:
        self._silence.num_pings += 1
        if self._silence.is_lost:
            self._lose(Cause.MUTE)
        else:
            self._link.send(Frame(Kind.PING))
        self._keep_time()
