"""ThreadFence: set or failed once, from anywhere; waited for by threads and by the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import pytest_asyncio

from hicache_async._fence import ThreadFence
from hicache_async._threads import DaemonThreads

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

LIMIT_S = 20


@pytest_asyncio.fixture
async def fence() -> ThreadFence:
    return ThreadFence(asyncio.get_running_loop(), "layer 3")


@pytest_asyncio.fixture
async def threads() -> AsyncIterator[DaemonThreads]:
    threads = DaemonThreads(4, name="test")
    yield threads
    threads.shutdown()


async def test_a_fence_is_open_until_it_is_set(fence: ThreadFence) -> None:
    """It has not passed before set and has passed after, and says so when printed."""
    assert not fence.passed()
    assert repr(fence) == "<ThreadFence layer 3 open>"
    fence.set()
    assert fence.passed()
    assert repr(fence) == "<ThreadFence layer 3 passed>"
    fence.block()
    await fence.wait()


async def test_threads_block_until_it_is_set(fence: ThreadFence, threads: DaemonThreads) -> None:
    """Every thread that blocks is held until the fence is set, however many there are."""
    started = threading.Barrier(4)
    order: list[str] = []

    def block() -> None:
        started.wait(LIMIT_S)
        fence.block()
        order.append("passed")

    jobs = [threads.submit(block) for _ in range(3)]
    await asyncio.to_thread(started.wait, LIMIT_S)
    order.append("set")
    fence.set()
    await asyncio.gather(*map(asyncio.wrap_future, jobs))
    assert order == ["set", "passed", "passed", "passed"]


async def test_a_thread_that_comes_late_does_not_block(fence: ThreadFence, threads: DaemonThreads) -> None:
    """Blocking on a fence that a thread has set returns at once, in any thread."""
    await asyncio.wrap_future(threads.submit(fence.set))
    await asyncio.wrap_future(threads.submit(fence.block))


async def test_waiters_wake_when_a_thread_sets_it(fence: ThreadFence, threads: DaemonThreads) -> None:
    """All tasks that wait are woken by a thread's set."""
    waiters = [asyncio.create_task(fence.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    threads.submit(fence.set)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*waiters)


async def test_failing_raises_in_block_and_wait(fence: ThreadFence, threads: DaemonThreads) -> None:
    """Whoever waits for a failed fence, before or after, in a thread or a task, gets its error."""
    early = asyncio.create_task(fence.wait())
    blocked = threads.submit(fence.block)
    await asyncio.sleep(0)
    threads.submit(fence.fail, OSError("bad copy"))
    for waiting in (early, asyncio.wrap_future(blocked), fence.wait()):
        with pytest.raises(OSError, match="bad copy"):
            await waiting
    with pytest.raises(OSError, match="bad copy"):
        fence.block()
    assert fence.passed()
    assert repr(fence) == "<ThreadFence layer 3 failed>"


async def test_it_settles_once(fence: ThreadFence) -> None:
    """The first of set and fail counts; later calls do nothing."""
    fence.set()
    fence.fail(OSError("too late"))
    await fence.wait()
    fence.block()
    failed = ThreadFence(asyncio.get_running_loop())
    failed.fail(OSError("first"))
    failed.set()
    failed.fail(OSError("second"))
    with pytest.raises(OSError, match="first"):
        failed.block()


async def test_callbacks_run_on_the_loop_once(fence: ThreadFence, threads: DaemonThreads) -> None:
    """Callbacks run in order, on the loop's thread, after the fence has settled and only once."""
    seen: list[tuple[int, bool, int]] = []
    last = asyncio.Event()
    for number in range(3):
        fence.add_callback(lambda number=number: seen.append((number, fence.passed(), threading.get_ident())))
    fence.add_callback(last.set)
    await asyncio.wrap_future(threads.submit(fence.set))
    fence.set()
    await last.wait()
    here = threading.get_ident()
    assert seen == [(0, True, here), (1, True, here), (2, True, here)]


async def test_a_late_callback_runs_at_once(fence: ThreadFence) -> None:
    """Added to a settled fence, a callback has run when add_callback returns."""
    fence.fail(OSError())
    seen: list[bool] = []
    fence.add_callback(lambda: seen.append(True))
    assert seen == [True]


async def test_a_callback_that_raises_robs_nobody(fence: ThreadFence) -> None:
    """The callbacks behind a raising one still run, and the loop hears of the error."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    last = asyncio.Event()
    fence.add_callback(lambda: 1 // 0)
    fence.add_callback(last.set)
    fence.set()
    await last.wait()
    assert [type(context["exception"]) for context in heard] == [ZeroDivisionError]


async def test_cancelling_a_waiter_leaves_the_fence_and_its_neighbours(fence: ThreadFence) -> None:
    """A wait that is cancelled, natively, by a scope or by a timeout, ends alone."""
    neighbour = asyncio.create_task(fence.wait())
    native = asyncio.create_task(fence.wait())
    await asyncio.sleep(0)
    native.cancel()
    with pytest.raises(asyncio.CancelledError):
        await native
    with anyio.move_on_after(0) as scope:
        await fence.wait()
    assert scope.cancelled_caught
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await fence.wait()
    assert not fence.passed()
    assert not neighbour.done()
    fence.set()
    await neighbour


async def test_waiters_that_gave_up_are_forgotten(fence: ThreadFence) -> None:
    """A fence that stays open does not grow with the waits that ended by a cancel."""
    for _ in range(100):
        with anyio.move_on_after(0):
            await fence.wait()
    assert not fence._callbacks


async def test_a_fence_may_be_set_after_its_loop() -> None:
    """Setting a fence whose loop is closed wakes threads and is no error."""
    loop = asyncio.new_event_loop()
    fence = ThreadFence(loop)
    fence.add_callback(lambda: None)
    loop.close()
    fence.set()
    fence.block()


@pytest.mark.parametrize("error", [None, "oops", ValueError])
async def test_a_failure_without_an_exception_is_still_one(fence: ThreadFence, error: object) -> None:
    """Failing with what is no exception fails all the same, and says what was given."""
    fence.fail(error)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="failed with"):
        fence.block()
