"""Lines: what waits to be queued in one direction, so that no copy queues behind what others wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from .._copy_queue import CopyQueue
from .._threads import DaemonThreads
from .fences import CudaFence, StreamOrder
from .runtime import Runtime, Stream

MAX_LINES = 4
"""Lines of one direction for copies that wait for the engine; with more streams than that some share one."""

_NUM_TRIES = 64
"""Twice as many streams as torch has of a kind."""


class OwnStreams:
    """Streams that no line shares with another one, nor with the engine.

    They are given out in turn from a few, so any may be the engine's, or that of another line.
    """

    def __init__(self, runtime: Runtime, *, taken: Stream) -> None:
        self._runtime = runtime
        self._taken = {runtime.key(taken)}

    def take(self) -> tuple[Stream, Hashable]:
        """Return a stream and what it is known by; one that is in use, should there be no other."""
        for _ in range(_NUM_TRIES):
            stream = self._runtime.new_stream()
            key = self._runtime.key(stream)
            if key not in self._taken:
                self._taken.add(key)
                break
        return stream, key


class Line:
    """A stream, a thread that queues on it, what waits to be queued, and the copies that are not over.

    The thread is its own: a stream takes so many calls and no more, and then a call waits until it goes on.
    """

    def __init__(self, name: str, streams: OwnStreams) -> None:
        self.stream, key = streams.take()
        self.order = StreamOrder(key)
        self._threads = DaemonThreads(1, "hicache-submit")
        self.queue = CopyQueue(self._threads, name)
        self._ends: deque[CudaFence] = deque()

    def under_way(self, end: CudaFence) -> None:
        """Remember a copy by its last fence until it is over."""
        self.forget_passed()
        self._ends.append(end)

    def forget_passed(self) -> None:
        """Forget the copies that are over, and with them the memory that they kept."""
        while self._ends and self._ends[0].passed():
            self._ends.popleft()

    @property
    def is_idle(self) -> bool:
        """Whether every copy is over. Each is asked: those that were never queued fail before those that were."""
        return all(end.passed() for end in self._ends)

    def close(self, error: BaseException) -> None:
        """Fail what is not queued and let go of the thread."""
        self.queue.close(error)
        self._threads.shutdown()


class Direction:
    """The lines of one direction: of copies that wait for nothing, and of those that wait for the same streams."""

    def __init__(self, name: str, streams: OwnStreams) -> None:
        self.name = name
        self._streams = streams
        self._behind: dict[Hashable, Line] = {}
        self.at_once = Line(name, streams)

    def line_for(self, waits_for: Hashable) -> Line:
        """Return the line of copies that wait for ``waits_for``; None: they wait for nothing."""
        if waits_for is None:
            return self.at_once
        if (line := self._behind.get(waits_for)) is not None:
            return line
        if len(self._behind) < MAX_LINES:
            line = Line(f"{self.name} behind the engine", self._streams)
        else:  # that of a stream of old, at best one behind which nothing waits any more
            idle = (known for known, line in self._behind.items() if line.is_idle)
            line = self._behind.pop(next(idle, next(iter(self._behind))))
        self._behind[waits_for] = line
        return line

    def forget_passed(self) -> None:
        """Forget the copies that are over."""
        for line in self._lines():
            line.forget_passed()

    @property
    def is_idle(self) -> bool:
        """Whether every copy is over."""
        return all(line.is_idle for line in self._lines())

    def close(self, error: BaseException) -> None:
        """Fail what is not queued and let go of the threads."""
        for line in self._lines():
            line.close(error)

    def _lines(self) -> list[Line]:
        return [self.at_once, *self._behind.values()]
