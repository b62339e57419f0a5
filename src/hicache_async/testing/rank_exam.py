"""The exam for rank groups and for caches over them, in processes of their own: real groups, real signals.

It takes a function that joins the group and a test::

    async def join(config: CacheConfig, meeting: Meeting) -> Ranks:
        return await MyRanks.join(config.group_rank, config.group_size, meeting.name)


    def test_my_ranks() -> None:
        with RankExam(join=join, size=4) as exam:
            exam.run(schedules=20)
            exam.run_faults()

The processes are spawned, and import the module of ``join``. What the exam of one loop finds in a moment, see
:mod:`.lockstep_exam`, takes seconds here: importing torch, and every fault, which costs a process.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is exported, and does not say so

from ..ranks.ballot import HUB_RANK
from ._lockstep_seat import SeatParts
from ._rank_verdict import check_ballots, check_lockstep, check_steps
from ._rank_worker import Join, Meeting, RankProcess, Report, Task, join_hub
from .ballot_script import BallotScript
from .lockstep_script import LockstepScript

__all__ = ["Join", "Meeting", "RankExam", "Report", "SeatParts", "join_hub"]

LOOPBACK = "127.0.0.1"
START_S = 120.0
"""How long the processes may take to start; importing torch takes seconds on a busy machine."""

SHORT: Mapping[str, object] = {
    "consensus_timeout_s": 0.3,
    "ticket_timeout_s": 3.0,
    "group_timeout_s": 2.0,
}
"""Timeouts of the exam, so that it ends soon."""

SLACK_S = 1.5
"""What a busy machine may add to a time limit."""

LIMIT_S = 50.0
"""How long the ranks may take for one command."""

MAX_TORN = 2
"""Tickets of which rank 0, when it is stopped or killed, may have told some survivors and not yet the others. No
step comes of that: rank 0 would take part in it. A rank in the middle has no such moment."""

REPORTS_OF_TRAFFIC = 3
"""After so many words of a process that it serves something happens to it."""

MANY = 500
"""Scripts of a run that a fault ends."""


class RankExam:
    """Examine a kind of rank group, and caches over it, with one process for each rank.

    Args:
        join: how a process joins a group; a function of a module, since it is sent to other processes.
        size: ranks.
        parts: what the caches are opened with; the functions in it are sent, too.
    Ownership: the processes are killed on leaving, whatever happened.
    """

    def __init__(self, *, join: Join = join_hub, size: int = 4, parts: SeatParts | None = None) -> None:
        self._join = join
        self._size = size
        self._parts = self._with_short_times(parts or SeatParts())
        self._names = itertools.count()
        self._processes: dict[int, RankProcess] = {}

    def __enter__(self) -> Self:
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        try:
            self._start_missing()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    # Schedules without a fault of a process

    def run(self, *, schedules: int = 20, seed: int = 0) -> list[Report]:
        """Examine votes, then engines in lockstep, by as many scripts of each.

        Raises: AssertionError: what differed between which ranks, or hung.
        """
        seeds = range(seed, seed + schedules)
        return [*self.run_ballots(seeds), *itertools.chain(*map(self.run_lockstep, seeds))]

    def run_ballots(self, seeds: Sequence[int]) -> list[Report]:
        """Let one group vote by the scripts of ``seeds``, all at once, and compare what the ranks heard."""
        scripts = tuple(BallotScript.random(seed, self._size) for seed in seeds)
        reports = self._collect(self._begin(scripts), list(self._processes.values()))
        _compare(reports)
        return reports

    def run_lockstep(self, seed: int, *, parts: SeatParts | None = None) -> list[Report]:
        """Serve the script of ``seed`` over caches with unequal luck, and compare what the ranks did.

        Args:
            parts: None: those of the exam.
        """
        task = self._begin((LockstepScript.random(seed, self._size),), self._with_short_times(parts))
        reports = self._collect(task, list(self._processes.values()))
        _compare(reports)
        return reports

    # A process that is stopped or killed

    def stop_for(self, rank: int, seconds: float, *, seed: int = 0, scripts: int = 8) -> list[Report]:
        """Stop a process for less than ``group_timeout_s`` while it serves; all ranks then go on alike."""
        task = self._begin(tuple(LockstepScript.random(seed + at, self._size) for at in range(scripts)))
        self._await_traffic(rank)
        process = self._processes[rank]
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)
        reports = self._collect(task, list(self._processes.values()))
        _compare(reports)
        later = reports[0].lockstep[2:]
        assert any(any(record.loads.values()) for record in later), (
            "nothing is reused any more since the stop"
        )
        return reports

    def lose(
        self, rank: int, how: signal.Signals, *, on_rank_loss: str = "no_reuse", seed: int = 0
    ) -> list[Report]:
        """Kill a process, or stop it for ever, while it serves; the survivors hear of it in time, and alike.

        Args:
            how: SIGKILL or SIGSTOP.
            on_rank_loss: of the config.
        Returns: what the survivors did.
        Raises: AssertionError: a survivor hangs, goes on, hears of it late, or something settled above 0 on
            some of them only; of rank 0 that is what it was telling when it stopped.
        """
        parts = dataclasses.replace(
            self._parts, options={**self._parts.options, "on_rank_loss": on_rank_loss}
        )
        scripts = tuple(LockstepScript.random(seed + at, self._size) for at in range(MANY))
        return self._lose(self._begin(scripts, parts), rank, how)

    def lose_voting(self, rank: int, how: signal.Signals, *, seed: int = 0) -> list[Report]:
        """As :meth:`lose`, but with votes alone."""
        scripts = tuple(BallotScript.random(seed + at, self._size, faults=False) for at in range(MANY))
        return self._lose(self._begin(scripts, at_once=False), rank, how)

    def _lose(self, task: Task, rank: int, how: signal.Signals) -> list[Report]:
        self._await_traffic(rank)
        signalled_s = time.monotonic()
        self._processes[rank].send_signal(how)
        try:
            survivors = [process for process in self._processes.values() if process.rank != rank]
            reports = self._collect(task, survivors)
            if how is signal.SIGSTOP:  # it comes round, and must not go on as if nothing had been
                self._processes[rank].send_signal(signal.SIGCONT)
                late = self._collect(task, [self._processes[rank]])[0]
                assert late.lost_s is not None, f"rank {rank} was stopped, given up, and has not heard of it"
        finally:
            self._processes.pop(rank).end()
            self._start_missing()
        _check_heard(reports, signalled_s, _limit_s(task.parts, how))
        _compare(reports, survivors=True, max_torn=MAX_TORN if rank == HUB_RANK else 0)
        return reports

    def run_faults(self, *, seed: int = 0) -> None:
        """Stop and kill a rank in the middle and rank 0, in every way, one after another."""
        peer = self._size - 1
        self.stop_for(peer, 1.0, seed=seed)
        self.stop_for(0, 1.0, seed=seed)
        for at, rank in enumerate((peer, 0)):
            self.lose_voting(rank, signal.SIGKILL, seed=seed + at)
            self.lose_voting(rank, signal.SIGSTOP, seed=seed + at)
            self.lose(rank, signal.SIGKILL, seed=seed + at)
            self.lose(rank, signal.SIGSTOP, seed=seed + at)
            self.lose(rank, signal.SIGKILL, on_rank_loss="close", seed=seed + at)

    # Commands

    def _with_short_times(self, parts: SeatParts | None) -> SeatParts:
        if parts is None:
            return self._parts
        return dataclasses.replace(parts, options={**SHORT, **parts.options})

    def _begin(
        self,
        scripts: tuple[BallotScript, ...] | tuple[LockstepScript, ...],
        parts: SeatParts | None = None,
        *,
        at_once: bool = True,
    ) -> Task:
        meeting = Meeting(LOOPBACK, self._store.port, f"exam {next(self._names)}")
        task = Task(self._join, meeting, self._size, parts or self._parts, scripts, LIMIT_S, at_once)
        for process in self._processes.values():
            process.command(task)
        return task

    def _await_traffic(self, rank: int) -> None:
        for _ in range(REPORTS_OF_TRAFFIC):
            message = self._processes[rank].receive(LIMIT_S)
            if isinstance(message, Report):
                raise AssertionError(f"rank {rank} ended before its fault: {message.error}")

    def _collect(self, task: Task, processes: Sequence[RankProcess]) -> list[Report]:
        end_s = time.monotonic() + task.limit_s + 10.0
        reports = [process.report(max(0.1, end_s - time.monotonic())) for process in processes]
        errors = [f"rank {report.rank}: {report.error}" for report in reports if report.error]
        if errors:
            _check_common_steps(reports)  # ranks that have parted hang, and this says where they did
            raise AssertionError("\n".join(errors))
        return reports

    def _start_missing(self) -> None:
        missing = [rank for rank in range(self._size) if rank not in self._processes]
        for rank in missing:
            self._processes[rank] = RankProcess(rank)
        for rank in missing:
            self._processes[rank].receive(START_S)

    def _end_all(self) -> None:
        for rank in list(self._processes):
            self._processes.pop(rank).end()
        del self._store


def _limit_s(parts: SeatParts, how: signal.Signals) -> float:
    # A killed process is heard of at once, a stopped one is pinged first.
    names = ("consensus_timeout_s", "group_timeout_s") if how is signal.SIGSTOP else ()
    return SLACK_S + sum(float(str(parts.options[name])) for name in names)


def _check_heard(reports: Sequence[Report], signalled_s: float, limit_s: float) -> None:
    for report in reports:
        assert report.lost_s is not None, f"rank {report.rank} has not heard of the loss"
        took_s = report.lost_s - signalled_s
        assert took_s <= limit_s, f"rank {report.rank} heard after {took_s:.2f} s, more than {limit_s:.2f} s"


def _check_common_steps(reports: Sequence[Report]) -> None:
    for records in zip(*(report.lockstep for report in reports), strict=False):
        for number in range(1, min(len(record.steps) for record in records) + 1):
            check_steps(records, number)


def _compare(reports: Sequence[Report], *, survivors: bool = False, max_torn: int = 0) -> None:
    for ballots in zip(*(report.ballots for report in reports), strict=False):
        check_ballots(ballots, survivors=survivors, max_torn=max_torn)
    for records in itertools.zip_longest(*(report.lockstep for report in reports)):
        present = [record for record in records if record is not None]
        assert survivors or len(present) == len(reports), "the ranks served different numbers of scripts"
        check_lockstep(present, survivors=survivors)
