"""DaemonThreads: jobs run, hang and are abandoned without keeping anybody."""

from __future__ import annotations

import asyncio
import gc
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from hicache_async._threads import DaemonThreads, post_to_loop

LIMIT_S = 20
"""Longest wait for something that has to happen; never reached by a test that passes."""


class Buffer:
    """Something that a weak reference can watch."""


@pytest.fixture
def make_threads() -> Iterator[Callable[[int], DaemonThreads]]:
    """Return a factory of executors that are shut down at the end."""
    made: list[DaemonThreads] = []

    def make(max_workers: int) -> DaemonThreads:
        made.append(DaemonThreads(max_workers, name="test"))
        return made[-1]

    yield make
    for threads in made:
        threads.shutdown()


def test_future_carries_result_and_error(make_threads: Callable[[int], DaemonThreads]) -> None:
    """A job's return value and its exception both reach the future."""
    threads = make_threads(1)
    assert threads.submit(divmod, 7, 2).result(LIMIT_S) == (3, 1)
    assert threads.submit(int, "11", base=2).result(LIMIT_S) == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(LIMIT_S)


def test_a_job_may_raise_what_is_not_an_exception(make_threads: Callable[[int], DaemonThreads]) -> None:
    """A SystemExit ends the job, not the thread: the next job runs."""
    threads = make_threads(1)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(LIMIT_S)
    assert threads.submit(abs, -1).result(LIMIT_S) == 1


def test_threads_are_daemons_and_reused(make_threads: Callable[[int], DaemonThreads]) -> None:
    """Jobs that follow one another run on one thread, and it is a daemon."""
    threads = make_threads(4)
    seen = {threads.submit(threading.current_thread).result(LIMIT_S) for _ in range(50)}
    assert len(seen) == 1
    assert all(thread.daemon for thread in seen)


def test_at_most_max_workers_run(make_threads: Callable[[int], DaemonThreads]) -> None:
    """With every thread busy a further job waits, and runs once one is free."""
    threads = make_threads(2)
    gate = threading.Event()
    started = threading.Semaphore(0)

    def busy() -> None:
        started.release()
        assert gate.wait(LIMIT_S)

    jobs = [threads.submit(busy) for _ in range(3)]
    assert started.acquire(timeout=LIMIT_S)
    assert started.acquire(timeout=LIMIT_S)
    assert not jobs[2].running()
    gate.set()
    for job in jobs:
        job.result(LIMIT_S)


def test_no_job_waits_behind_another_while_a_thread_may_start(
    make_threads: Callable[[int], DaemonThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has taken a job but is stopped before its first step does not pass for idle."""
    taken, go_on = threading.Event(), threading.Event()

    class StopsAfterGet(queue.SimpleQueue[object]):
        def get(self, block: bool = True, timeout: float | None = None) -> object:
            job = super().get(block, timeout)
            if not taken.is_set():
                taken.set()
                assert go_on.wait(LIMIT_S)
            return job

    monkeypatch.setattr(queue, "SimpleQueue", StopsAfterGet)
    threads = make_threads(2)
    first = threads.submit(abs, -1)
    assert taken.wait(LIMIT_S)
    assert threads.submit(abs, -2).result(LIMIT_S) == 2
    assert not first.done()
    go_on.set()
    assert first.result(LIMIT_S) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_thread_holds_no_buffer(make_threads: Callable[[int], DaemonThreads], fails: bool) -> None:
    """Once the caller lets go of a job's future, its arguments are gone without a collection."""
    threads = make_threads(1)
    buffer, gone = Buffer(), threading.Event()
    weakref.finalize(buffer, gone.set)

    def use(used: Buffer) -> None:
        if fails:
            raise OSError("unreadable")

    gc.disable()
    try:
        job = threads.submit(use, buffer)
        assert isinstance(job.exception(LIMIT_S), OSError) == fails
        del job, buffer
        assert gone.wait(LIMIT_S)
    finally:
        gc.enable()


def test_shutdown_refuses_cancels_and_ends(make_threads: Callable[[int], DaemonThreads]) -> None:
    """Shutdown refuses jobs, cancels the waiting, lets the running end, and the threads with them."""
    threads = make_threads(1)
    gate, started = threading.Event(), threading.Event()

    def run() -> threading.Thread:
        started.set()
        assert gate.wait(LIMIT_S)
        return threading.current_thread()

    running = threads.submit(run)
    assert started.wait(LIMIT_S)
    waiting = threads.submit(abs, -1)
    threads.shutdown()
    threads.shutdown()
    with pytest.raises(RuntimeError, match="'test' were shut down"):
        threads.submit(abs, -1)
    with pytest.raises(CancelledError):
        waiting.result(LIMIT_S)
    gate.set()
    thread = running.result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_shutdown_can_let_the_waiting_run(make_threads: Callable[[int], DaemonThreads]) -> None:
    """With ``cancel_futures=False`` what was submitted still runs, and then the threads end."""
    threads = make_threads(1)
    gate = threading.Event()
    threads.submit(gate.wait, LIMIT_S)
    last = threads.submit(threading.current_thread)
    threads.shutdown(cancel_futures=False)
    gate.set()
    thread = last.result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


HUNG = """
import os, threading
from hicache_async._threads import DaemonThreads

threads = DaemonThreads(2)
reader, writer = os.pipe()
started = threading.Barrier(3)

def hang(blocking_call, *args):
    started.wait()
    blocking_call(*args)

jobs = [threads.submit(hang, os.read, reader, 1), threads.submit(hang, threading.Event().wait)]
waiting = threads.submit(abs, -1)
started.wait()
threads.shutdown(wait=True)
assert all(job.running() for job in jobs)
assert waiting.cancelled()
print("closed")
"""


def test_a_hung_thread_keeps_neither_shutdown_nor_the_interpreter() -> None:
    """With two threads hung for ever, shutdown returns and the process exits with 0."""
    done = subprocess.run(
        [sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_posting_to_a_closed_loop_is_no_error(make_threads: Callable[[int], DaemonThreads]) -> None:
    """A thread that ends after its loop has nobody to tell, and does not fail over it."""
    loop = asyncio.new_event_loop()
    loop.close()
    make_threads(1).submit(post_to_loop, loop.call_soon_threadsafe, print).result(LIMIT_S)
