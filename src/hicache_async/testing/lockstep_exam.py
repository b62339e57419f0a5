"""The rank exam on one loop: ranks that live here vote, or serve in lockstep, and must agree.

    clock = ManualClock()
    ranks = LocalRanks.group(4, clock=clock)
    await examine_ballots(BallotScript.random(seed, 4), ranks)
    await examine_lockstep(LockstepScript.random(seed, 4), ranks, clock=clock)

Each raises AssertionError, which says what differed between which ranks. The same seed gives the same script, and
with a manual clock the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from ..abc import Clock, Ranks
from ._lockstep_seat import Seat, SeatParts, seated
from ._rank_verdict import check_ballots, check_lockstep, check_steps
from ._watched_ranks import BallotRecord
from .ballot_script import BallotScript, vote_all
from .lockstep_engine import LockstepEngine, LockstepRecord
from .lockstep_script import LockstepScript
from .manual import ManualClock

__all__ = [
    "BallotRecord", "BallotScript", "LockstepRecord", "LockstepScript", "Seat", "SeatParts", "examine_ballots",
    "examine_lockstep", "turns",
]  # fmt: skip

T = TypeVar("T")

TURNS_PER_MOVE = 5
MOVE_S = 0.005
"""A manual clock moves on by this every few turns of the loop."""


async def turns(units: float) -> None:
    """Let the loop turn so many times."""
    for _ in range(int(units)):
        await asyncio.sleep(0)


async def examine_ballots(
    script: BallotScript, ranks: Sequence[Ranks], *, clock: Clock | None = None
) -> list[BallotRecord]:
    """Let ranks vote as ``script`` says, and compare what they heard.

    Args:
        clock: of the group; a :class:`ManualClock` is moved on.
    Returns: what each rank voted and heard.
    Raises: AssertionError: what differs, exceeds a vote or comes in another order.
    Ownership: ``ranks`` stay the caller's.
    """
    async with _moving(clock):
        records = await _all_of([vote_all(script, each, turns) for each in ranks])
    check_ballots(records)
    return records


async def examine_lockstep(
    script: LockstepScript,
    ranks: Sequence[Ranks],
    parts: SeatParts | None = None,
    *,
    clock: Clock | None = None,
    meanwhile: Callable[[Sequence[Seat]], Coroutine[Any, Any, None]] | None = None,
) -> list[LockstepRecord]:
    """Serve ``script`` with one cache and one engine for each of ``ranks``, and compare what they did.

    Args:
        parts: what the caches are opened with.
        clock: of the group and of the caches; a :class:`ManualClock` is moved on.
        meanwhile: run beside the engines with their caches, and cancelled at their end.
    Returns: what each rank did.
    Raises: AssertionError: a batch, a length or a result differs, a foreign byte was read, a page is gone.
    Ownership: the caches are closed; ``ranks`` stay the caller's.
    """
    async with AsyncExitStack() as stack:
        seats = [
            await stack.enter_async_context(
                seated(script.luck(each.rank), each, parts or SeatParts(), clock=clock, pause=turns)
            )
            for each in ranks
        ]
        async with _moving(clock), _beside(None if meanwhile is None else meanwhile(seats)):
            records: list[LockstepRecord] = []

            def compare(
                number: int,
            ) -> None:  # at once: ranks that have parted may wait for each other for ever
                check_steps([record for record in records if len(record.steps) >= number], number)

            engines = [LockstepEngine(seat.cache, seat.luck, turns, on_step=compare) for seat in seats]
            records += [engine.record for engine in engines]
            await _all_of([engine.run() for engine in engines])
        check_lockstep(records)
        check_ballots([seat.ranks.ballots() for seat in seats])
        async with _moving(clock):
            for seat in seats:
                await seat.check_end()
    return records


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None] | None) -> AsyncIterator[None]:
    """Run ``work`` beside the block, and end it with the block; what it raises is raised."""
    if work is None:
        yield
        return
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _moving(clock: Clock | None) -> AbstractAsyncContextManager[None]:
    """Move a manual clock on beside the block."""
    return _beside(_move(clock) if isinstance(clock, ManualClock) else None)


async def _move(clock: ManualClock) -> None:
    while True:
        await turns(TURNS_PER_MOVE)
        clock.advance(MOVE_S)


async def _all_of(works: Sequence[Awaitable[T]]) -> list[T]:
    """Return what all return; when one raises, the others are ended first, so that nothing runs on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()
    return [task.result() for task in tasks]
