"""ManualThreads and ManualClock move only when they are told to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from hicache_async.abc import Clock
from hicache_async.testing.manual import ManualClock, ManualThreads


def test_a_job_waits_until_it_is_run() -> None:
    """A submitted job has not started before run_next, and then runs in the caller's thread."""
    threads = ManualThreads()
    job = threads.submit(threading.get_ident)
    assert threads.pending == 1
    assert not job.running()
    assert not job.done()
    threads.run_next()
    assert job.result(0) == threading.get_ident()
    assert threads.pending == 0


def test_jobs_run_in_the_order_of_submit() -> None:
    """run_next takes the oldest job and one only."""
    threads = ManualThreads()
    ran: list[int] = []
    for number in range(3):
        threads.submit(ran.append, number)
    threads.run_next()
    assert ran == [0]
    assert threads.run_all() == 2
    assert ran == [0, 1, 2]


def test_run_all_runs_what_jobs_submit() -> None:
    """A job submitted by a job runs in the same run_all and is counted."""
    threads = ManualThreads()
    inner: list[Future[int]] = []
    threads.submit(lambda: inner.append(threads.submit(abs, -1)))
    assert threads.run_all() == 2
    assert inner[0].result(0) == 1
    assert threads.run_all() == 0


def test_an_error_goes_to_the_future() -> None:
    """What a job raises reaches its future and not the test that ran it."""
    threads = ManualThreads()
    job = threads.submit(int, "x", base=10)
    threads.run_next()
    assert isinstance(job.exception(0), ValueError)


def test_running_without_a_job_is_an_error() -> None:
    """run_next says so when nothing waits, also when all that waits was cancelled."""
    threads = ManualThreads()
    with pytest.raises(LookupError, match="no job waits"):
        threads.run_next()
    threads.submit(abs, -1).cancel()
    with pytest.raises(LookupError, match="no job waits"):
        threads.run_next()


def test_a_cancelled_job_is_skipped() -> None:
    """A future cancelled before its turn counts no more, and run_next goes on to the one behind."""
    threads = ManualThreads()
    cancelled, kept = threads.submit(abs, -1), threads.submit(abs, -2)
    assert cancelled.cancel()
    assert threads.pending == 1
    threads.run_next()
    assert kept.result(0) == 2


def test_shutdown_refuses_and_cancels() -> None:
    """After shutdown nothing can be submitted and what waited is cancelled, unless kept."""
    threads = ManualThreads()
    job = threads.submit(abs, -1)
    threads.shutdown(cancel_futures=False)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(abs, -1)
    assert threads.pending == 1
    threads.shutdown()
    with pytest.raises(CancelledError):
        job.result(0)
    assert threads.pending == 0


def test_time_stands_still_until_advanced() -> None:
    """monotonic moves by what it is advanced and by nothing else."""
    clock: Clock = ManualClock(start_s=100.0)
    assert clock.monotonic() == 100.0
    assert isinstance(clock, ManualClock)
    clock.advance(0.25)
    clock.advance(0)
    assert clock.monotonic() == 100.25


def test_timers_fire_when_due() -> None:
    """A timer fires at its due time, not before, once, and sees that time on the clock."""
    clock = ManualClock()
    fired: list[float] = []
    clock.call_later(2.0, lambda: fired.append(clock.monotonic()))
    clock.advance(1.5)
    assert (fired, clock.pending) == ([], 1)
    clock.advance(1.5)
    assert (fired, clock.pending) == ([2.0], 0)
    clock.advance(10)
    assert fired == [2.0]


def test_timers_fire_in_order() -> None:
    """The earlier due time goes first; with equal ones, the earlier call_later."""
    clock = ManualClock()
    fired: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: fired.append(name)

    for delay_s, name in [(3.0, "c"), (1.0, "a"), (3.0, "d"), (2.0, "b")]:
        clock.call_later(delay_s, note(name))
    clock.advance(3.0)
    assert fired == ["a", "b", "c", "d"]


def test_a_timer_may_start_another() -> None:
    """One that falls due within the same advance fires in it, a later one does not."""
    clock = ManualClock()
    fired: list[float] = []

    def tick() -> None:
        fired.append(clock.monotonic())
        clock.call_later(1.0, tick)

    clock.call_later(1.0, tick)
    clock.advance(3.5)
    assert fired == [1.0, 2.0, 3.0]
    assert clock.monotonic() == 3.5
    assert clock.pending == 1


def test_a_delay_of_nothing_still_waits_for_advance() -> None:
    """With no delay, or one in the past, the callback runs in the next advance and not at once."""
    clock = ManualClock()
    fired: list[str] = []
    clock.call_later(0, lambda: fired.append("now"))
    clock.call_later(-5, lambda: fired.append("past"))
    assert fired == []
    clock.advance(0)
    assert fired == ["now", "past"]
    assert clock.monotonic() == 0


def test_a_cancelled_timer_never_fires() -> None:
    """cancel stops a timer, also from the callback before it; after it fired it does nothing."""
    clock = ManualClock()
    fired: list[str] = []
    second = clock.call_later(2.0, lambda: fired.append("second"))
    first = clock.call_later(1.0, second.cancel)
    clock.advance(5.0)
    first.cancel()
    assert fired == []
    assert clock.pending == 0


@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
def test_time_only_moves_forward(seconds: float) -> None:
    """advance refuses what is negative or not finite."""
    with pytest.raises(ValueError, match="finite number >= 0"):
        ManualClock().advance(seconds)
