"""WaitingEvents: who waits for which event, in the order in which the streams complete them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Protocol

FEW_WAITERS = 64
"""So many that gave up are not worth sweeping out."""


class Event(Protocol):
    """What can be asked whether it has completed: torch.cuda.Event, and anything else with ``query()``."""

    def query(self) -> bool:
        """Return whether it has completed. Never blocks; any thread."""
        ...


Waiter = tuple[int, Event, asyncio.Future[None]]
"""The place of an event on its stream, the event, and what is resolved when it has completed; done before: given up."""


class WaitingEvents:
    """A queue of waiters for each stream. Only its head is asked: what lies behind completes later.

    Of one thread, but for :meth:`has_completed`.

    Attributes:
        num_queries: how often that thread asked an event.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Waiter]] = {}
        self._num_given_up = 0
        self._num_waiters = 0
        self.num_queries = 0

    def __len__(self) -> int:
        """How many waiters there are, without those that gave up."""
        return self._num_waiters

    def add(self, stream: Hashable, sequence: int, event: Event, reached: asyncio.Future[None]) -> None:
        """Queue a waiter: behind those of its stream that have no higher sequence."""
        self._num_waiters += 1
        waiter = sequence, event, reached
        queue = self._queues.get(stream)
        if queue is None:
            self._queues[stream] = deque((waiter,))
            return
        if queue[-1][0] <= sequence:
            queue.append(waiter)
            return
        index = len(queue) - 1
        while index and queue[index - 1][0] > sequence:
            index -= 1
        queue.insert(index, waiter)

    def is_behind(self, stream: Hashable, sequence: int) -> bool:
        """Return whether somebody waits for an event of ``stream`` that completes before ``sequence``."""
        queue = self._queues.get(stream)
        return queue is not None and queue[0][0] <= sequence  # an empty queue is not kept

    def gave_up(self) -> None:
        """Take note that a waiter was cancelled. A device that hangs must not collect them."""
        self._num_waiters -= 1
        self._num_given_up += 1
        if not self._num_waiters:
            self._queues.clear()
            self._num_given_up = 0
        elif self._num_given_up > self._num_waiters + FEW_WAITERS:
            self._sweep()

    def has_completed(self) -> bool:
        """Return whether there is something to settle. Any thread."""
        for queue in self._queues.copy().values():
            try:
                _, event, reached = queue[0]
            except IndexError:  # the other thread has just settled it
                continue
            try:
                if reached.done() or event.query():
                    return True
            except Exception:  # noqa: BLE001 - a device that failed; who settles it says so
                return True
        return False

    def settle(self) -> int:
        """Ask the head of every stream, and who comes next where it has completed; returns whose waits are over."""
        num_before = self._num_waiters
        for stream, queue in tuple(self._queues.items()):
            self._settle_stream(queue)
            if not queue:
                del self._queues[stream]
        return num_before - self._num_waiters

    def _settle_stream(self, queue: deque[Waiter]) -> None:
        while queue:
            _, event, reached = queue[0]
            if reached.done():
                self._num_given_up -= 1  # before or after it takes note of that itself
            else:
                self.num_queries += 1
                try:
                    if not event.query():
                        return
                except Exception as failure:  # noqa: BLE001 - a device that failed; who waits raises it
                    reached.set_exception(failure)
                else:
                    reached.set_result(None)
                self._num_waiters -= 1
            queue.popleft()

    def _sweep(self) -> None:
        for stream, queue in tuple(self._queues.items()):
            wanted = deque(waiter for waiter in queue if not waiter[2].done())
            if wanted:
                self._queues[stream] = wanted
            else:
                del self._queues[stream]
        self._num_given_up = 0
