"""CopyQueue: the copies of one direction, each started behind its fences without a thread that waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from ._fence import Places, ThreadFence, parts
from ._progress import LayerFence
from ._threads import DaemonThreads
from .abc import Fence
from .errors import ClosedError


class QueuedCopy(Protocol):
    """A copy that a queue starts.

    Attributes:
        awaited: the fences that must have passed before it may start.
    """

    awaited: Sequence[Fence]

    def run(self) -> None:
        """Copy, in a worker thread; never raises. Every fence in ``awaited`` has passed."""
        ...

    def fail(self, error: BaseException) -> None:
        """Give up a copy that has not started. Any thread."""
        ...


class CopyQueue(Places):
    """The copies of one direction: in the order of submit, one at a time, no worker held while waiting.

    A copy waits here for the fences before it. Only the first may start, so one thread is enough to
    wait for fences that cannot call back: what a later copy waits for cannot matter earlier.

    Args:
        threads: where the copies run.
        name: of the queue and of the thread that waits for foreign fences.
    """

    def __init__(self, threads: Executor, name: str) -> None:
        super().__init__()
        self._threads = threads
        self._name = name
        self._waiter = DaemonThreads(1, f"hicache-fence-{name}")
        self._lock = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._is_running = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {len(self._queue)} waiting>"

    def submit(self, copy: QueuedCopy) -> None:
        """Queue ``copy``; it starts in a worker, never here.

        Raises: ClosedError: the queue was closed.
        """
        awaited = [part for fence in copy.awaited for part in parts(fence) if not part.passed()]
        entry = _Entry(copy, len(awaited))
        with self._lock:
            if self._is_closed:
                raise ClosedError("the device is closed; it copies nothing any more")
            self._queue.append(entry)
        for fence in awaited:
            if isinstance(fence, ThreadFence):
                fence.add_callback(lambda: self._arrived(entry))
            elif isinstance(fence, LayerFence):
                fence.when_settled(lambda: self._arrived(entry))
            else:
                self._waiter.submit(fence.block).add_done_callback(lambda _: self._arrived(entry))
        self._start_next()

    def close(self, error: BaseException) -> None:
        """Refuse copies, and fail those that have not started."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._queue)
            self._queue.clear()
        self._waiter.shutdown()
        for entry in dropped:
            entry.copy.fail(error)

    def _arrived(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_awaited -= 1
        self._start_next()

    def _start_next(self) -> None:
        with self._lock:
            if self._is_running or not self._queue or self._queue[0].num_awaited:
                return
            self._is_running = True
        try:
            self._threads.submit(self._run_next).add_done_callback(self._close_if_cancelled)
        except RuntimeError as shut_down:
            self.close(shut_down)

    def _run_next(self) -> None:
        with self._lock:
            entry = self._queue.popleft() if self._queue else None
        if entry is not None:
            entry.copy.run()
            del entry  # its tensors are not this thread's to keep while the next one is found
        with self._lock:
            self._is_running = False
        self._start_next()

    def _close_if_cancelled(self, job: Future[None]) -> None:
        if job.cancelled():
            self.close(ClosedError("the executor was shut down before this copy started"))


class _Entry:
    """A queued copy and how many fences it still waits for."""

    __slots__ = ("copy", "num_awaited")

    def __init__(self, copy: QueuedCopy, num_awaited: int) -> None:
        self.copy = copy
        self.num_awaited = num_awaited
