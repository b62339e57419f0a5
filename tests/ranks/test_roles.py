"""The two roles over links that only write down what they are given, on a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hicache_async.errors import ConsensusError
from hicache_async.ranks._book import Book
from hicache_async.ranks._frames import Cause, Frame, Kind
from hicache_async.ranks._roles import CountingRole, VotingRole
from hicache_async.ranks.ballot import Timeouts
from hicache_async.testing.manual import ManualClock
from tests.ranks.groups import ticket_of, turns

pytestmark = pytest.mark.asyncio

TIMEOUTS = Timeouts(consensus_timeout_s=3.0, ticket_timeout_s=7.0, group_timeout_s=10.0)


class NotingLink:
    """Writes what is sent into a log that it shares with others."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def send(self, frame: Frame) -> None:
        """Note a frame."""
        values = "".join(f" {value}" for value in frame.values)
        self._log.append(f"{frame.kind.name}{values} to {self._name}")

    def close(self) -> None:
        """Note the end."""
        self._log.append(f"end to {self._name}")


class NotingBook(Book):
    """Writes what is settled and lost into the log."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(asyncio.get_running_loop())
        self._log = log

    def settle(self, ticket: bytes, result: tuple[int, ...]) -> None:
        """Note a result."""
        self._log.append(f"own result {result}")
        super().settle(ticket, result)

    def lose(self, reason: str) -> None:
        """Note a loss."""
        self._log.append(f"own loss: {reason}")
        super().lose(reason)


class Counting:
    """Rank 0 of three."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = ManualClock()
        self.book = NotingBook(self.log)
        links = {rank: NotingLink(f"{rank}", self.log) for rank in (1, 2)}
        self.role = CountingRole(self.book, TIMEOUTS, links, self.clock)

    def vote(self, number: int, *vote: int, patient: bool = False) -> None:
        """Cast a vote of rank 0."""
        assert self.book.open(ticket_of(number), len(vote))
        self.role.vote(ticket_of(number), vote, patient=patient)

    def hear_vote(self, rank: int, number: int, *vote: int) -> None:
        """Let a vote come in."""
        self.role.on_frame(rank, Frame(Kind.VOTE, ticket_of(number), vote))

    def said(self) -> list[str]:
        """Return the log since the last call."""
        lines = self.log[:]
        self.log.clear()
        return lines


class Voting:
    """A rank that is not 0."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = ManualClock()
        self.book = NotingBook(self.log)
        self.role = VotingRole(self.book, TIMEOUTS, NotingLink("0", self.log), self.clock)

    vote: Callable[..., None] = Counting.vote  # type: ignore[assignment]
    said: Callable[..., list[str]] = Counting.said  # type: ignore[assignment]


async def test_own_callers_hear_after_the_result_was_sent() -> None:
    """Nobody on rank 0 acts on a result that has not left for every other rank."""
    hub = Counting()
    hub.hear_vote(1, 1, 5)
    hub.vote(1, 7)
    hub.hear_vote(2, 1, 6)
    assert hub.said() == ["RESULT 5 to 1", "RESULT 5 to 2", "own result (5,)"]


async def test_others_hear_of_a_loss_first() -> None:
    """Word of a lost rank is on its way before anybody on rank 0 acts on it; nothing is said after it."""
    hub = Counting()
    hub.vote(1, 7)
    hub.role.on_end(1, Cause.NOT_READING)
    assert hub.said() == ["LOST 1 3 0 to 2", "own loss: rank 1 does not read what it is sent"]
    hub.role.on_frame(2, Frame(Kind.VOTE, ticket_of(2), (0,)))
    hub.role.on_frame(2, Frame(Kind.PING))
    hub.role.on_end(2, Cause.EXITED)
    assert hub.said() == []
    assert hub.clock.pending == 0


async def test_time_is_kept_only_while_something_is_waited_for() -> None:
    """One timer for any number of open tickets, and none without, on either role."""
    hub, peer = Counting(), Voting()
    assert (hub.clock.pending, peer.clock.pending) == (0, 0)
    for number in range(5):
        hub.vote(number, 7)
        peer.vote(number, 7)
    assert (hub.clock.pending, peer.clock.pending) == (1, 1)
    for number in range(5):
        hub.hear_vote(1, number, 0)
        peer.role.on_frame(Frame(Kind.RESULT, ticket_of(number), (0,)))
    assert (hub.clock.pending, peer.clock.pending) == (0, 0)


async def test_rank_0_pings_who_is_waited_for_until_it_is_lost() -> None:
    """Once a period, muteness costs the ticket a miss, and the loss says how long it took."""
    hub = Counting()
    hub.vote(1, 7)
    hub.hear_vote(1, 1, 6)
    hub.clock.advance(3.0)
    assert hub.said() == ["PING to 2"] * 3
    hub.clock.advance(1.0)
    assert hub.said() == ["RESULT 0 to 1", "RESULT 0 to 2", "own result (0,)", "PING to 2"]
    hub.clock.advance(6.0)
    assert hub.said() == ["PING to 2"] * 6
    hub.clock.advance(1.0)
    loss = "own loss: rank 2 answered nothing for 10.0 s"
    assert hub.said() == ["LOST 2 2 10000 to 1", "LOST 2 2 10000 to 2", loss]
    assert hub.clock.pending == 0


async def test_a_rank_that_speaks_again_is_in() -> None:
    """Any message ends muteness, and the time that is kept for it."""
    hub = Counting()
    hub.vote(1, 7)
    hub.clock.advance(5.0)
    assert "own result (0,)" in hub.said()
    hub.role.on_frame(1, Frame(Kind.PONG))
    assert hub.clock.pending == 1
    hub.role.on_frame(2, Frame(Kind.PING))
    assert hub.said() == ["PONG to 2"]
    assert hub.clock.pending == 0


async def test_a_late_vote_is_answered() -> None:
    """Who votes on what has settled is told, and it alone; it takes the result once."""
    hub, peer = Counting(), Voting()
    hub.hear_vote(1, 1, 0)
    hub.said()
    hub.hear_vote(2, 1, 5)
    assert hub.said() == ["RESULT 0 to 2"]
    peer.role.on_frame(Frame(Kind.RESULT, ticket_of(1), (0,)))
    peer.role.on_frame(Frame(Kind.RESULT, ticket_of(1), (3,)))
    assert peer.book.result(ticket_of(1)) == (0,)


async def test_a_silent_rank_0_is_lost_to_who_waits() -> None:
    """It is pinged while something is waited for, and given up after the group's timeout, with the connection."""
    peer = Voting()
    peer.vote(1, 7)
    waiter = peer.book.wait(ticket_of(1))
    peer.said()
    peer.clock.advance(10.0)
    assert peer.said() == ["PING to 0"] * 10
    peer.clock.advance(1.0)
    loss = "rank 0, which counts the votes, answered nothing for 10.0 s"
    assert peer.said() == ["end to 0", f"own loss: {loss}"]
    with pytest.raises(ConsensusError, match=loss):
        await waiter
    assert peer.clock.pending == 0


async def test_a_rank_0_that_answers_is_waited_for() -> None:
    """However long it takes."""
    peer = Voting()
    peer.vote(1, 7)
    for _ in range(100):
        peer.clock.advance(1.0)
        peer.role.on_frame(Frame(Kind.PONG))
    assert peer.book.ended is None


async def test_a_vote_that_was_on_its_way_when_rank_0_left_settles_at_zeros() -> None:
    """Nobody counts it, and its waiter goes on; later votes are not even sent."""
    peer = Voting()
    peer.vote(1, 7, 8)
    waiter = peer.book.wait(ticket_of(1))
    peer.said()
    peer.role.on_frame(Frame(Kind.LEAVE))
    assert await waiter == (0, 0)
    peer.vote(2, 5)
    peer.role.on_end(Cause.EXITED)
    assert peer.said() == ["end to 0", "own result (0, 0)", "own result (0,)"]
    assert (peer.book.ended, peer.clock.pending) == (None, 0)


async def test_a_message_out_of_place_ends_the_group() -> None:
    """A kind that the other side has no business to send, or a vote on nothing, is not passed over."""
    for frame in (Frame(Kind.RESULT, ticket_of(1), (5,)), Frame(Kind.START), Frame(Kind.VOTE, ticket_of(1))):
        hub = Counting()
        hub.role.on_frame(1, frame)
        assert hub.said()[:2] == ["LOST 1 4 0 to 1", "LOST 1 4 0 to 2"]
    for frame in (Frame(Kind.VOTE, ticket_of(1), (5,)), Frame(Kind.START), Frame(Kind.LOST)):
        peer = Voting()
        peer.role.on_frame(frame)
        assert "rank 0, which counts the votes, broke the protocol" in str(peer.book.ended)


async def test_a_late_goodbye_of_a_lost_group_ends_the_link() -> None:
    """Whoever leaves after a loss finds rank 0 ready to close, and rank 0 says goodbye, too."""
    hub = Counting()
    hub.role.on_end(1, Cause.EXITED)
    hub.said()
    hub.role.on_frame(2, Frame(Kind.LEAVE))
    hub.role.on_frame(2, Frame(Kind.LEAVE))
    assert hub.said() == ["end to 2"]
    hub.role.leave()
    assert hub.said() == []
    await turns()
