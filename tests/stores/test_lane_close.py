"""Lanes that close, threads that refuse and tasks that are torn away: no call waits for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hicache_async._threads import DaemonThreads
from hicache_async.errors import StoreUnavailable
from hicache_async.stores._lane import Kind, Lanes
from tests.stores.lanes import Rig, call_of
from tests.stores.pages import until

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def test_threads_that_refuse_fail_the_call() -> None:
    """An executor that was shut down under the lanes is an unavailable store, not a call that waits."""
    rig = Rig()
    rig.threads.shutdown()
    calls = [call_of(3, rig.performed.append) for _ in range(2)]  # type: ignore[arg-type]
    for call in calls:
        await rig.lanes.run(call)
        assert (call.count, call.stop.busy) == (0, False)
        assert isinstance(call.error, StoreUnavailable)
    assert rig.performed == []


async def test_a_job_cancelled_before_it_began_fails_its_calls() -> None:
    """Threads that drop a waiting job leave its calls over, quiet and failed; waiting ones too."""
    rig = Rig(num_lanes=1)
    task, call = rig.start("a", 1)
    await rig.pending(1)
    queued_task, queued = rig.start("b", 1)
    await rig.settle()
    rig.threads.shutdown()
    await asyncio.gather(task, queued_task)
    for each in (call, queued):
        assert isinstance(each.error, StoreUnavailable)
        assert not each.stop.busy
    assert rig.performed == []


async def test_close_ends_reads_and_lookups_at_once() -> None:
    """Closing fails reads and lookups though their thread hangs; the token stays busy until it has passed."""
    rig = Rig(num_lanes=1)
    read_task, read = rig.start("r", 3)
    lookup_task, lookup = rig.start("x", 3, Kind.LOOKUP)
    await rig.pending(2)
    queued_task, queued = rig.start("q", 3)
    await rig.settle()
    rig.lanes.close()
    for task in (read_task, lookup_task, queued_task):
        with pytest.raises(StoreUnavailable, match="closed"):
            await task
    assert read.stop.busy
    assert lookup.stop.busy
    assert not queued.stop.busy
    rig.threads.run_all()
    await until(lambda: not (read.stop.busy or lookup.stop.busy))
    assert rig.performed == []
    with pytest.raises(StoreUnavailable, match="open another"):
        await rig.lanes.run(call_of(1))


async def test_close_ends_a_write_when_its_thread_has_left_it() -> None:
    """A write under way at close returns after the page in hand, with its true count; a queued one with 0."""
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    inside = asyncio.Event()

    def perform(item: int) -> None:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)

    lanes = Lanes(loop, DaemonThreads(1), 1)
    write, queued = call_of(3, perform, Kind.WRITE), call_of(3, perform, Kind.WRITE)
    write_task = asyncio.create_task(lanes.run(write))
    await inside.wait()
    queued_task = asyncio.create_task(lanes.run(queued))
    await asyncio.sleep(0)
    lanes.close()
    await queued_task
    assert not write_task.done()
    go_on.set()
    await write_task
    assert (write.count, queued.count) == (1, 0)


async def test_a_job_task_cancelled_from_outside_still_reports() -> None:
    """A loop shutting down cancels the task of a job; the thread's report still makes the token quiet."""
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    inside = asyncio.Event()

    def perform(item: int) -> None:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)

    lanes = Lanes(loop, DaemonThreads(1), 1)
    call = call_of(1, perform)
    task = asyncio.create_task(lanes.run(call))
    await inside.wait()
    for job in tuple(lanes._tasks):
        job.cancel()
    await until(lambda: not lanes._tasks)
    assert not task.done()
    go_on.set()
    await task
    assert (call.count, call.stop.busy) == (1, False)
