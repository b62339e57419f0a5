"""Lanes serve the more urgent call first, and a call that becomes so while it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hicache_async.stores import FileStore
from hicache_async.stores._lane import JOB_LIMITS, Kind
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import StopToken
from tests.stores.lanes import Rig, call_of
from tests.stores.pages import until

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def finish(rig: Rig, *tasks: asyncio.Task[None]) -> None:
    """Run jobs one at a time until the calls are over."""
    while not all(task.done() for task in tasks):
        await rig.settle()
        if rig.threads.pending:
            rig.threads.run_next()


async def test_higher_priority_first_and_equal_ones_in_order() -> None:
    """Of the calls that wait for a lane the highest priority is done first; equal ones in order of arrival."""
    rig = Rig(num_lanes=1)
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    tasks = [first]
    for name, priority in (("b", 0), ("c", 2), ("d", -1), ("e", 2), ("f", 0)):
        task, call = rig.start(name, 1)
        call.stop.priority = priority
        tasks.append(task)
    await finish(rig, *tasks)
    assert rig.performed == ["a0", "c0", "e0", "b0", "f0", "d0"]


async def test_a_call_that_becomes_urgent_while_it_waits() -> None:
    """The priority counts as it is when a lane comes free."""
    rig = Rig(num_lanes=1)
    size = JOB_LIMITS[Kind.READ].num_items
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    long, _ = rig.start("b", size)
    late, call = rig.start("c", 1)
    await rig.settle()
    call.stop.priority = 1
    await finish(rig, first, long, late)
    assert rig.performed[:2] == ["a0", "c0"]


async def test_calls_of_one_priority_still_take_turns() -> None:
    """A long call of the highest priority shares the lane with another one of it, and others wait for both."""
    rig = Rig(num_lanes=1)
    size = JOB_LIMITS[Kind.READ].num_items
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    calls = {
        name: rig.start(name, num_items) for name, num_items in (("low", 1), ("long", 4 * size), ("short", 1))
    }
    for name in ("long", "short"):
        calls[name][1].stop.priority = 5
    await finish(rig, first, *(task for task, _ in calls.values()))
    order = [item.rstrip("0123456789") for item in rig.performed]
    assert order.index("short") < size + 2
    assert order[-1] == "low" or order.index("low") > order.index("short")


async def test_an_urgent_write_does_not_pass_a_read() -> None:
    """Priority orders calls of one kind; reads outrank writes whatever theirs."""
    rig = Rig(num_lanes=1)
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    write, call = rig.start("w", 1, Kind.WRITE)
    call.stop.priority = 9
    read, _ = rig.start("r", 1)
    await finish(rig, first, write, read)
    assert rig.performed == ["a0", "r0", "w0"]


async def test_a_read_of_files_has_the_priority_of_its_token(tmp_path: Path) -> None:
    """A FileStore serves reads by the priority that their callers put on the stop tokens."""
    threads = ManualThreads()
    store = FileStore(tmp_path / "kv", threads=threads, num_lanes=1)
    order: list[int] = []

    async def read(priority: int) -> None:
        await store.read(["absent"], [memoryview(bytearray(8))], StopToken(priority))
        order.append(priority)

    tasks = [asyncio.create_task(read(0))]
    await until(lambda: threads.pending == 1)
    tasks += [asyncio.create_task(read(priority)) for priority in (1, 3, 2)]
    for _ in range(20):
        await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        threads.run_all()
        await asyncio.sleep(0)
    assert order == [0, 3, 2, 1]
    await store.aclose()


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
async def test_at_most_two_items_are_touched_after_a_stop(num_lanes: int) -> None:
    """However many lanes there are a stopped call touches the items in hand and no more, two at the most."""
    rig = Rig(num_lanes=num_lanes)
    size = JOB_LIMITS[Kind.READ].num_items
    touched: list[int] = []
    call = call_of(4 * size, lambda item: touched.append(item))
    task = asyncio.create_task(rig.lanes.run(call))
    await rig.settle()
    jobs = [rig.threads._jobs.popleft() for _ in range(rig.threads.pending)]
    assert len(jobs) <= 2
    after = 0

    def stop_in_hand(item: int) -> None:
        # Each thread finds the stop only when it looks for its next item.
        nonlocal after
        after += call.stop.stopped
        call.stop.stop()

    call.perform = stop_in_hand
    for future, job in jobs:
        future.set_running_or_notify_cancel()
        future.set_result(job())
    await task
    assert after <= 1
