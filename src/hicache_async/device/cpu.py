"""CpuDevice: device pages in host memory. What it does is the reference for every other device."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np
import torch

from .._fence import ThreadFence
from .._threads import DaemonThreads
from ..abc import CopyPlan, Fence, PagedBytes
from ..errors import ClosedError, InvariantError
from ..memory.layout import PageRun, alike, page_runs
from ..types import Pages
from ._progress import CopyProgress, LayerFence

POLL_S = 0.001  # epoll rounds a shorter timer up to this, and uvloop rounds it down to a busy loop
_TOUCH_NBYTES = 64 << 20
_PAGE_NBYTES = 4096


class PassedFence:
    """A fence with nothing before it."""

    __slots__ = ()

    def passed(self) -> bool:
        """Return True."""
        return True

    def block(self, stream: object | None = None) -> None:
        """Return at once."""


class CpuDevice:
    """Copy pages with numpy in worker threads, one copy at a time in each direction.

    torch is not used to copy: its thread count is the engine's too, and two intra-op threads on two
    busy cores copy several times slower than one.

    Args:
        threads: where the copies run, at most two at once; None: two daemon threads of its own.

    **Ownership**: ``threads`` stay the caller's. The bytes stay the engine's and the arena's.
    """

    def __init__(self, threads: Executor | None = None) -> None:
        self._own_threads = DaemonThreads(2, "hicache-copy") if threads is None else None
        self._threads: Executor = self._own_threads or threads  # type: ignore[assignment]
        self._to_device = _Lane(self._threads, "hicache-fence-to-device")
        self._to_host = _Lane(self._threads, "hicache-fence-to-host")

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` and touch them in a worker, so that no copy pays for page faults.

        Returns:
            uint8, one dimension, on a memory page boundary, zeros.
        Cancellation: the worker stops after the chunk in hand and the memory is given back.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.wrap_future(self._threads.submit(_touched_buffer, nbytes, cancelled))
        finally:
            cancelled.set()

    def fence(self, stream: object | None = None) -> Fence:
        """Return a passed fence: without streams, what was called has been done."""
        return PassedFence()

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        """Queue a copy of ``plan.host_pages`` into ``plan.device_pages``; see :class:`abc.Device`.

        Raises:
            InvariantError: the plan's page ids do not pair up or lie outside a tier.
            ClosedError: the device was closed.
        """
        check_plan(plan)
        copy = _Copy(plan.arena, plan.host_pages, plan.kv, plan.device_pages, after, "host_to_device")
        self._to_device.submit(copy)
        return [LayerFence(copy.progress, layer) for layer in range(plan.kv.num_layers)]

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        """Queue a copy of ``plan.device_pages`` into ``plan.host_pages``; see :class:`abc.Device`.

        Raises: as :meth:`host_to_device`.
        """
        check_plan(plan)
        copy = _Copy(plan.kv, plan.device_pages, plan.arena, plan.host_pages, after, "device_to_host")
        self._to_host.submit(copy)
        return LayerFence(copy.progress, plan.kv.num_layers - 1)

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed; a fence of another kind is polled, which holds no thread.

        Raises: what failed. Cancellation: ends the wait only.
        """
        if isinstance(fence, ThreadFence | LayerFence):
            await fence.wait()
            return
        while not fence.passed():  # noqa: ASYNC110 - a foreign fence has no event to wait for
            await asyncio.sleep(POLL_S)
        fence.block()

    async def aclose(self) -> None:
        """Fail the copies that have not started and let go of the threads; waits for none."""
        closed = ClosedError("the device was closed before this copy started")
        self._to_device.close(closed)
        self._to_host.close(closed)
        if self._own_threads is not None:
            self._own_threads.shutdown()


class _Copy:
    """One queued copy: where from, where to, behind what, and how far it has come."""

    __slots__ = ("after", "num_awaited", "progress", "source", "source_pages", "target", "target_pages")

    def __init__(
        self,
        source: PagedBytes,
        source_pages: Pages,
        target: PagedBytes,
        target_pages: Pages,
        after: Sequence[Fence],
        name: str,
    ) -> None:
        self.source, self.source_pages = source, source_pages
        self.target, self.target_pages = target, target_pages
        self.after = after
        self.num_awaited = 0
        self.progress = CopyProgress(source.num_layers, name)

    def run(self) -> None:
        """Move all layers. Every fence in ``after`` has passed, so ``block`` can only raise."""
        try:
            for fence in self.after:
                fence.block()
            runs = page_runs(self.source_pages, self.target_pages)
            for layer in range(self.source.num_layers):
                copy_layer(self.source, self.target, layer, runs)
                self.progress.advance()
        except BaseException as error:  # noqa: BLE001 - the top level of a job: its fences carry what it raised
            self.progress.fail(error)


class _Lane:
    """The copies of one direction: in the order of submit, one at a time, no worker held while waiting.

    A copy waits here for the fences before it. Only the first may start, so one thread is enough to
    wait for fences that cannot call back: what a later copy waits for cannot matter earlier.
    """

    def __init__(self, threads: Executor, name: str) -> None:
        self._threads = threads
        self._waiter = DaemonThreads(1, name)
        self._lock = threading.Lock()
        self._queue: deque[_Copy] = deque()
        self._is_running = False
        self._is_closed = False

    def submit(self, copy: _Copy) -> None:
        """Queue ``copy``; it starts in a worker, never here."""
        awaited = [fence for fence in copy.after if not fence.passed()]
        copy.num_awaited = len(awaited)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the device is closed; it copies nothing any more")
            self._queue.append(copy)
        for fence in awaited:
            if isinstance(fence, ThreadFence):
                fence.add_callback(lambda: self._arrived(copy))
            elif isinstance(fence, LayerFence):
                fence.when_settled(lambda: self._arrived(copy))
            else:
                self._waiter.submit(fence.block).add_done_callback(lambda _: self._arrived(copy))
        self._start_next()

    def close(self, error: BaseException) -> None:
        """Refuse copies, and fail those that have not started."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._queue)
            self._queue.clear()
        self._waiter.shutdown()
        for copy in dropped:
            copy.progress.fail(error)

    def _arrived(self, copy: _Copy) -> None:
        with self._lock:
            copy.num_awaited -= 1
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
            copy = self._queue.popleft() if self._queue else None
        if copy is not None:
            copy.run()
            del copy  # its tensors are not this thread's to keep while the next one is found
        with self._lock:
            self._is_running = False
        self._start_next()

    def _close_if_cancelled(self, job: Future[None]) -> None:
        if job.cancelled():
            self.close(ClosedError("the executor was shut down before this copy started"))


def check_plan(plan: CopyPlan) -> None:
    """Raise InvariantError unless the page ids pair up and lie within their tiers.

    numpy cuts a slice beyond the end short without a word, so a wrong id would copy nothing.
    """
    if len(plan.device_pages) != len(plan.host_pages):
        raise InvariantError(f"{len(plan.device_pages)} device pages for {len(plan.host_pages)} host pages")
    for tier, pages, num_pages in (
        ("device", plan.device_pages, plan.kv.num_pages),
        ("host", plan.host_pages, plan.arena.num_pages),
    ):
        if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= num_pages):
            raise InvariantError(
                f"{tier} pages {pages.min()} .. {pages.max()} are not in 0 .. {num_pages - 1}"
            )


def copy_layer(source: PagedBytes, target: PagedBytes, layer: int, runs: Sequence[PageRun]) -> None:
    """Copy the pages of ``runs`` in every plane of one layer; both sides in host memory."""
    for source_plane, target_plane in zip(source.planes(layer), target.planes(layer), strict=True):
        taken, given = alike(source_plane.numpy(), target_plane.numpy())
        for start, to, num_pages in runs:
            if num_pages == 1:  # half the cost of two slices, and most runs of a fragmented pool are this
                given[to] = taken[start]
            else:
                given[to : to + num_pages] = taken[start : start + num_pages]


def _touched_buffer(nbytes: int, cancelled: threading.Event) -> torch.Tensor:
    # numpy asks for huge pages, which fault in about five times faster than torch's allocation.
    memory = np.empty(nbytes + _PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_NBYTES
    buffer = memory[start : start + nbytes]
    for chunk in range(0, nbytes, _TOUCH_NBYTES):
        if cancelled.is_set():
            break
        buffer[chunk : chunk + _TOUCH_NBYTES] = 0
    return torch.from_numpy(buffer)
