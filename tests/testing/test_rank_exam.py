"""The rank exam: passed by our groups, on one loop and in processes, and failed by each way of breaking the rules."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache_async import CacheConfig, CpuDevice, HiCache
from hicache_async.abc import Ranks, Store
from hicache_async.flows.allocate import DeviceRoom
from hicache_async.flows.load import Loads
from hicache_async.flows.steps import Steps
from hicache_async.step import StepGrant
from hicache_async.stores.file import FileStore
from hicache_async.testing._rank_verdict import check_ballots, check_lockstep
from hicache_async.testing._watched_ranks import BallotRecord
from hicache_async.testing.local_ranks import LocalRanks
from hicache_async.testing.lockstep_engine import LockstepRecord, Step
from hicache_async.testing.lockstep_exam import (
    BallotScript,
    LockstepScript,
    Seat,
    SeatParts,
    examine_ballots,
    examine_lockstep,
    turns,
)
from hicache_async.testing.manual import ManualClock
from hicache_async.testing.rank_exam import Meeting, RankExam, join_hub

SHORT_MUTE = {"consensus_timeout_s": 0.05}


@asynccontextmanager
async def local_group(
    seed: int, size: int, **timeouts: float
) -> AsyncIterator[tuple[list[LocalRanks], ManualClock]]:
    """A group on this loop whose messages take their time."""
    clock = ManualClock()
    ranks = LocalRanks.group(size, clock=clock, **{"ticket_timeout_s": 2.0, **timeouts})
    rng = random.Random(seed)
    for rank in ranks:
        rank.delay_turns = lambda: rng.choice((0, 0, 0, 1, 5))
    yield ranks, clock
    for rank in ranks:
        await rank.aclose()


async def lockstep(seed: int, size: int) -> list[LockstepRecord]:
    """Run the exam of one seed."""
    async with local_group(seed, size) as (ranks, clock):
        return await examine_lockstep(LockstepScript.random(seed, size), ranks, clock=clock)


# What passes, on one loop


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_votes_on_one_loop() -> None:
    """Groups of 2 to 4 pass, and most of their tickets settle above zeros."""
    num_settled = num_heard = 0
    for seed in range(6):
        size = 2 + seed % 3
        async with local_group(seed, size) as (ranks, clock):
            records = await examine_ballots(BallotScript.random(seed, size), ranks, clock=clock)
        num_heard += sum(len(record.results) for record in records)
        num_settled += sum(any(result) for record in records for _, result in record.results)
    assert num_settled > num_heard / 2


@pytest.mark.asyncio
@pytest.mark.every_loop
@pytest.mark.parametrize("cancels", [False, True], ids=["", "cancelled_steps"])
async def test_lockstep_while_ranks_are_mute(cancels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that stop and come back make misses, the same ones everywhere, and no other batches."""
    if cancels:
        cancel_steps(monkeypatch)
    num_spoiled = 0
    for seed in range(2):
        async with local_group(seed, 3, consensus_timeout_s=0.05, group_timeout_s=3000.0) as (ranks, clock):
            holding = functools.partial(hold_now_and_then, random.Random(seed), ranks)
            script, parts = LockstepScript.random(seed, 3), SeatParts(options=SHORT_MUTE)
            await examine_lockstep(script, ranks, parts, clock=clock, meanwhile=holding)
            num_spoiled += sum(not any(result) for _, result in ranks[0].results)
    assert num_spoiled


async def hold_now_and_then(rng: random.Random, ranks: Sequence[LocalRanks], seats: Sequence[Seat]) -> None:
    """Stop one rank after another, for shorter and for longer than it takes to be mute."""
    while True:
        await turns(rng.randint(5, 100))
        rank = rng.choice(ranks)
        rank.hold()
        await turns(rng.choice((5, 60, 300)))
        rank.resume()


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_lockstep_while_one_rank_clears() -> None:
    """An operator who clears tiers of one rank makes misses for all, and no other batches."""
    for seed in range(2):
        async with local_group(seed, 3) as (ranks, clock):
            clearing = functools.partial(clear_now_and_then, random.Random(seed))
            await examine_lockstep(LockstepScript.random(seed, 3), ranks, clock=clock, meanwhile=clearing)


async def clear_now_and_then(rng: random.Random, seats: Sequence[Seat]) -> None:
    """Clear a tier, or all, of one rank after another."""
    while True:
        await turns(rng.randint(0, 30))
        await rng.choice(seats).cache.admin.clear(rng.choice((None, "device", "host")))


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_lockstep_with_steps_that_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A begin_step that was cancelled and is asked again, with another wish, gives what the others get."""
    cancel_steps(monkeypatch)
    for seed in range(2):
        await lockstep(seed, 3)


def cancel_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel most calls of begin_step, at some moment, and call again at another."""
    rng = random.Random(0)
    begin_step = HiCache.begin_step

    async def begin(cache: HiCache, num_pages: int = 0) -> StepGrant:
        while True:
            beginning = asyncio.create_task(begin_step(cache, rng.choice((num_pages, rng.randint(0, 6)))))
            try:
                if rng.random() < 0.6:
                    await turns(rng.randint(0, 6))
                    beginning.cancel()
                await asyncio.wait([beginning])
            finally:
                beginning.cancel()
            if not beginning.cancelled():
                return beginning.result()
            await turns(rng.randint(0, 6))

    monkeypatch.setattr(HiCache, "begin_step", begin)


@pytest.mark.asyncio
async def test_a_rank_that_fails_by_itself_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in one rank's cache leaves it without reuse, and in the batches of the others."""
    monkeypatch.setattr(Seat, "check_end", nothing_to_check)
    for seed in range(6):

        async def fail(seats: Sequence[Seat], seed: int = seed) -> None:
            await turns(20 + 20 * seed)
            while any(seat.cache._ctx.votes for seat in seats):
                await turns(1)
            seats[seed % 3].cache._ctx.fail(RuntimeError("planted"))

        async with local_group(seed, 3) as (ranks, clock):
            records = await examine_lockstep(
                LockstepScript.random(seed, 3), ranks, clock=clock, meanwhile=fail
            )
        assert records[0].finished


async def nothing_to_check(seat: Seat) -> None:
    """In place of the checks at the end: a failed cache keeps its tree's pages."""


@pytest.mark.asyncio
async def test_one_seed_is_one_run() -> None:
    """With a manual clock the same seed gives the same batches, lengths and votes."""
    assert await lockstep(3, 3) == await lockstep(3, 3)


# What fails

Plant = Callable[[pytest.MonkeyPatch], None]


def local_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that gives out what was agreed on this rank when it was asked for."""
    begin = Steps.begin
    here: dict[Steps, dict[object, Callable[[], None]]] = {}

    def agreed_here(
        steps: Steps, load: object, agreed: int, ticket: bytes, on_enter: Callable[[], None]
    ) -> None:
        here.setdefault(steps, {})[load] = on_enter

    async def begin_here(steps: Steps, num_pages: int) -> tuple[int, list[object]]:
        mine = here.pop(steps, {})
        pages, _ = await begin(steps, num_pages)
        for on_enter in mine.values():
            on_enter()
        return pages, [load for load in mine if not load._holding.released]  # type: ignore[attr-defined]

    monkeypatch.setattr(Steps, "begin", begin_here)
    monkeypatch.setattr(Steps, "agreed", agreed_here)


def own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that returns what this rank has."""
    agree = Loads._agree

    async def agree_with_itself(loads: Loads, ticket: bytes, offer: Sequence[int]) -> Sequence[int]:
        return (*offer[:2], (await agree(loads, ticket, offer))[2])

    monkeypatch.setattr(Loads, "_agree", agree_with_itself)


def own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room in a step is what this rank has."""
    monkeypatch.setattr(DeviceRoom, "trim_step", lambda room, num_pages: None)


def early_step_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that votes for the step under way, which the others may have begun without it."""
    cancel_steps(monkeypatch)
    vote = Steps.vote
    monkeypatch.setattr(Steps, "vote", lambda steps: vote(steps) + 1)


def foreign_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loading that names the page of somebody else."""
    load = Loads.load

    async def load_wrongly(loads: Loads, *args: Any, **options: Any) -> Any:
        loading, step = await load(loads, *args, **options)
        loads._ctx.kv.planes(0)[0][loading.pages[:1]] ^= 1
        return loading, step

    monkeypatch.setattr(Loads, "load", load_wrongly)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (local_loads, "step \\d+ differs: rank 0 did Step"),
        (own_length, "step \\d+ differs: rank 0 did Step"),
        (own_room, "step \\d+ differs: rank 0 did Step"),
        (early_step_vote, "step \\d+ differs: rank 0 did Step"),
        (foreign_page, "read foreign bytes: request"),
    ],
)
@pytest.mark.asyncio
async def test_a_broken_cache_is_found(plant: Plant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to act on what only one rank knows is found within a few seeds, by name of step and ranks."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        for seed in range(12):
            await asyncio.wait_for(lockstep(seed, 3), 20)


def ballots(**results: list[tuple[str, tuple[int, ...]]]) -> list[BallotRecord]:
    """Records of ranks that voted (5,) for a, then (7,) for b, and heard ``results``."""
    votes = [(b"a", (5,)), (b"b", (7,))]
    return [
        BallotRecord(rank, votes, [(name.encode(), value) for name, value in heard])
        for rank, heard in enumerate(results.values())
    ]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (ballots(one=[("a", (5,))], other=[("a", (0,))]), "is (5,) on rank 0 and (0,) on rank 1"),
        (ballots(one=[("a", (6,))], other=[]), "is (6,), above (5,), the vote of rank 0"),
        (ballots(one=[("a", (4,))], other=[]), "is (4,), the votes were"),
        (ballots(one=[("c", (4,))], other=[]), "is (4,), and rank 0 has not voted"),
        (
            ballots(one=[("a", (5,)), ("b", (7,))], other=[("b", (7,)), ("a", (5,))]),
            "ranks 0 and 1 hear of the same tickets in different orders",
        ),
        (ballots(one=[("b", (7,)), ("a", (5,))], other=[]), "every rank voted for 61 before 62"),
    ],
)
def test_broken_votes_are_found(records: list[BallotRecord], message: str) -> None:
    """A result that differs, exceeds a vote, is no minimum, lacks a vote or comes out of order is named."""
    with pytest.raises(AssertionError) as failed:
        check_ballots(records)
    assert message in str(failed.value)


def test_what_settled_on_some_survivors_only_is_found() -> None:
    """A result above zeros that one survivor has heard, and another has lost, is named."""
    one, other = ballots(one=[("a", (5,))], other=[])
    check_ballots([one, other], survivors=True)
    other.lost = {b"a"}
    with pytest.raises(AssertionError, match="is \\(5,\\) on rank 0, and lost on \\[1\\]"):
        check_ballots([one, other], survivors=True)
    check_ballots([one, other], survivors=True, max_torn=1)


def test_a_step_more_is_no_difference_after_a_loss_only() -> None:
    """Ranks that did different numbers of steps have parted, unless one was lost."""
    step = Step(0, (), ())
    one, other = LockstepRecord(0, [step, step]), LockstepRecord(1, [step])
    check_lockstep([one, other], survivors=True)
    with pytest.raises(AssertionError, match="did \\[2, 1\\] steps"):
        check_lockstep([one, other])


# Processes


class LyingRanks:
    """Ranks that hear their own votes."""

    def __init__(self, inner: Ranks) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.cast, self.when_lost, self.aclose = inner.cast, inner.when_lost, inner.aclose

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Wait for the result, and return the vote."""
        await self._inner.agree(ticket, vote, patient=patient)
        return vote


async def join_and_lie(config: CacheConfig, meeting: Meeting) -> Ranks:
    """Join, and hear nothing but oneself."""
    return LyingRanks(await join_hub(config, meeting))


class DeafRanks(LyingRanks):
    """Ranks that hear nothing at all."""

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Never return."""
        return await asyncio.get_running_loop().create_future()


async def join_and_hang(config: CacheConfig, meeting: Meeting) -> Ranks:
    """Join, and wait for ever."""
    return DeafRanks(await join_hub(config, meeting))


@pytest.fixture(scope="module")
def exam() -> Iterator[RankExam]:
    """Four processes, killed at the end whatever happens."""
    with RankExam(size=4) as exam:
        yield exam


@pytest.mark.timeout(180)  # importing torch in four processes at once
def test_processes_vote_and_serve(exam: RankExam) -> None:
    """Four processes pass schedules with delays, cancels, faults, unequal room and an order of their own."""
    reports = exam.run(schedules=10)
    assert sum(any(record.loads.values()) for report in reports for record in report.lockstep) > 10


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [3, 0])
def test_a_process_that_is_stopped_for_a_second(exam: RankExam, rank: int) -> None:
    """It makes misses, the same ones everywhere, and things are as before when it is back."""
    exam.stop_for(rank, 1.0)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "rank", "on_rank_loss"),
    [
        (signal.SIGKILL, 2, "no_reuse"),
        (signal.SIGKILL, 0, "close"),
        (signal.SIGSTOP, 2, "close"),
        (signal.SIGSTOP, 0, "no_reuse"),
    ],
)
def test_a_process_that_is_lost(exam: RankExam, how: signal.Signals, rank: int, on_rank_loss: str) -> None:
    """All survivors hear of it in time, have settled the same above 0, and serve without reuse or close."""
    exam.lose(rank, how, on_rank_loss=on_rank_loss)


@pytest.mark.timeout(180)
def test_a_process_that_is_lost_while_all_vote(exam: RankExam) -> None:
    """Of the tickets under way all survivors hear the same, or all of them none."""
    reports = exam.lose_voting(1, signal.SIGKILL)
    assert any(record.lost for report in reports for record in report.ballots)


def file_store(root: Path, rank: int, name: str) -> Store:
    """A store that no other rank and no other run has."""
    return FileStore(root / name / str(rank))


@pytest.mark.timeout(180)
def test_processes_with_files_and_threads(exam: RankExam, tmp_path: Path) -> None:
    """Caches that copy in threads and keep their pages on disk pass as well."""
    parts = SeatParts(make_device=CpuDevice, make_store=functools.partial(file_store, tmp_path))
    for seed in range(4):
        exam.run_lockstep(seed, parts=parts)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("join", "message"),
    [(join_and_lie, "ticket .* on rank \\d and .* on rank "), (join_and_hang, "hangs after .*agree")],
)
def test_a_broken_group_is_found(
    exam: RankExam,
    join: Callable[[CacheConfig, Meeting], Awaitable[Ranks]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group whose ranks hear different results, or none, fails with a message that says so."""
    monkeypatch.setattr(exam, "_join", join)
    monkeypatch.setattr("hicache_async.testing.rank_exam.LIMIT_S", 6.0)
    with pytest.raises(AssertionError, match=message):
        exam.run(schedules=1)


def test_no_process_outlives_its_exam() -> None:
    """The processes are gone when the block is left, those that were stopped too."""
    with RankExam(size=1) as small:
        pids = [process.pid for process in small._processes.values()]
        os.kill(pids[0], signal.SIGSTOP)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
def test_processes_vote_and_serve_at_length(exam: RankExam, part: int) -> None:
    """Five times a hundred schedules of each kind."""
    for start in range(100 * part, 100 * (part + 1), 20):
        exam.run(schedules=20, seed=1000 + start)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_processes_with_files_and_threads_at_length(exam: RankExam, tmp_path: Path) -> None:
    """A hundred runs."""
    parts = SeatParts(make_device=CpuDevice, make_store=functools.partial(file_store, tmp_path))
    for seed in range(100, 200):
        exam.run_lockstep(seed, parts=parts)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_faults_at_length(exam: RankExam) -> None:
    """Every fault of a process, three times over."""
    for seed in range(3):
        exam.run_faults(seed=seed)
