"""Lanes: where the calls of a store become a few thread jobs, and each call keeps its own count and stop.

A *call* is one read(), write() or lookup: items 0, 1, 2 ... done in that order. A *run* is a piece of one
call; a *job* is a list of runs of different calls that one thread does in one hop. A stopped or bad run
ends alone, its neighbours in the job go on, and each run is reported as the thread passes it.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextvars import copy_context
from itertools import islice
from typing import NamedTuple

from aiofiles.ospath import wrap

from .._threads import post_to_loop
from ..errors import StoreUnavailable
from ..types import StopToken

FEW_CALLS = 64
"""So many that were cancelled while they waited are not worth sweeping out."""

RUNS_PER_CALL = 2
"""Runs of one call under way at once: what a stopped call may still touch is this many items."""


class Kind(enum.Enum):
    """What a call does, in order of rank."""

    READ = "read"
    WRITE = "write"
    LOOKUP = "lookup"
    WALK = "walk"
    """Looks at many objects that nobody waits for."""


class JobLimit(NamedTuple):
    """When a job is full: large enough to make its hop cheap, and done in a few milliseconds.

    A hop costs as much as moving 1 to 2 MiB does: behind a stream of bytes the loop starts with cold caches.
    """

    num_items: int
    nbytes: int


JOB_LIMITS = {
    Kind.READ: JobLimit(256, 64 << 20),
    Kind.WRITE: JobLimit(256, 32 << 20),  # mostly has one lane, which idles between two jobs
    Kind.LOOKUP: JobLimit(4096, sys.maxsize),
    Kind.WALK: JobLimit(1, sys.maxsize),
}


MIN_SHARE_NBYTES = 16 << 20
"""What a read job takes at least before further lanes are given a share: below it, a hop and two threads that
take the interpreter from each other at every small object cost more than the second lane brings."""


class Call:
    """One read, write or lookup under way. The loop owns its fields; threads read ``stop`` and ``wanted``.

    Args:
        perform: does one item in a thread; returns None, or why the call's count ends before it.
        stop: asks the call to end; bracketed from submit until no thread is in the call any more.
        item_nbytes: bytes of one item.
        finish: does what is cheaper for many items at once, in the same thread, with those of a run that
            went well, before they are reported; none of them is good where it raises.

    Attributes:
        context: of who called, in which the items are done.
        wanted: items below it are good or still worth doing; ends as the count.
        fault, error: what ``perform`` said or raised at the first bad item.
    """

    __slots__ = (
        "context",
        "error",
        "fault",
        "finish",
        "item_nbytes",
        "kind",
        "next",
        "perform",
        "runs",
        "settled",
        "stop",
        "wanted",
    )

    def __init__(
        self,
        kind: Kind,
        num_items: int,
        perform: Callable[[int], str | None],
        stop: StopToken,
        item_nbytes: int = 0,
        finish: Callable[[range], None] | None = None,
    ) -> None:
        self.kind = kind
        self.finish = finish
        self.context = copy_context()
        self.perform = perform
        self.stop = stop
        self.item_nbytes = max(1, item_nbytes)
        self.wanted = num_items
        self.next = 0
        self.runs = 0
        self.fault: str | None = None
        self.error: BaseException | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def count(self) -> int:
        """How many items are good, consecutive from 0; final once the call is over."""
        return min(self.wanted, self.next)

    @property
    def has_more(self) -> bool:
        """Whether items wait to be handed to a thread."""
        return self.next < self.wanted and not self.stop.stopped

    @property
    def over(self) -> bool:
        """Whether no thread is in this call and none will be."""
        return self.runs == 0 and not self.has_more


class Run:
    """Items ``first`` to ``end`` of one call, done by one thread; ``good`` of them went well."""

    __slots__ = ("call", "context", "end", "error", "fault", "first", "good", "job")

    def __init__(self, job: Job, call: Call, num_items: int) -> None:
        self.job = job
        self.call = call
        self.context = call.context.copy()  # two runs of a call may be done at once
        self.first = call.next
        self.end = call.next + num_items
        self.good = 0
        self.fault: str | None = None
        self.error: BaseException | None = None

    def perform(self) -> None:
        """Do the items and finish those that went well, in a thread."""
        self._perform_items()
        if self.call.finish is not None and self.good:
            try:
                self.call.finish(range(self.first, self.first + self.good))
            except BaseException as error:  # noqa: BLE001 - a thread's top level: its call raises it
                self.good, self.fault, self.error = 0, None, error

    def _perform_items(self) -> None:
        """Do the items in order until one is bad, unwanted or the call is stopped."""
        call = self.call
        for item in range(self.first, self.end):
            if call.stop.stopped or item >= call.wanted:
                return
            try:
                self.fault = call.perform(item)
            except BaseException as error:  # noqa: BLE001 - a thread's top level: its call raises it
                self.error = error
                return
            if self.fault is not None:
                return
            self.good += 1


class Job:
    """What one thread does in one hop. Whoever claims it, thread or loop, reports its runs."""

    __slots__ = ("_claim", "runs", "unreported")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.unreported = 0
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Return True to the first caller only."""
        return self._claim.acquire(blocking=False)


class Lanes:
    """Share a few threads among many calls. Everything runs on the loop except what ``Run`` does.

    Calls of one kind are served by the priority of their stop tokens, which may rise while they wait; equal
    ones in turn, one run each, in order of arrival. Reads outrank writes;
    writes never hold the last lane, and where there is one only, they take it when no read waits.
    Lookups are outside the lanes, one job at a time, and so are walks, one item at a time: ``threads``
    should have ``num_lanes + 2`` workers.

    Args:
        threads: runs the jobs; not shut down here.
        num_lanes: how many read and write jobs run at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: Executor, num_lanes: int) -> None:
        self._loop = loop
        self._threads = threads
        self._num_lanes = num_lanes
        self._ready: dict[Kind, deque[Call]] = {kind: deque() for kind in Kind}
        self._live: set[Call] = set()
        self._jobs: dict[Kind, set[Job]] = {kind: set() for kind in Kind}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports: deque[Run] = deque()
        self._collect_posted = False
        self._dispatch_posted = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no call is taken any more."""
        return self._closed

    async def run(self, call: Call) -> None:
        """Hand ``call`` to the threads and return when it is over.

        Raises: StoreUnavailable: the lanes were closed; else what ``perform`` raised is in the call.
        Cancellation: ends the wait at once and stops the call; its token tells when threads have left it.
        """
        self.submit(call)
        try:
            await call.settled
        except asyncio.CancelledError:
            call.stop.stop()
            self._settle_if_over(call)
            self._sweep(call.kind)
            raise

    def submit(self, call: Call) -> None:
        """Hand ``call`` to the threads; ``call.settled`` tells when it is over.

        Raises: StoreUnavailable: the lanes were closed.
        """
        if self._closed:
            raise StoreUnavailable("the store was closed; open another one")
        call.stop.job_started()
        self._live.add(call)
        self._ready[call.kind].append(call)
        if not self._dispatch_posted:
            self._dispatch_posted = True
            self._loop.call_soon(self._dispatch)  # calls made in the same turn share jobs

    def close(self) -> None:
        """Refuse new calls and stop the running ones, without waiting for any thread.

        A read or lookup ends at once with StoreUnavailable, its token busy while a thread is in it.
        A write has no token to say that with: it returns when its thread has left it.
        """
        self._closed = True
        for call in tuple(self._live):
            call.stop.stop()
            if call.kind is not Kind.WRITE and not call.settled.done():
                call.settled.set_exception(StoreUnavailable("the store was closed while the call ran"))
            self._settle_if_over(call)

    # -- the loop hands out

    def _dispatch(self) -> None:
        self._dispatch_posted = False
        for kind in Kind:
            while self._has_lane(kind) and (job := self._assemble(kind)).runs:
                self._start(kind, job)

    def _has_lane(self, kind: Kind) -> bool:
        if kind in (Kind.LOOKUP, Kind.WALK):
            return not self._jobs[kind]
        num_writes = len(self._jobs[Kind.WRITE])
        if len(self._jobs[Kind.READ]) + num_writes >= self._num_lanes:
            return False
        return kind is Kind.READ or num_writes < max(1, self._num_lanes - 1)

    def _assemble(self, kind: Kind) -> Job:
        """Take one run from each waiting call, by priority and in turn, until the job is full."""
        job, limit = Job(), self._limit(kind)
        again: list[Call] = []
        num_items, nbytes = 0, 0
        for call in self._take_waiting(kind):
            num_fitting = max(1, (limit.nbytes - nbytes) // call.item_nbytes)
            num_taken = min(call.wanted - call.next, limit.num_items - num_items, num_fitting)
            job.runs.append(Run(job, call, num_taken))
            call.next += num_taken
            call.runs += 1
            if call.has_more and call.runs < RUNS_PER_CALL:
                again.append(call)
            num_items += num_taken
            nbytes += num_taken * call.item_nbytes
            if num_items >= limit.num_items or nbytes >= limit.nbytes:
                break
        self._ready[kind].extend(again)
        job.unreported = len(job.runs)
        return job

    def _limit(self, kind: Kind) -> JobLimit:
        """Return when a job is full; what waits to be read is shared out evenly to the lanes that are free."""
        limit = JOB_LIMITS[kind]
        if kind is not Kind.READ:
            return limit
        num_free = self._num_lanes - len(self._jobs[Kind.READ]) - len(self._jobs[Kind.WRITE])
        num_runs = sum(RUNS_PER_CALL - call.runs for call in islice(self._ready[kind], num_free))
        num_shares = max(1, min(num_free, num_runs))
        waiting_nbytes = 0
        for call in self._ready[kind]:
            waiting_nbytes += (call.wanted - call.next) * call.item_nbytes
            if waiting_nbytes >= limit.nbytes * num_shares:
                return limit
        return limit._replace(nbytes=max(MIN_SHARE_NBYTES, -(-waiting_nbytes // num_shares)))

    def _sweep(self, kind: Kind) -> None:
        # Of those that were cancelled while they waited; few enough are left to the next job.
        ready = self._ready[kind]
        if len(ready) > 2 * len(self._live) + FEW_CALLS:
            self._ready[kind] = deque(call for call in ready if call in self._live)

    def _take_waiting(self, kind: Kind) -> Iterator[Call]:
        ready = self._ready[kind]
        # Asked now, for the priority of a call may rise while it waits.
        if len({call.stop.priority for call in ready}) > 1:
            ready = self._ready[kind] = deque(sorted(ready, key=lambda call: -call.stop.priority))
        while ready:
            call = ready.popleft()
            if call.has_more:
                yield call
            else:  # stopped while it waited
                self._settle_if_over(call)

    def _start(self, kind: Kind, job: Job) -> None:
        self._jobs[kind].add(job)
        task = self._loop.create_task(
            _in_thread(job, self._post, executor=self._threads), name="hicache:store-job"
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._task_ended(task, job))

    # -- threads report

    def _post(self, run: Run) -> None:
        """Hand a run back to the loop, with one wake-up for all that were passed meanwhile. Any thread."""
        self._reports.append(run)
        if not self._collect_posted:
            self._collect_posted = True
            post_to_loop(lambda: self._loop.call_soon_threadsafe(self._collect))

    def _collect(self) -> None:
        self._collect_posted = False  # before the queue is emptied: a run posted from here on posts again
        while self._reports:
            self._run_ended(self._reports.popleft())
        self._dispatch()

    def _run_ended(self, run: Run) -> None:
        call, job = run.call, run.job
        call.runs -= 1
        if run.first + run.good < min(run.end, call.wanted):
            call.wanted = run.first + run.good
            call.fault, call.error = run.fault, run.error
        job.unreported -= 1
        if job.unreported == 0:
            self._jobs[call.kind].discard(job)
            job.runs.clear()  # else runs and job would keep each other, and the buffers, until a collection
        # a call with fewer than RUNS_PER_CALL runs stands in the queue already
        if call.has_more and call.runs == RUNS_PER_CALL - 1:
            self._ready[call.kind].append(call)
        self._settle_if_over(call)

    def _task_ended(self, task: asyncio.Task[None], job: Job) -> None:
        """End the runs of a job that no thread began: cancelled with the loop, or refused by the threads."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not job.claim():
            return
        for run in job.runs:
            run.error = StoreUnavailable(f"the store's threads did not take the job: {error or 'cancelled'}")
            self._run_ended(run)
        self._dispatch()

    def _settle_if_over(self, call: Call) -> None:
        if call.over and call in self._live:
            self._live.discard(call)
            if not call.settled.done():
                call.settled.set_result(None)
            call.stop.job_ended()


def _work(job: Job, post: Callable[[Run], None]) -> None:
    if job.claim():
        for run in job.runs:
            run.context.run(run.perform)
            post(run)


_in_thread = wrap(_work)
