"""Engines of several ranks in lockstep: a slow disk on one, less room on another, preemption, clients that hang up."""

from __future__ import annotations

import random

import pytest

from hicache_async.testing.local_ranks import LocalRanks
from hicache_async.testing.lockstep_exam import LockstepRecord, LockstepScript, examine_lockstep
from hicache_async.testing.manual import ManualClock

QUICK = range(3)
RUNS_OF_A_PART = 50


async def serve(seed: int, size: int) -> list[LockstepRecord]:
    """Serve one script over ``size`` ranks of this loop; raises what the exam finds."""
    clock = ManualClock()
    ranks = LocalRanks.group(size, clock=clock)
    rng = random.Random(seed)
    for rank in ranks:
        rank.delay_turns = lambda: rng.choice((0, 0, 1, 4))
    try:
        return await examine_lockstep(LockstepScript.random(seed, size), ranks, clock=clock)
    finally:
        for rank in ranks:
            await rank.aclose()


def check_eventful(records: list[LockstepRecord]) -> None:
    """Check that what the runs are about has happened in them."""
    assert sum(record.preempted for record in records)
    assert sum(record.put_back for record in records)
    assert sum(record.gone for record in records)
    assert sum(any(record.loads.values()) for record in records) > len(records) / 2
    held = [
        max((pages for step in record.steps for *_, pages in step.batch), default=0) for record in records
    ]
    assert max(held) >= 6


@pytest.mark.asyncio
@pytest.mark.every_loop
@pytest.mark.parametrize("size", [2, 4])
async def test_same_batches_on_all_ranks(size: int) -> None:
    """Whatever room, store and moments each rank has, all of them run the same batches and read their own bytes."""
    records = [(await serve(seed, size))[0] for seed in QUICK]
    check_eventful(records)


@pytest.mark.asyncio
@pytest.mark.stress
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("part", range(10))
async def test_same_batches_on_all_ranks_at_length(part: int, size: int) -> None:
    """Five hundred runs of each size."""
    seeds = range(100 + part * RUNS_OF_A_PART, 100 + (part + 1) * RUNS_OF_A_PART)
    check_eventful([(await serve(seed, size))[0] for seed in seeds])
