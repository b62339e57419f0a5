"""CudaCopy: one copy, queued on its stream by a thread and recorded layer by layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from .._fence import POLL_S, parts
from .._progress import CopyProgress, LayerFence
from ..abc import CopyPlan, Fence
from ..config import IoMode
from ..memory.layout import sorted_runs
from ..types import Pages
from ._waiting import Event
from .fences import CudaFence
from .pieces import copy_runs
from .pinned import PinnedMemory
from .runtime import Runtime, Stream


class CudaCopy:
    """What one call of :meth:`CudaDevice.host_to_device` or its reverse queues on a stream.

    Args:
        after: the fences that it stays behind.
        recording: counts the events; one for each layer, or one for all of them.

    Attributes:
        awaited: what has to pass before it can be queued: fences of threads, and until they are recorded
            those of other copies. Fences of streams are left to the stream.
    """

    __slots__ = (
        "_after",
        "_error",
        "_events",
        "_is_to_device",
        "_pinned",
        "_plan",
        "_runtime",
        "_stream",
        "awaited",
        "recording",
    )

    def __init__(
        self,
        runtime: Runtime,
        pinned: PinnedMemory,
        stream: Stream,
        plan: CopyPlan,
        after: Sequence[Fence],
        recording: CopyProgress,
        *,
        is_to_device: bool,
    ) -> None:
        self._runtime = runtime
        self._pinned = pinned
        self._stream = stream
        self._plan = plan
        self._is_to_device = is_to_device
        self._after: Sequence[Fence] = [fence for combined in after for fence in parts(combined)]
        self._events: list[Event] = []
        self._error: tuple[int, BaseException] | None = None
        self.recording = recording
        awaited: list[Fence] = []
        for fence in self._after:
            if not isinstance(fence, CudaFence):
                awaited.append(fence)
            elif fence.recording is not None:
                awaited.append(fence.recording)
        self.awaited: Sequence[Fence] = awaited

    def event(self, index: int) -> Event:
        """Return the event of a layer, which is recorded."""
        return self._events[min(index, len(self._events) - 1)]

    def error(self, index: int) -> BaseException | None:
        """Return why a layer that is recorded was not copied."""
        return None if self._error is None or index < self._error[0] else self._error[1]

    def fail(self, error: BaseException) -> None:
        """Give up a copy of which nothing was queued."""
        self._after, self.awaited = [], ()
        self.recording.fail(error)

    def run(self) -> None:
        """Queue everything on the stream; what has to pass before has passed."""
        try:
            with self._runtime.on(self._stream):
                for fence in self._after:
                    if isinstance(fence, CudaFence) and fence.has_event:
                        self._runtime.order(self._stream, fence.event)
                try:
                    self._queue()
                except BaseException as error:  # noqa: BLE001 - its fences carry what it raised
                    self._end_failed(error)
        except BaseException as refused:  # noqa: BLE001 - the top level of a job, and not even an event can be had
            self._wait_here()
            self.recording.fail(refused)
        finally:
            self._after, self.awaited = [], ()  # else each copy would keep all those before it

    def _wait_here(self) -> None:
        # As failed its fences pass at once: not before what it is behind, and what was queued of it, is over.
        for fence in self._after:
            while not fence.passed():
                time.sleep(POLL_S)
        with contextlib.suppress(RuntimeError):  # a lost device moves nothing any more
            self._runtime.synchronize(self._stream)

    def _queue(self) -> None:
        for fence in self._after:
            if not isinstance(fence, CudaFence):
                fence.block()  # it has passed, so this can only raise
            elif fence.error is not None:
                raise fence.error
        plan = self._plan
        if self._is_to_device:
            source, target, sources, targets = plan.arena, plan.kv, plan.host_pages, plan.device_pages
        else:
            source, target, sources, targets = plan.kv, plan.arena, plan.device_pages, plan.host_pages
        copy_plane = self._mover(sources, targets)
        num_layers = plan.kv.num_layers
        for layer in range(num_layers):
            for taken, given in zip(source.planes(layer), target.planes(layer), strict=True):
                copy_plane(taken, given)
            if self.recording.num_layers == num_layers or layer == num_layers - 1:
                self._record()

    def _record(self) -> None:
        self._events.append(self._runtime.record(self._stream))
        self.recording.advance()

    def _mover(self, sources: Pages, targets: Pages) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return what queues these pages of one plane, called as ``mover(source, target)``."""
        runtime = self._runtime
        if not len(sources):
            return lambda source, target: None
        if self._plan.io_mode is IoMode.KERNEL:
            ids = runtime.device_pages(sources), runtime.device_pages(targets)
            return lambda source, target: runtime.copy_pages(source, target, *ids)
        runs, cuts = sorted_runs(sources, targets), self._pinned.cuts
        return lambda source, target: copy_runs(runtime.copy, source, target, runs, cuts)

    def _end_failed(self, error: BaseException) -> None:
        # A fence that passed at once would give pages away that are still being written, by what was queued of
        # this copy or by what it stays behind. So a failed layer has an event, too, and passes with it.
        num_recorded = self.recording.num_done
        if num_recorded < self.recording.num_layers:
            self._events.append(self._runtime.record(self._stream))
            self._error = num_recorded, error
            while not self.recording.is_over:
                self.recording.advance()


class CopyPoint:
    """The point behind one layer of a copy, or behind all of it."""

    __slots__ = ("_copy", "_index", "recording")

    def __init__(self, copy: CudaCopy, index: int) -> None:
        self._copy = copy
        self._index = index
        self.recording: LayerFence | None = LayerFence(copy.recording, index)

    @property
    def event(self) -> Event:
        """What is recorded behind it, or behind what was done of a copy that failed before it."""
        return self._copy.event(self._index)

    @property
    def error(self) -> BaseException | None:
        """Why it was not copied."""
        return self._copy.error(self._index)
