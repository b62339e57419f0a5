"""CudaDevice: pages between a GPU and pinned memory, layer by layer, without the loop ever waiting for the GPU."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

import torch

from .._fence import AllFences, ThreadFence, parts, poll
from .._log import logger
from .._progress import CopyProgress, LayerFence
from .._threads import DaemonThreads
from ..abc import CopyPlan, Fence, PagedBytes
from ..config import IoMode
from ..errors import ClosedError, WrongLoopError
from ..memory.copying import check_plan
from ._waiting import Event
from .copy import CopyPoint, CudaCopy
from .events import EventBridge
from .fences import CudaFence, Recorded, StreamOrder
from .lines import Direction, OwnStreams
from .pinned import PinnedMemory
from .runtime import Runtime, Stream
from .torch_runtime import TorchRuntime


class CudaDevice:
    """Copy pages on streams of their own in each direction, queued by threads and never by the loop.

    Its fences are points on streams. To be ordered behind one costs an engine a stream wait, not a wait; a page is
    used again behind the last thing that touched it, and behind nothing else that the stream does.

    Args:
        device: of the engine's tensors.
        compute_stream: what the engine's forward runs on; None: the default stream. The cache itself asks the
            ``compute_stream`` of its ``DeviceKV``, where that has one.
        low_latency: ask for the end of a copy in a thread, every 50 us, instead of in the loop every millisecond.
        runtime: for tests.

    Raises:
        ConfigError: there is no such device.

    **Ownership**: streams and threads are its own, the tensors the engine's. Close it after its caches.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        compute_stream: Stream | None = None,
        low_latency: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self._runtime: Runtime = TorchRuntime(device) if runtime is None else runtime
        self._compute_stream = self._runtime.default_stream() if compute_stream is None else compute_stream
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pinned = PinnedMemory(self._runtime)
        self._bridge = EventBridge(in_thread=low_latency)
        self._helpers = DaemonThreads(1, "hicache-pin")
        streams = OwnStreams(self._runtime, taken=self._compute_stream)
        self._to_device = Direction("host_to_device", streams)
        self._to_host = Direction("device_to_host", streams)
        self._orders: weakref.WeakValueDictionary[object, StreamOrder] = weakref.WeakValueDictionary()
        self._released: Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._runtime!r}, {self._pinned.nbytes} bytes pinned>"

    async def prepare(self, kv: PagedBytes, io_mode: IoMode) -> None:
        """Get ready to copy pages of ``kv`` in ``io_mode``, off the loop.

        Raises:
            ConfigError: its kernels are not installed, or ``kv`` is elsewhere. WrongLoopError: it serves another
                loop. ClosedError: it was closed.
        """
        self._check_usable()
        self._runtime.check_device(kv.planes(0)[0].device)
        if io_mode is IoMode.KERNEL:
            await asyncio.wrap_future(self._helpers.submit(self._runtime.check_kernels))

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes``, touch them and pin them in a worker, chunk by chunk.

        Returns:
            uint8, one dimension, on a memory page boundary, zeros. It is unpinned when it is dropped, when the
            device is closed, or before the interpreter exits.
        Raises:
            ConfigError: the system does not let so much be pinned.
        Cancellation: the worker stops after the chunk in hand and the memory is given back.
        """
        self._check_usable()
        cancelled = threading.Event()
        try:
            pinned = self._helpers.submit(self._pinned.allocate, nbytes, cancelled)
            return torch.from_numpy(await asyncio.wrap_future(pinned))
        finally:
            cancelled.set()

    def fence(self, stream: Stream | None = None) -> CudaFence:
        """Return a fence behind what ``stream`` has queued; None: the engine's compute stream.

        Never the stream that happens to be current in the calling thread: on a loop that is not the engine's.
        Raises: ConfigError: no stream.
        """
        stream = self._compute_stream if stream is None else stream
        key = self._runtime.key(stream)
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = StreamOrder(key)
        return self._fence(order, order.place(), _EnginePoint(self._runtime.record(stream)))

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[CudaFence]:
        """Queue a copy of ``plan.host_pages`` into ``plan.device_pages``; see :class:`abc.Device`.

        Returns: a fence per layer. :meth:`recorded` says when ``block`` waits in no thread any more.
        Raises:
            InvariantError: the plan's page ids do not pair up or lie outside a tier.
            ClosedError: the device was closed.
        """
        return self._submit(self._to_device, plan, after, num_fences=plan.kv.num_layers)

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> CudaFence:
        """Queue a copy of ``plan.device_pages`` into ``plan.host_pages``; see :class:`abc.Device`.

        Raises: as :meth:`host_to_device`.
        """
        return self._submit(self._to_host, plan, after, num_fences=1)[0]

    async def recorded(self, fences: Sequence[Fence]) -> None:
        """Return when all of ``fences`` are recorded, or have failed. Cancellation: ends the wait only."""
        for fence in fences:
            if isinstance(fence, CudaFence) and fence.recording is not None:
                await fence.recording.reached()

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed. Its stream is asked by one timer of the loop, whoever waits.

        Raises: what failed. Cancellation: ends the wait only.
        """
        if isinstance(fence, ThreadFence | LayerFence):
            await fence.wait()
        elif isinstance(fence, CudaFence):
            if fence.recording is not None:
                await fence.recording.wait()
            if not fence.passed():
                await self._bridge.wait(fence.event, stream=fence.stream, sequence=fence.sequence)
                fence.passed()  # so that the fences before it on the stream know, and are asked no more
            self._to_device.forget_passed()
            self._to_host.forget_passed()
            if fence.error is not None:
                raise fence.error
        elif isinstance(fence, AllFences):
            for part in fence.fences:
                await self.wait(part)
        else:
            await poll(fence)

    async def aclose(self) -> None:
        """Fail the copies that were not queued and let go of the threads; waits for none that runs.

        Memory stays pinned, and is kept, where a copy still uses it. Who waits for such a copy goes on waiting.
        Cancellation: ends the wait for memory to be unpinned, which goes on; a second call waits for it again.
        """
        if self._released is None:
            closed = ClosedError("the device was closed before this copy was queued")
            self._to_device.close(closed)
            self._to_host.close(closed)
            self._bridge.close()
            is_idle = self._to_device.is_idle and self._to_host.is_idle
            if not is_idle:
                logger.warning("device.copies_running", pinned_bytes=self._pinned.nbytes)
            self._released = self._helpers.submit(self._pinned.release if is_idle else self._pinned.abandon)
            self._released.add_done_callback(lambda _: self._helpers.shutdown())
        await asyncio.wait([asyncio.wrap_future(self._released)])

    def _check_usable(self) -> None:
        if self._released is not None:
            raise ClosedError("the device is closed; make a new CudaDevice")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise WrongLoopError("this CudaDevice serves another loop; make one device for each loop")

    def _submit(
        self, direction: Direction, plan: CopyPlan, after: Sequence[Fence], *, num_fences: int
    ) -> list[CudaFence]:
        if self._released is not None:
            raise ClosedError("the device is closed; it copies nothing any more")
        check_plan(plan)
        line = direction.line_for(self._waits_for(after))
        place = line.order.place(num_fences)
        copy = CudaCopy(
            self._runtime,
            self._pinned,
            line.stream,
            plan,
            after,
            CopyProgress(num_fences, direction.name, line, place),
            is_to_device=direction is self._to_device,
        )
        line.queue.submit(copy)
        fences = [
            self._fence(line.order, place + index, CopyPoint(copy, index)) for index in range(num_fences)
        ]
        line.under_way(fences[-1])
        return fences

    def _waits_for(self, after: Sequence[Fence]) -> Hashable:
        """Return what a copy behind ``after`` waits for, but for copies that wait for nothing; None: nothing."""
        own = self._to_device.at_once.order, self._to_host.at_once.order
        waits = {
            fence.stream if isinstance(fence, CudaFence) else "threads"
            for combined in after
            for fence in parts(combined)
            if not fence.passed() and not (isinstance(fence, CudaFence) and fence.stream in own)
        }
        return frozenset(waits) or None

    def _fence(self, order: StreamOrder, place: int, point: Recorded) -> CudaFence:
        return CudaFence(self._runtime, order, place, point, compute_stream=self._compute_stream)


class _EnginePoint:
    """A point on a stream of the engine, recorded when it is made."""

    __slots__ = ("error", "event", "recording")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.error: BaseException | None = None
        self.recording: LayerFence | None = None
