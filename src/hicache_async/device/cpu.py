"""CpuDevice: device pages in host memory. What it does is the reference for every other device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from .._copy_queue import CopyQueue
from .._fence import PassedFence, ThreadFence, poll
from .._progress import CopyProgress, LayerFence
from .._threads import DaemonThreads
from ..abc import CopyPlan, Fence, PagedBytes
from ..errors import ClosedError
from ..memory.buffer import touched_buffer
from ..memory.copying import check_plan, copy_layer
from ..memory.layout import sorted_runs
from ..types import Pages


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
        self._to_device = CopyQueue(self._threads, "to-device")
        self._to_host = CopyQueue(self._threads, "to-host")

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` and touch them in a worker, so that no copy pays for page faults.

        Returns:
            uint8, one dimension, on a memory page boundary, zeros.
        Cancellation: the worker stops after the chunk in hand and the memory is given back.
        """
        cancelled = threading.Event()
        try:
            touched = self._threads.submit(touched_buffer, nbytes, cancelled)
            return torch.from_numpy(await asyncio.wrap_future(touched))
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
        progress = _progress(self._to_device, plan, "host_to_device")
        copy = _Copy(plan.arena, plan.host_pages, plan.kv, plan.device_pages, after, progress)
        self._to_device.submit(copy)
        return [LayerFence(copy.progress, layer) for layer in range(plan.kv.num_layers)]

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        """Queue a copy of ``plan.device_pages`` into ``plan.host_pages``; see :class:`abc.Device`.

        Raises: as :meth:`host_to_device`.
        """
        check_plan(plan)
        progress = _progress(self._to_host, plan, "device_to_host")
        copy = _Copy(plan.kv, plan.device_pages, plan.arena, plan.host_pages, after, progress)
        self._to_host.submit(copy)
        return LayerFence(copy.progress, plan.kv.num_layers - 1)

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed; a fence of another kind is polled, which holds no thread.

        Raises: what failed. Cancellation: ends the wait only.
        """
        if isinstance(fence, ThreadFence | LayerFence):
            await fence.wait()
            return
        await poll(fence)

    async def aclose(self) -> None:
        """Fail the copies that have not started and let go of the threads; waits for none."""
        closed = ClosedError("the device was closed before this copy started")
        self._to_device.close(closed)
        self._to_host.close(closed)
        if self._own_threads is not None:
            self._own_threads.shutdown()


class _Copy:
    """One queued copy: where from, where to, behind what, and how far it has come."""

    __slots__ = ("awaited", "progress", "source", "source_pages", "target", "target_pages")

    def __init__(
        self,
        source: PagedBytes,
        source_pages: Pages,
        target: PagedBytes,
        target_pages: Pages,
        after: Sequence[Fence],
        progress: CopyProgress,
    ) -> None:
        self.source, self.source_pages = source, source_pages
        self.target, self.target_pages = target, target_pages
        self.awaited = after
        self.progress = progress

    def run(self) -> None:
        """Move all layers. Every fence in ``awaited`` has passed, so ``block`` can only raise."""
        try:
            for fence in self.awaited:
                fence.block()
            runs = sorted_runs(self.source_pages, self.target_pages)
            for layer in range(self.source.num_layers):
                copy_layer(self.source, self.target, layer, runs)
                self.progress.advance()
        except BaseException as error:  # noqa: BLE001 - the top level of a job: its fences carry what it raised
            self.progress.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let every layer pass as failed with ``error``."""
        self.progress.fail(error)


def _progress(queue: CopyQueue, plan: CopyPlan, name: str) -> CopyProgress:
    num_layers = plan.kv.num_layers
    return CopyProgress(num_layers, name, queue, queue.place(num_layers))
