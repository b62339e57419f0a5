"""Threads and a clock that move only when a test says so."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ManualThreads(Executor):
    """An executor whose jobs wait until the test runs them, in its own thread and in order.

    Between submit and :meth:`run_next` is every moment at which a real thread might be late.

    Ownership: as with any executor, whoever makes it shuts it down.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._shut = False

    @property
    def pending(self) -> int:
        """How many jobs wait; a cancelled one does not."""
        return sum(not future.cancelled() for future, _ in self._jobs)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Put ``fn`` behind the jobs that wait and return its future.

        Raises: RuntimeError: the threads were shut down.
        """
        if self._shut:
            raise RuntimeError("the manual threads were shut down")
        future: Future[T] = Future()
        self._jobs.append((future, functools.partial(fn, *args, **kwargs)))
        return future

    def run_next(self) -> None:
        """Run the job that has waited longest; what it raises goes to its future.

        Raises: LookupError: no job waits.
        """
        while self._jobs:
            future, call = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - a future carries whatever its job raised
                future.set_exception(error)
            else:
                future.set_result(result)
            return
        raise LookupError("no job waits: nothing was submitted since the last one ran")

    def run_all(self) -> int:
        """Run jobs, those that jobs submit too, until none waits; returns how many ran."""
        for count in itertools.count():
            if not self.pending:
                return count
            self.run_next()
        raise AssertionError("unreachable")

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Refuse new jobs and cancel the waiting ones.

        Args:
            wait: accepted for the Executor interface; nothing runs by itself, so nothing is waited for.
            cancel_futures: whether the waiting jobs are cancelled, or left for the test to run.
        """
        self._shut = True
        if cancel_futures:
            for future, _ in self._jobs:
                future.cancel()


class ManualTimer:
    """A callback that a :class:`ManualClock` will run. Made by the clock only."""

    __slots__ = ("callback", "due_s", "live")

    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        self.callback = callback
        self.live = True

    def cancel(self) -> None:
        """Stop the timer; does nothing when it has fired."""
        self.live = False


class ManualClock:
    """A clock that stands still between two calls of :meth:`advance`. One thread only."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._sequence = itertools.count()

    @property
    def pending(self) -> int:
        """How many timers have neither fired nor been cancelled."""
        return sum(timer.live for _, _, timer in self._timers)

    def monotonic(self) -> float:
        """Return the seconds advanced so far, from ``start_s`` on."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        """Call ``callback`` when the clock has been advanced by ``delay_s``; never from in here."""
        timer = ManualTimer(self._now_s + max(delay_s, 0.0), callback)
        heapq.heappush(self._timers, (timer.due_s, next(self._sequence), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move time on and run what falls due, in order of due time and then of call_later.

        Each callback sees its own due time on the clock; a timer that it starts and that falls due
        within the same advance runs in it. What a callback raises ends the advance at that moment.

        Raises: ValueError: ``seconds`` is negative or not finite.
        """
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds is {seconds!r}; time moves on by a finite number >= 0")
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if timer.live:
                self._now_s = due_s
                timer.live = False
                timer.callback()
        self._now_s = end_s
