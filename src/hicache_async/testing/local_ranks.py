"""LocalRanks: a whole rank group on one loop, with knobs for what goes wrong, and faithful to its orders.

    ranks = LocalRanks.group(4, clock=ManualClock())
    caches = [await HiCache.open(config, kv=kv, ranks=rank) for rank in ranks]
    ranks[2].hold()      # as if its process were stopped; resume() and kill() as well

The votes are counted by the code that counts them over TCP; only the wires are queues here. A message
takes one turn of the loop, or as many more as the sender's ``delay_turns`` says, and never overtakes another
of the same wire. With a manual clock and a seeded delay every run is the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .._clock import LoopClock
from ..abc import Clock, TimerHandle
from ..errors import ConfigError
from ..ranks._book import Book
from ..ranks._frames import Cause, Frame
from ..ranks._member import Member, Role
from ..ranks._roles import CountingRole, VotingRole
from ..ranks.ballot import HUB_RANK, Result, Timeouts


class LocalRanks(Member):
    """One rank of a group in one process, a :class:`~hicache_async.abc.Ranks`. Made by :meth:`group`.

    Attributes:
        delay_turns: how many more turns of the loop the next message on each of this rank's wires takes,
            to this rank and from it; called once for each message.
        votes: what this rank voted, in that order, the first vote for each ticket only.
        results: what this rank heard, in that order.
    """

    def __init__(self, rank: int, size: int, process: _Process, book: _RecordingBook, role: Role) -> None:
        recorder = _Recorder(process, role)
        super().__init__(rank, size, book, recorder)
        self._process = process
        self.votes = recorder.votes
        self.results = book.settled

    @classmethod
    def group(
        cls,
        size: int,
        *,
        clock: Clock | None = None,
        consensus_timeout_s: float = 1.0,
        ticket_timeout_s: float = 30.0,
        group_timeout_s: float = 60.0,
        delay_turns: Callable[[], int] = lambda: 0,
    ) -> list[LocalRanks]:
        """Return the ranks of a new group, in order, joined on the running loop.

        Args:
            size: how many.
            clock: where timers come from; None: the loop's time.
            consensus_timeout_s, ticket_timeout_s, group_timeout_s: as in CacheConfig.
            delay_turns: that of every rank to begin with.
        Raises: ConfigError: a size below 1.
        """
        if size < 1:
            raise ConfigError(f"size is {size!r}; a group has at least one rank")
        loop = asyncio.get_running_loop()
        timeouts = Timeouts(consensus_timeout_s, ticket_timeout_s, group_timeout_s)
        processes = [_Process(clock or LoopClock(loop), delay_turns) for _ in range(size)]
        books = [_RecordingBook(loop) for _ in range(size)]
        hub = processes[HUB_RANK]
        to_peer = {rank: _Wire(loop, processes[rank]) for rank in range(1, size)}
        to_hub = {rank: _Wire(loop, processes[rank]) for rank in range(1, size)}
        counting = CountingRole(books[HUB_RANK], timeouts, to_peer, hub)
        ranks = [cls(HUB_RANK, size, hub, books[HUB_RANK], counting)]
        hub.wires = list(to_peer.values())
        for rank in range(1, size):
            process = processes[rank]
            voting = VotingRole(books[rank], timeouts, to_hub[rank], process)
            ranks.append(cls(rank, size, process, books[rank], voting))
            process.wires = [to_hub[rank]]
            to_peer[rank].lead_to(process, voting.on_frame, voting.on_end)
            to_hub[rank].lead_to(hub, *_from(counting, rank))
        return ranks

    @property
    def delay_turns(self) -> Callable[[], int]:
        """How many more turns the next message of this rank's wires takes."""
        return self._process.delay_turns

    @delay_turns.setter
    def delay_turns(self, delay_turns: Callable[[], int]) -> None:
        self._process.delay_turns = delay_turns

    def hold(self) -> None:
        """Stop this rank as SIGSTOP does: its votes, its answers and its timers wait; what is on the way goes on."""
        self._process.hold()

    def resume(self) -> None:
        """Let a held rank go on: what has waited happens now, in order."""
        self._process.resume()

    def kill(self) -> None:
        """End this rank as SIGKILL does: the others hear of it behind what is on the way.

        Its own callers, which no dead process has, raise ConsensusError.
        """
        self._process.kill()
        self._book.lose(f"rank {self.rank} was killed")

    async def aclose(self) -> None:
        """Leave the group: the others count this rank as voting zeros from then on."""
        self._leave()


def _from(counting: CountingRole, rank: int) -> tuple[Callable[[Frame], None], Callable[[Cause], None]]:
    return lambda frame: counting.on_frame(rank, frame), lambda cause: counting.on_end(rank, cause)


class _RecordingBook(Book):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.settled: list[tuple[bytes, Result]] = []

    def settle(self, ticket: bytes, result: Result) -> None:
        if self.ended is None and self.result(ticket) is None:
            self.settled.append((ticket, result))
        super().settle(ticket, result)


class _Recorder:
    """The role of a rank, which acts when its process does; it keeps the votes."""

    def __init__(self, process: _Process, role: Role) -> None:
        self._process = process
        self._role = role
        self.votes: list[tuple[bytes, Result]] = []

    def vote(self, ticket: bytes, vote: Result, *, patient: bool) -> None:
        self.votes.append((ticket, vote))
        self._process.do(lambda: self._role.vote(ticket, vote, patient=patient))

    def leave(self) -> None:
        self._process.do(self._role.leave)


class _Process:
    """What one rank's code runs in: it can be stopped and killed. Also the clock of that code."""

    def __init__(self, clock: Clock, delay_turns: Callable[[], int]) -> None:
        self._clock = clock
        self._held = False
        self._killed = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._timers: set[_Timer] = set()
        self.wires: list[_Wire] = []
        self.delay_turns = delay_turns

    def do(self, action: Callable[[], None]) -> None:
        if self._held:
            self._waiting.append(action)
        elif not self._killed:
            action()

    def hold(self) -> None:
        self._held = True

    def resume(self) -> None:
        self._held = False
        while self._waiting and not self._held:
            self.do(self._waiting.popleft())

    def kill(self) -> None:
        if not self._killed:
            self._killed, self._held = True, False
            self._waiting.clear()
            for timer in list(self._timers):
                timer.cancel()
            for wire in self.wires:
                wire.close()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        timer = _Timer(self._timers, callback)
        timer.inner = self._clock.call_later(delay_s, lambda: self.do(timer.fire))
        return timer


class _Timer:
    """A timer that can still be cancelled while it is due and its process is held."""

    def __init__(self, live: set[_Timer], callback: Callable[[], None]) -> None:
        self.inner: TimerHandle | None = None
        self._live = live
        self._callback = callback
        live.add(self)

    def cancel(self) -> None:
        self._live.discard(self)
        if self.inner is not None:
            self.inner.cancel()

    def fire(self) -> None:
        if self in self._live:
            self._live.discard(self)
            self._callback()


class _Wire:
    """One direction between rank 0 and another rank; as a link it ends with the word that it was closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: _Process) -> None:
        self._loop = loop
        self._peer = peer  # whose delay it has, whichever way it leads
        self._to: _Process | None = None
        self._on_frame: Callable[[Frame], None] = lambda frame: None
        self._on_end: Callable[[Cause], None] = lambda cause: None
        self._turn = 0
        self._moving = False
        self._closed = False
        self._frames: deque[tuple[int, Frame | None]] = deque()

    def lead_to(
        self, process: _Process, on_frame: Callable[[Frame], None], on_end: Callable[[Cause], None]
    ) -> None:
        self._to, self._on_frame, self._on_end = process, on_frame, on_end

    def send(self, frame: Frame) -> None:
        if not self._closed:
            self._put(frame)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._put(None)

    def _put(self, frame: Frame | None) -> None:
        due = self._turn + 1 + self._peer.delay_turns()
        if self._frames:
            due = max(due, self._frames[-1][0])
        self._frames.append((due, frame))
        if not self._moving:
            self._moving = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn += 1
        while self._frames and self._frames[0][0] <= self._turn:
            self._arrive(self._frames.popleft()[1])
        self._moving = bool(self._frames)
        if self._moving:
            self._loop.call_soon(self._next_turn)

    def _arrive(self, frame: Frame | None) -> None:
        assert self._to is not None
        if frame is None:
            self._to.do(lambda: self._on_end(Cause.EXITED))
        else:
            self._to.do(lambda: self._on_frame(frame))
