"""Deadlines: many moments behind one timer of the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from ..abc import Clock, TimerHandle

MAX_PER_TURN = 64
"""How many fall due in one turn of the loop: what each of them ends takes some ten microseconds."""
FEW = 64
"""So many cancelled ones are not worth sweeping out."""


class Timed(Protocol):
    """Who has a deadline."""

    def time_is_up(self) -> None:
        """Do what is to be done then."""
        ...


class Deadline(float):
    """One moment, in seconds of the clock; made by :meth:`Deadlines.add`.

    It is a number, so that a heap of them is kept in order without a call of Python for each comparison.

    Attributes:
        owner: who hears of it; None: it has fallen due or was cancelled.
    """

    __slots__ = ("owner",)

    owner: Timed | None


class Deadlines:
    """Call back when time is up, for any number of deadlines with one timer; none while there are none.

    Cancelled ones are swept out when they are the most, so that setting and cancelling cost the same
    however many there are.

    Args:
        on_bug: called with what an owner raises.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, on_bug: Callable[[BaseException], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._on_bug = on_bug
        self._heap: list[Deadline] = []
        self._num_live = 0
        self._timer: TimerHandle | None = None
        self._timer_due_s = 0.0

    def __len__(self) -> int:
        return self._num_live

    def add(self, delay_s: float, owner: Timed) -> Deadline:
        """Tell ``owner`` on the loop when ``delay_s`` are over, unless that is cancelled before."""
        deadline = Deadline(self._clock.monotonic() + delay_s)
        deadline.owner = owner
        heappush(self._heap, deadline)
        self._num_live += 1
        if self._timer is None or deadline < self._timer_due_s:
            self._set_timer()
        return deadline

    def cancel(self, deadline: Deadline | None) -> None:
        """Tell nobody; does nothing to None, or when it has fallen due."""
        if deadline is None or deadline.owner is None:
            return
        deadline.owner = None
        self._num_live -= 1
        if not self._num_live:
            self._heap.clear()
            self._stop_timer()
        elif len(self._heap) > 2 * self._num_live + FEW:
            self._heap = [deadline for deadline in self._heap if deadline.owner is not None]
            heapify(self._heap)

    def clear(self) -> None:
        """Tell nobody any more."""
        for deadline in self._heap:
            deadline.owner = None
        self._heap.clear()
        self._num_live = 0
        self._stop_timer()

    def _set_timer(self) -> None:
        self._stop_timer()
        self._timer_due_s = float(self._heap[0])
        self._timer = self._clock.call_later(self._timer_due_s - self._clock.monotonic(), self._fall_due)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fall_due(self) -> None:
        self._timer = None
        now_s = self._clock.monotonic()
        for _ in range(MAX_PER_TURN):
            if not self._heap or self._heap[0] > now_s:
                break
            self._tell(heappop(self._heap))
        if not self._heap:
            self._stop_timer()
        elif self._heap[0] <= now_s:
            self._stop_timer()
            self._timer_due_s, self._timer = now_s, self._loop.call_soon(self._fall_due)
        else:
            self._set_timer()

    def _tell(self, deadline: Deadline) -> None:
        owner, deadline.owner = deadline.owner, None
        if owner is None:
            return
        self._num_live -= 1
        try:
            owner.time_is_up()
        except Exception as bug:  # noqa: BLE001 - a mover's top level: a bug must not vanish in a callback
            self._on_bug(bug)
