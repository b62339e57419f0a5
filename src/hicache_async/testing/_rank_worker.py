"""The processes of a rank exam: each joins group after group and does its rank's part, as commanded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import structlog
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is exported, and does not say so

from ..abc import Ranks
from ..config import CacheConfig
from ..errors import ClosedError, ConsensusError
from ..ranks.hub import HubRanks
from ..types import State
from ._exam_engine import PAGE_TOKENS, prompt, within
from ._lockstep_seat import Seat, SeatParts, seat_config, seated
from ._watched_ranks import BallotRecord
from .ballot_script import BallotScript, vote_all
from .leaks import describe_task
from .lockstep_engine import LockstepEngine, LockstepRecord
from .lockstep_script import LockstepScript

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

UNIT_S = 0.001
STEPS_PER_REPORT = 5


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one group meet.

    Attributes:
        host, port: of a ``torch.distributed.TCPStore`` that the exam keeps.
        name: no other group has it.
    """

    host: str
    port: int
    name: str


Join = Callable[[CacheConfig, Meeting], Awaitable[Ranks]]
"""Join a group; it is sent to other processes, so make it a function of a module."""


async def join_hub(config: CacheConfig, meeting: Meeting) -> Ranks:
    """Join as :class:`~hicache_async.ranks.hub.HubRanks`."""
    store = TCPStore(meeting.host, meeting.port, is_master=False)
    return await HubRanks.join(config, store, host=meeting.host, name=meeting.name)


@dataclass(frozen=True, slots=True)
class Task:
    """One command.

    Attributes:
        scripts: of one kind; those for engines are served one after another over one cache.
        at_once: whether those for votes are done all at once, or one after another, until a rank is lost.
        limit_s: after which it counts as hung.
    """

    join: Join
    meeting: Meeting
    size: int
    parts: SeatParts
    scripts: tuple[BallotScript, ...] | tuple[LockstepScript, ...]
    limit_s: float
    at_once: bool = True


@dataclass(slots=True)
class Report:
    """What became of a command on one rank.

    Attributes:
        error: why it failed, with what waited; None: it did not.
        lost_s: when the loss of a rank was heard of, by the machine's monotonic clock; None: none was lost.
    """

    rank: int
    ballots: list[BallotRecord] = dataclasses.field(default_factory=list)
    lockstep: list[LockstepRecord] = dataclasses.field(default_factory=list)
    error: str | None = None
    lost_s: float | None = None


async def _pause(units: float) -> None:
    await asyncio.sleep(units * UNIT_S)


class _Worker:
    def __init__(self, rank: int, task: Task, tell: Callable[[int], None]) -> None:
        self._task = task
        self._tell = tell
        self.report = Report(rank)

    async def run(self) -> Report:
        """Do the command; never raises for what goes wrong in it."""
        work = asyncio.create_task(self._run())
        done, _ = await asyncio.wait((work,), timeout=self._task.limit_s)
        if not done:
            waits = [describe_task(each) for each in asyncio.all_tasks() - {asyncio.current_task()}]
            self.report.error = f"hangs after {self._task.limit_s} s: {'; '.join(waits)}"
            work.cancel()
            await asyncio.wait((work,), timeout=5)
        elif (error := work.exception()) is not None:
            self.report.error = f"{type(error).__name__}: {error}"
        return self.report

    async def _run(self) -> None:
        task, rank = self._task, self.report.rank
        config = seat_config(rank, task.size, task.parts)
        ranks = await task.join(config, task.meeting)
        ranks.when_lost(self._note_loss)
        try:
            await self._with(ranks)
        finally:
            await ranks.aclose()

    def _note_loss(self, error: ConsensusError) -> None:
        self.report.lost_s = time.monotonic()

    async def _with(self, ranks: Ranks) -> None:
        scripts, report = self._task.scripts, self.report
        ballots = [script for script in scripts if isinstance(script, BallotScript)]
        if not ballots:
            await self._serve([script for script in scripts if isinstance(script, LockstepScript)], ranks)
        elif self._task.at_once:
            report.ballots += await asyncio.gather(*(vote_all(each, ranks, _pause) for each in ballots))
        else:
            for number, script in enumerate(ballots):
                report.ballots.append(await vote_all(script, ranks, _pause))
                self._tell(number)
                if report.lost_s is not None:
                    break

    async def _serve(self, scripts: list[LockstepScript], ranks: Ranks) -> None:
        luck = scripts[0].luck(ranks.rank)
        async with seated(luck, ranks, self._task.parts, clock=None, pause=_pause) as seat:
            for script in scripts:
                mine = script.luck(ranks.rank)
                engine = LockstepEngine(seat.cache, mine, _pause, on_step=self._on_step)
                self.report.lockstep.append(engine.record)
                await engine.run()
                if engine.record.lost is not None:
                    await check_after_loss(seat)
                    break
            self.report.ballots.append(seat.ranks.ballots())
            await seat.check_end()

    def _on_step(self, number: int) -> None:
        if number % STEPS_PER_REPORT == 0:
            self._tell(number)


async def check_after_loss(seat: Seat) -> None:
    """Check that a cache whose group has lost a rank serves without reuse, or is closed, as configured.

    Raises: AssertionError: it hangs, or does anything else.
    """
    await within(_check_after_loss(seat))


async def _check_after_loss(seat: Seat) -> None:
    cache = seat.cache
    if seat.cache._ctx.config.on_rank_loss.value == "close":
        assert cache.state is State.CLOSED, f"the cache is {cache.state} after a loss; it should close"
        for call in (lambda: cache.match_prefix("late", [1]), lambda: cache.stats().state):
            with contextlib.suppress(ClosedError):
                assert call() is State.CLOSED
        return
    assert cache.state is State.NO_REUSE, f"the cache is {cache.state} after a loss"
    grant = await cache.begin_step(2)
    assert grant.num_pages == 2, f"{grant} after a loss, with nothing running"
    for turn in range(2):  # the second finds nothing of the first
        with cache.match_prefix("after the loss", prompt("abc")) as lease:
            assert lease.local_tokens == 0
            result = await lease.prefetch()
            assert result.fetched_tokens == 0, f"{result} after a loss"
            loading = await lease.load()
            assert loading.tokens == 0, f"{loading.tokens} tokens loaded after a loss, request {turn}"
            assert len((await lease.allocate(3 * PAGE_TOKENS + 1)).pages) == 4
            assert lease.commit(3 * PAGE_TOKENS) == 0
    await cache.begin_step(0)


# Processes


def _main(rank: int, pipe: Connection) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send(os.getpid())
        while True:
            task: Task = pipe.recv()
            pipe.send(asyncio.run(_Worker(rank, task, pipe.send).run()))


class RankProcess:
    """One process of an exam, as its owner sees it.

    Ownership: whoever starts it ends it, by :meth:`end`.
    """

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_main, args=(rank, theirs), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def command(self, task: Task) -> None:
        """Give a command; :meth:`receive` what comes of it."""
        self._pipe.send(task)

    def receive(self, timeout_s: float) -> Any:
        """Return the next message: its pid at first, then step numbers, then the :class:`Report`.

        Raises: AssertionError: nothing came, or the process has died.
        """
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"rank {self.rank} says nothing for {timeout_s} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the process of rank {self.rank} has died") from None

    def report(self, timeout_s: float) -> Report:
        """Return what became of the last command."""
        end_s = time.monotonic() + timeout_s
        while not isinstance(message := self.receive(max(0.0, end_s - time.monotonic())), Report):
            pass
        return message

    def send_signal(self, number: int) -> None:
        """Stop, continue or kill it."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, stopped or not, and wait for that."""
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
