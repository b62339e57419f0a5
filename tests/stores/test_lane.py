"""Lanes share threads among calls, and every call keeps its own count, stop and end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hicache_async._threads import DaemonThreads
from hicache_async.stores._lane import JOB_LIMITS, MIN_SHARE_NBYTES, Kind, Lanes
from tests.stores.lanes import Rig, call_of

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def test_calls_of_one_turn_share_a_job() -> None:
    """Eight small calls made together are one thread job, done in their order."""
    rig = Rig()
    started = [rig.start(name, 2) for name in "abcdefgh"]
    await rig.settle()
    assert rig.threads.pending == 1
    rig.threads.run_next()
    await asyncio.gather(*(task for task, _ in started))
    assert rig.performed == [f"{name}{item}" for name in "abcdefgh" for item in range(2)]
    assert [call.count for _, call in started] == [2] * 8


@pytest.mark.parametrize(("num_calls", "num_items", "share"), [(1, 90, 45), (9, 10, 30), (45, 2, 30)])
async def test_reads_are_shared_out_to_the_free_lanes(num_calls: int, num_items: int, share: int) -> None:
    """What waits to be read goes to all lanes that are free, as much to each; of one call, to two of them."""
    rig = Rig(num_lanes=3)
    started = [rig.start(f"{name}-", num_items, item_nbytes=1 << 20) for name in range(num_calls)]
    await rig.settle()
    shares = []
    while rig.threads.pending:
        before = len(rig.performed)
        rig.threads.run_next()
        shares.append(len(rig.performed) - before)
    assert shares[:2] == [share, share]
    while not all(task.done() for task, _ in started):
        await rig.settle()
        rig.threads.run_all()
    assert [call.count for _, call in started] == [num_items] * num_calls


async def test_little_is_not_shared_out() -> None:
    """What one lane has read before a second one has begun stays in one job."""
    rig = Rig(num_lanes=3)
    task, _ = rig.start("a", 200, item_nbytes=MIN_SHARE_NBYTES // 200)
    await rig.settle()
    assert rig.threads.pending == 1
    rig.threads.run_next()
    await task


@pytest.mark.parametrize("bad", [0, 1, 4])
async def test_a_bad_item_ends_its_own_call_only(bad: int) -> None:
    """The count ends before the first bad item; calls in the same job are whole."""
    rig = Rig()
    performed = []

    def perform(item: int) -> str | None:
        performed.append(item)
        return "damaged" if item == bad else None

    before, call, after = call_of(3), call_of(5, perform), call_of(3)
    tasks = [asyncio.create_task(rig.lanes.run(each)) for each in (before, call, after)]
    await rig.pending(1)
    rig.threads.run_next()
    await asyncio.gather(*tasks)
    assert (call.count, call.fault, performed) == (bad, "damaged", list(range(bad + 1)))
    assert (before.count, after.count) == (3, 3)


async def test_an_exception_belongs_to_its_call() -> None:
    """What an item raises is kept in its call, and neither the job nor a neighbour sees it."""
    rig = Rig()
    broken, neighbour = call_of(3, lambda item: [None][item]), call_of(3)
    tasks = [asyncio.create_task(rig.lanes.run(each)) for each in (broken, neighbour)]
    await rig.pending(1)
    rig.threads.run_next()
    await asyncio.gather(*tasks)
    assert broken.count == 1
    assert isinstance(broken.error, IndexError)
    assert (neighbour.count, neighbour.error) == (3, None)


@pytest.mark.parametrize("later_first", [False, True])
async def test_a_bad_item_of_an_early_run_wins_over_a_later_one(later_first: bool) -> None:
    """With two runs of one call the count ends at the first bad item of all, whichever was seen first."""
    rig = Rig()
    size = JOB_LIMITS[Kind.READ].num_items
    call = call_of(2 * size, lambda item: f"bad {item}" if item in (5, size) else None)
    task = asyncio.create_task(rig.lanes.run(call))
    await rig.pending(2)
    jobs = [rig.threads._jobs.popleft() for _ in range(2)]
    for future, job in reversed(jobs) if later_first else jobs:
        future.set_running_or_notify_cancel()
        future.set_result(job())
    await task
    assert (call.count, call.fault) == (5, "bad 5")


async def test_a_stopped_call_ends_after_the_item_in_hand() -> None:
    """A stop seen between items ends the run there, and its neighbours go on."""
    rig = Rig()
    stopped, neighbour = call_of(5), call_of(3)
    stopped.perform = lambda item: stopped.stop.stop() if item == 2 else None  # type: ignore[func-returns-value]
    tasks = [asyncio.create_task(rig.lanes.run(each)) for each in (stopped, neighbour)]
    await rig.pending(1)
    rig.threads.run_next()
    await asyncio.gather(*tasks)
    assert (stopped.count, stopped.fault, neighbour.count) == (3, None, 3)


async def test_a_call_stopped_before_its_job_does_nothing() -> None:
    """A stop that comes while the job waits for a thread leaves every item alone."""
    rig = Rig()
    task, call = rig.start("a", 3)
    await rig.pending(1)
    call.stop.stop()
    rig.threads.run_next()
    await task
    assert (call.count, rig.performed) == (0, [])


async def test_a_run_is_reported_as_the_thread_passes_it() -> None:
    """A small call is over while its neighbour in the same job still hangs."""
    go_on = threading.Event()
    lanes = Lanes(asyncio.get_running_loop(), DaemonThreads(1), 1)
    small, slow = call_of(1), call_of(1, lambda _: None if go_on.wait(30) else "late")
    slow_task = None
    try:
        small_task = asyncio.create_task(lanes.run(small))
        slow_task = asyncio.create_task(lanes.run(slow))
        await small_task
        assert not slow_task.done()
        assert small.count == 1
    finally:
        go_on.set()
    await slow_task
    assert slow.count == 1


async def test_a_cancelled_call_is_busy_until_its_thread_has_passed() -> None:
    """Cancel ends the coroutine at once; the token is quiet only after the item in hand."""
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    inside = asyncio.Event()
    touched: list[int] = []

    def perform(item: int) -> None:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)
        touched.append(item)

    lanes = Lanes(loop, DaemonThreads(1), 1)
    call = call_of(4, perform)
    task = asyncio.create_task(lanes.run(call))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.stop.busy
    assert call.stop.stopped
    assert touched == []
    quiet = asyncio.Event()
    call.stop.when_quiet(quiet.set)
    go_on.set()
    await quiet.wait()
    assert touched == [0]
    assert not call.stop.busy


async def test_a_call_cancelled_in_the_queue_is_quiet_at_once() -> None:
    """A call that no job has taken is over as soon as it is cancelled, and is never performed."""
    rig = Rig(num_lanes=1)
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    second, call = rig.start("b", 1)
    await rig.settle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert call.stop.tracked
    assert not call.stop.busy
    rig.threads.run_next()
    await first
    await rig.settle()
    assert rig.threads.pending == 0
    assert rig.performed == ["a0"]


async def test_a_run_is_finished_before_it_is_reported() -> None:
    """What is done at the end of a run is done once, in the thread, with the items that went well."""
    rig = Rig(num_lanes=1)
    performed: list[object] = []
    bad = call_of(5, lambda item: performed.append(item) or ("bad" if item == 3 else None))  # type: ignore[func-returns-value]
    whole = call_of(2, lambda item: performed.append(item))
    for call in (bad, whole):
        call.finish = performed.append
    tasks = [asyncio.create_task(rig.lanes.run(call)) for call in (bad, whole)]
    await rig.pending(1)
    rig.threads.run_next()
    assert performed == [0, 1, 2, 3, range(3), 0, 1, range(2)]
    await asyncio.gather(*tasks)
    assert (bad.count, bad.fault, whole.count) == (3, "bad", 2)


async def test_a_run_that_cannot_be_finished_counts_nothing() -> None:
    """Where the end of a run fails none of its items is good, its call has the error, and neighbours are whole."""

    def finish(items: range) -> None:
        raise OSError(5, "Input/output error")

    rig = Rig(num_lanes=1)
    broken, neighbour = call_of(3), call_of(2)
    broken.finish = finish
    tasks = [asyncio.create_task(rig.lanes.run(call)) for call in (broken, neighbour)]
    await rig.pending(1)
    rig.threads.run_next()
    await asyncio.gather(*tasks)
    assert (broken.count, neighbour.count) == (0, 2)
    assert isinstance(broken.error, OSError)


async def test_a_run_without_a_good_item_is_not_finished() -> None:
    """Where nothing went well there is nothing to finish."""
    rig = Rig(num_lanes=1)
    call = call_of(3, lambda item: "bad")
    call.finish = lambda items: pytest.fail("it was finished")
    task = asyncio.create_task(rig.lanes.run(call))
    await rig.pending(1)
    rig.threads.run_next()
    await task
    assert (call.count, call.fault) == (0, "bad")


async def test_a_big_call_does_not_hold_up_a_small_one() -> None:
    """Calls take turns, a job's worth each: a small call is done long before the big one ahead of it."""
    rig = Rig(num_lanes=1)
    big, _ = rig.start("a", 100 * JOB_LIMITS[Kind.READ].num_items)
    await rig.pending(1)
    small, _ = rig.start("b", 1)
    for _ in range(3):
        await rig.pending(1)
        rig.threads.run_next()
    await small
    assert not big.done()
    big.cancel()


async def test_one_call_has_few_runs_under_way() -> None:
    """However many lanes are idle a call takes two, so a stop leaves at most two items in hand."""
    rig = Rig(num_lanes=8)
    task, _ = rig.start("a", 10 * JOB_LIMITS[Kind.READ].num_items)
    await rig.settle()
    assert rig.threads.pending == 2
    task.cancel()


async def test_every_item_of_a_long_call_is_done_once() -> None:
    """A call of many jobs performs each item exactly once and counts them all."""
    rig = Rig(num_lanes=3)
    num_items = 7 * JOB_LIMITS[Kind.READ].num_items + 3
    task, call = rig.start("", num_items)
    while not task.done():
        rig.threads.run_all()
        await asyncio.sleep(0)
    assert sorted(map(int, rig.performed)) == list(range(num_items))
    assert call.count == num_items


async def test_a_job_is_full_by_bytes() -> None:
    """Large items fill a job by bytes, and one larger than a job still gets through alone."""
    rig = Rig(num_lanes=1)
    limit = JOB_LIMITS[Kind.READ].nbytes
    call = call_of(6, lambda item: rig.performed.append(str(item)), item_nbytes=limit // 2)
    huge = call_of(2, lambda item: rig.performed.append(f"huge{item}"), item_nbytes=3 * limit)
    tasks = [asyncio.create_task(rig.lanes.run(each)) for each in (call, huge)]
    await rig.pending(1)
    rig.threads.run_next()
    assert rig.performed == ["0", "1"]
    await rig.pending(1)
    rig.threads.run_next()
    assert rig.performed == ["0", "1", "huge0"]
    while not all(task.done() for task in tasks):
        rig.threads.run_all()
        await asyncio.sleep(0)
    assert (call.count, huge.count) == (6, 2)


async def test_reads_outrank_writes() -> None:
    """A free lane takes the read that waits before the write that came first."""
    rig = Rig(num_lanes=1)
    first, _ = rig.start("a", 1)
    await rig.pending(1)
    write, _ = rig.start("w", 1, Kind.WRITE)
    read, _ = rig.start("r", 1)
    await rig.settle()
    while rig.threads.pending:
        rig.threads.run_next()
        await rig.settle()
    await asyncio.gather(first, write, read)
    assert rig.performed == ["a0", "r0", "w0"]


async def test_writes_never_hold_the_last_lane() -> None:
    """With every write lane taken a read starts at once."""
    rig = Rig(num_lanes=3)
    size = JOB_LIMITS[Kind.WRITE].num_items
    writes = [rig.start(f"w{number}-", size, Kind.WRITE)[0] for number in range(5)]
    await rig.settle()
    assert rig.threads.pending == 2
    read, _ = rig.start("r", 1)
    await rig.pending(3)
    while not all(task.done() for task in (*writes, read)):
        rig.threads.run_all()
        await asyncio.sleep(0)


async def test_a_single_lane_writes_when_no_read_waits() -> None:
    """With one lane a write runs, alone."""
    rig = Rig(num_lanes=1)
    write, call = rig.start("w", 1, Kind.WRITE)
    await rig.pending(1)
    rig.threads.run_next()
    await write
    assert call.count == 1


async def test_lookups_are_outside_the_lanes() -> None:
    """A lookup starts while every lane is taken, one job of them at a time."""
    rig = Rig(num_lanes=1)
    read, _ = rig.start("r", 1)
    await rig.pending(1)
    first, _ = rig.start("x", 1, Kind.LOOKUP)
    await rig.pending(2)
    second, _ = rig.start("y", 1, Kind.LOOKUP)
    third, _ = rig.start("z", 1, Kind.LOOKUP)
    await rig.settle()
    assert rig.threads.pending == 2
    for _ in range(3):
        rig.threads.run_next()
        await rig.settle()
    await asyncio.gather(read, first, second, third)
    assert rig.performed == ["r0", "x0", "y0", "z0"]


async def test_walks_are_outside_the_lanes() -> None:
    """A walk starts while every lane and the lookups are taken, one item at a time, and takes no turn from them."""
    rig = Rig(num_lanes=1)
    read, _ = rig.start("r", 1)
    lookup, _ = rig.start("x", 1, Kind.LOOKUP)
    await rig.pending(2)
    walk, _ = rig.start("w", 2, Kind.WALK)
    other, _ = rig.start("v", 1, Kind.WALK)
    await rig.settle()
    assert rig.threads.pending == 3
    while rig.threads.pending:
        rig.threads.run_next()
        await rig.settle()
    await asyncio.gather(read, lookup, walk, other)
    assert rig.performed == ["r0", "x0", "w0", "v0", "w1"]
