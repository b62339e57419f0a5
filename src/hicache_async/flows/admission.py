"""Admission: how many prefetches are served at once, and who is next."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from typing import Protocol

MAX_PER_TURN = 8
"""How many are admitted in one turn of the loop: each starts a store call, for some fifty microseconds."""
FEW = 64
"""So many that have gone are not worth sweeping out."""


class Candidate(Protocol):
    """Who waits for a slot.

    Attributes:
        priority: higher is served first.
        is_large: whether it may hold a slot for long; does not change while it waits or holds one.
        has_begun: whether it goes on with what it began; such a one is served before those who begin.
        waits: whether it is still in the queue; it stands there once at a time.
    """

    priority: int
    is_large: bool

    @property
    def has_begun(self) -> bool: ...
    @property
    def waits(self) -> bool: ...

    def admitted(self) -> None:
        """Take over a slot, to be given back with :meth:`Admission.give_back`. Never raises."""
        ...


class Line:
    """Candidates by priority, those who have begun before those who begin, and then in order of arrival.

    Attributes:
        num_waiting: how many wait.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, bool], deque[Candidate]] = {}
        self._order: list[tuple[int, bool]] = []
        """The keys of the queues, the last one first."""
        self.num_waiting = 0
        self._num_standing = 0

    def append(self, candidate: Candidate) -> None:
        """Let it stand at the end of its queue."""
        rank = (candidate.priority, candidate.has_begun)
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = deque()
            insort(self._order, rank)
        queue.append(candidate)
        self.num_waiting += 1
        self._num_standing += 1

    def left(self) -> None:
        """Take note that one of them waits no more."""
        self.num_waiting -= 1
        if self._num_standing > 2 * self.num_waiting + FEW:
            self._sweep()

    def head(self) -> tuple[int, bool] | None:
        """Return the rank of who is next; None: nobody waits."""
        if not self.num_waiting:
            return None
        while self._order:
            rank = self._order[-1]
            queue = self._queues[rank]
            while queue and not queue[0].waits:
                queue.popleft()
                self._num_standing -= 1
            if queue:
                return rank
            del self._queues[rank]
            self._order.pop()
        return None

    def pop(self) -> Candidate:
        """Take out who is next, of whom :meth:`head` has told."""
        self.num_waiting -= 1
        self._num_standing -= 1
        return self._queues[self._order[-1]].popleft()

    def _sweep(self) -> None:
        waiting = [candidate for rank in self._order for candidate in self._queues[rank] if candidate.waits]
        self._queues.clear()
        self._order = []
        self.num_waiting = self._num_standing = 0
        for candidate in waiting:
            self.append(candidate)


class Admission:
    """A bounded number of slots, given by priority and then in order of arrival.

    Large candidates never hold the last quarter of the slots, and where both wait they take turns: so neither
    is stuck behind the other. Nobody is admitted in the call that lets it in, so whatever happens in one turn
    is seen by the order; and only a few are in each turn, so ten thousand never hold up the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_slots: int) -> None:
        self._loop = loop
        self._num_free = num_slots
        self._num_free_for_large = num_slots - (-(-num_slots // 4) if num_slots > 1 else 0)
        self._small, self._large = Line(), Line()
        self._was_large = True
        self._is_posted = False

    def __len__(self) -> int:
        return self._small.num_waiting + self._large.num_waiting

    def _line(self, candidate: Candidate) -> Line:
        return self._large if candidate.is_large else self._small

    def enter(self, candidate: Candidate) -> None:
        """Let it wait for a slot; the turn after this one is the first in which it can get one."""
        self._line(candidate).append(candidate)
        if self._num_free:
            self._post()

    def left(self, candidate: Candidate) -> None:
        """Take note that it waits no more."""
        self._line(candidate).left()

    def give_back(self, *, is_large: bool) -> None:
        """Give a slot back."""
        self._num_free += 1
        self._num_free_for_large += is_large
        if self._small.num_waiting or self._large.num_waiting:
            self._post()

    def _post(self) -> None:
        if not self._is_posted:
            self._is_posted = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        self._is_posted = False
        for _ in range(MAX_PER_TURN):
            line = self._next_line() if self._num_free else None
            if line is None:
                return
            self._num_free -= 1
            self._num_free_for_large -= line is self._large
            line.pop().admitted()
        if self._num_free and len(self):
            self._post()

    def _next_line(self) -> Line | None:
        small = self._small.head()
        large = self._large.head() if self._num_free_for_large else None
        if small is None or large is None:
            return self._small if small is not None else self._large if large is not None else None
        if small == large:
            self._was_large = not self._was_large
            return self._large if self._was_large else self._small
        return self._small if small > large else self._large
