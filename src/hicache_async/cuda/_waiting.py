"""WaitingEvents: who waits for which event, in the order in which the streams complete them. No loop, any thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

FEW_WAITERS = 64
"""So many that gave up are not worth sweeping out."""


class Event(Protocol):
    """What can be asked whether it has completed: torch.cuda.Event, and anything else with ``query()``."""

    def query(self) -> bool:
        """Return whether it has completed. Never blocks; any thread."""
        ...


class Waiter:
    """One that waits for one event; ``wanted`` until it gave up."""

    __slots__ = ("event", "reached", "sequence", "stream", "wanted")

    def __init__(self, event: Event, stream: Hashable, sequence: int, reached: asyncio.Future[None]) -> None:
        self.event = event
        self.stream = stream
        self.sequence = sequence
        self.reached = reached
        self.wanted = True


class Settled(NamedTuple):
    """A waiter whose event has completed, or could not be asked."""

    waiter: Waiter
    error: Exception | None


class WaitingEvents:
    """A queue of waiters for each stream. Only its head is asked: what lies behind completes later.

    Attributes:
        num_queries: how often an event was asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Hashable, deque[Waiter]] = {}
        self._num_given_up = 0
        self._num_waiters = 0
        self.num_queries = 0

    def __len__(self) -> int:
        """How many waiters there are, without those that gave up."""
        return self._num_waiters

    def add(self, waiter: Waiter) -> None:
        """Queue ``waiter``: behind those of its stream that have no higher sequence."""
        with self._lock:
            queue = self._queues.setdefault(waiter.stream, deque())
            index = len(queue)
            while index and queue[index - 1].sequence > waiter.sequence:
                index -= 1
            queue.insert(index, waiter)
            self._num_waiters += 1

    def is_behind(self, stream: Hashable, sequence: int) -> bool:
        """Return whether somebody waits for an event of ``stream`` that completes before ``sequence``."""
        with self._lock:
            queue = self._queues.get(stream)
            return queue is not None and queue[0].sequence <= sequence  # an empty queue is not kept

    def give_up(self, waiter: Waiter) -> None:
        """Take back a waiter; does nothing where it has been settled."""
        with self._lock:
            if not waiter.wanted:
                return
            waiter.wanted = False
            self._num_waiters -= 1
            self._num_given_up += 1
            if not self._num_waiters:
                self._queues.clear()
                self._num_given_up = 0
            elif self._num_given_up > self._num_waiters + FEW_WAITERS:
                self._sweep()

    def settle(self) -> list[Settled]:
        """Ask the head of every stream, and who comes next where it has completed; returns whose wait is over."""
        settled: list[Settled] = []
        with self._lock:
            for stream in tuple(self._queues):
                self._settle_stream(self._queues[stream], settled)
                if not self._queues[stream]:
                    del self._queues[stream]
            self._num_waiters -= len(settled)
        return settled

    def _settle_stream(self, queue: deque[Waiter], settled: list[Settled]) -> None:
        while queue:
            head, error = queue[0], None
            if head.wanted:
                self.num_queries += 1
                try:
                    if not head.event.query():
                        return
                except Exception as failure:  # noqa: BLE001 - a device that failed; who waits raises it
                    error = failure
                head.wanted = False
                settled.append(Settled(head, error))
            else:
                self._num_given_up -= 1
            queue.popleft()

    def _sweep(self) -> None:
        for stream, queue in tuple(self._queues.items()):
            wanted = deque(waiter for waiter in queue if waiter.wanted)
            if wanted:
                self._queues[stream] = wanted
            else:
                del self._queues[stream]
        self._num_given_up = 0
