"""Daemon worker threads: an Executor whose hung jobs keep neither close nor the interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from .errors import WrongLoopError

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Run jobs on daemon threads, started when needed, at most ``max_workers``.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter exits, so one
    read that hangs would keep the process for ever. These threads are simply left behind.

    Ownership: whoever makes it shuts it down. Jobs that wait at shutdown are cancelled. In a forked child
        there are no threads: one that had started some takes no job there, one that had not starts its own.
    """

    def __init__(self, max_workers: int, name: str = "hicache") -> None:
        self._max_workers = max_workers
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._workers = 0
        self._pid = 0
        self._unfinished: set[Future[Any]] = set()
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn`` and return its future.

        Raises: RuntimeError: the executor was shut down. WrongLoopError: its threads are another process's.
        """
        self._check_process()
        future: Future[T] = Future()
        with self._lock:
            if self._shut:
                raise RuntimeError(f"threads {self._name!r} were shut down")
            # Decided from what was submitted, not from what the threads say of themselves: one that has
            # taken a job but not yet said so would pass for idle, and the next job would wait behind it.
            if self._workers <= len(self._unfinished) and self._workers < self._max_workers:
                self._pid = os.getpid()
                name = f"{self._name}-{self._workers + 1}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._workers += 1
            self._unfinished.add(future)
            self._jobs.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def _check_process(self) -> None:
        # Before the lock: in a forked child nobody may be left to let it go.
        if self._workers:
            check_process(self._pid, f"the executor {self._name!r}", "make one of its own")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # a finished job must not keep its buffers alive while the thread idles

    def _run(self, future: Future[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            self._forget(future)
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - a future carries whatever its job raised
            self._forget(future)
            future.set_exception(error)
            del future, call  # the traceback holds this frame: a cycle would keep the job's buffers alive
        else:
            self._forget(future)
            future.set_result(result)

    def _forget(self, future: Future[T]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Refuse new jobs, cancel the waiting ones and let idle threads end. Never waits.

        In a forked child it does nothing: the threads are its parent's.

        Args:
            wait: accepted for the Executor interface; a hung thread is not waited for.
            cancel_futures: whether jobs that have not started are cancelled.
        """
        if self._workers and self._pid != os.getpid():
            return
        with self._lock:
            if self._shut:
                return
            self._shut = True
            unfinished = list(self._unfinished) if cancel_futures else []
            for _ in range(self._workers):
                self._jobs.put(None)
        for future in unfinished:
            future.cancel()  # does nothing to one that runs


def post_to_loop(post: Callable[..., object], *args: object) -> None:
    """Run ``loop.call_soon_threadsafe`` from a thread; a loop that is gone is not an error.

    With its loop closed nobody can be told any more; the pages go with the arena.

    Args:
        post: the bound method, or a closure that calls it.
        args: what it is called with.
    """
    with contextlib.suppress(RuntimeError):
        post(*args)


def check_process(pid: int, what: str, remedy: str) -> None:
    """Refuse in a forked child what belongs to its parent, whose threads and loop the child does not have.

    Args:
        pid: the process that made it.
        what, remedy: for the message: what is used, and what to do in the child.
    Raises: WrongLoopError: this is another process.
    """
    if (here := os.getpid()) != pid:
        raise WrongLoopError(f"{what} belongs to process {pid}, this is its fork {here}: {remedy} here")
