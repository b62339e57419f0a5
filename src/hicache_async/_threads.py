"""Daemon worker threads: an Executor whose hung jobs keep neither close nor the interpreter."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = Callable[[], None]


class DaemonThreads(Executor):
    """Run jobs on daemon threads, started when needed, at most ``max_workers``.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter exits, so one
    read that hangs would keep the process for ever. These threads are simply left behind.

    Ownership: whoever makes it shuts it down. Jobs that wait at shutdown are cancelled.
    """

    def __init__(self, max_workers: int, name: str = "hicache") -> None:
        self._max_workers = max_workers
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = 0
        self._idle = 0
        self._waiting: set[Future[object]] = set()
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn`` and return its future.

        Raises: RuntimeError: the executor was shut down.
        """
        future: Future[T] = Future()

        def job() -> None:
            with self._lock:
                self._waiting.discard(future)  # type: ignore[arg-type]
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - a future carries whatever its job raised
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._shut:
                raise RuntimeError(f"threads {self._name!r} were shut down")
            self._waiting.add(future)  # type: ignore[arg-type]
            self._jobs.put(job)
            if self._idle < self._jobs.qsize() and self._workers < self._max_workers:
                self._workers += 1
                name = f"{self._name}-{self._workers}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                if job is None:
                    self._workers -= 1
                    return
            job()
            del job  # a finished job must not keep its buffers alive while the thread idles

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Refuse new jobs, cancel the waiting ones and let idle threads end. Never waits.

        Args:
            wait: accepted for the Executor interface; a hung thread is not waited for.
            cancel_futures: whether jobs that have not started are cancelled.
        """
        with self._lock:
            if self._shut:
                return
            self._shut = True
            waiting = list(self._waiting) if cancel_futures else []
            for _ in range(self._workers):
                self._jobs.put(None)
        for future in waiting:
            future.cancel()


def post_to_loop(post: Callable[[], object]) -> None:
    """Run ``loop.call_soon_threadsafe(...)`` from a thread; a loop that is gone is not an error.

    With its loop closed nobody can be told any more; the pages go with the arena.
    """
    with contextlib.suppress(RuntimeError):
        post()
