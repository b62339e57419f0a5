"""VirtualDevice: a device whose copies move when the test says so, and not before."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from .._fence import POLL_S, PassedFence, ThreadFence, parts, poll, resolve
from .._progress import LayerFence
from .._threads import post_to_loop
from ..abc import CopyPlan, Fence
from ..errors import ClosedError, InvariantError
from ..memory.copying import check_plan
from .virtual_copy import (
    UNDEFINED,
    NotReadyError,
    NotRecordedError,
    VirtualCopy,
    VirtualFence,
    VirtualProgress,
    VirtualStream,
    poison,
)

__all__ = ["UNDEFINED", "NotReadyError", "NotRecordedError", "VirtualCopy", "VirtualDevice", "VirtualFence"]


class VirtualDevice:
    """Stricter than any GPU, and without threads: everything happens in the calls of the test.

    - Bytes move in :meth:`advance` only (``auto=True``: as soon as the fences before them have passed).
    - The source is read at that moment, as late as a real copy may read it.
    - The targets of a copy that may start are spoiled at once, as early as a real copy may write them.
    - Two copies that touch the same page without an order between them are refused at submit.
    - Blocking on a fence that has not passed, or is not even recorded, raises instead of waiting.
    - Fences of one stream pass in order, failed ones too; those of different streams in any order. Each
      direction is a stream, and so is each of the engine's, which any hashable names.

    Args:
        auto: move bytes without being told.
        holds_recording: record copies in :meth:`record` only, as a device does that queues them from a
            thread; nothing moves before it is recorded. Else they are recorded at submit.
    Attributes:
        num_submitted: copies so far.
    """

    poison = staticmethod(poison)

    def __init__(self, auto: bool = False, *, holds_recording: bool = False) -> None:
        self.auto = auto
        self.holds_recording = holds_recording
        self.num_submitted = 0
        self._pending: list[VirtualCopy] = []
        self._to_device = VirtualStream("host_to_device")
        self._to_host = VirtualStream("device_to_host")
        self._streams: dict[object, VirtualStream] = {}
        self._failures: deque[tuple[BaseException, int]] = deque()
        self._recorded_waits: set[asyncio.Future[None]] = set()
        self._closed = False

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    # The engine's streams

    def fence(self, stream: object | None = None) -> Fence:
        """Return a fence behind what :meth:`begin_compute` has queued on ``stream``; passed if that is nothing."""
        known = self._streams.get(stream)
        return VirtualFence(known.queued[-1], 0) if known is not None and known.queued else PassedFence()

    def begin_compute(self, stream: object | None = None) -> None:
        """Behave as if a forward had been queued on ``stream``, behind those that are queued there."""
        known = self._streams.setdefault(stream, VirtualStream(f"compute on {stream!r}"))
        known.queued.append(VirtualProgress(1, known.name, known))

    def end_compute(self, stream: object | None = None) -> bool:
        """Behave as if the oldest forward on ``stream`` had ended; returns whether there was one."""
        known = self._streams.get(stream)
        if known is None or not known.queued:
            return False
        known.queued.popleft().advance()
        return True

    # Copies

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[VirtualFence]:
        """Queue the copy; see :class:`abc.Device`."""
        copy = self._submit(plan, True, after)
        return [VirtualFence(copy.progress, layer) for layer in range(plan.kv.num_layers)]

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> VirtualFence:
        """Queue the copy; see :class:`abc.Device`."""
        return VirtualFence(self._submit(plan, False, after).progress, plan.kv.num_layers - 1)

    @property
    def pending(self) -> tuple[VirtualCopy, ...]:
        """The copies that are not over, in the order of submit."""
        return tuple(copy for copy in self._pending if not copy.progress.is_over)

    def record(self, num_layers: int | None = None) -> int:
        """Record that many more layers, in the order of submit; None: all. Returns how many."""
        unrecorded = [
            copy.progress
            for copy in self.pending
            for _ in range(copy.progress.num_recorded, copy.progress.num_layers)
        ][:num_layers]
        for progress in unrecorded:
            progress.num_recorded += 1
        self._pump()
        return len(unrecorded)

    def advance(self, layer: int | None = None, *, copy: VirtualCopy | None = None) -> int:
        """Move one layer of the first copy that may move; returns how many layers moved, 0 if none may.

        Args:
            layer: move up to and including this layer instead.
            copy: move this one; each direction keeps its order, so it must be the first of its own.
        """
        movable = [chosen for chosen in self._take_turns() if copy is None or chosen is copy]
        if not movable:
            return 0
        chosen = movable[0]
        last = chosen.num_done if layer is None else layer
        num_moved = 0
        while chosen.num_done <= last and chosen.may_move:
            chosen.move_layer()
            num_moved += 1
        self._take_turns()  # a copy behind this one may start now, and spoils its targets when it can
        return num_moved

    def advance_all(self) -> int:
        """Move everything that may move; returns how many layers moved."""
        total = 0
        while num_moved := self.advance():
            total += num_moved
        return total

    def fail_next(self, error: BaseException, layer: int = 0) -> None:
        """Let the next copy that is submitted move the layers before ``layer`` and fail from there on.

        Each call is good for one copy more.
        """
        self._failures.append((error, layer))

    def let_go(self) -> None:
        """End all forwards, and move everything, from now on without being told."""
        self.auto, self.holds_recording = True, False
        for stream in self._streams:
            while self.end_compute(stream):
                pass
        self.record()

    # Waiting

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed. Raises: what failed. Cancellation: ends the wait only."""
        if isinstance(fence, ThreadFence | LayerFence):
            await fence.wait()
            return
        await poll(fence)

    async def recorded(self, fences: Sequence[Fence]) -> None:
        """Return when all of ``fences`` are recorded, or have failed. Cancellation: ends the wait only."""
        own = [fence for fence in fences if isinstance(fence, VirtualFence)]
        while not all(fence.is_recorded for fence in own):
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._recorded_waits.add(changed)
            try:
                await changed
            finally:
                self._recorded_waits.discard(changed)

    async def aclose(self) -> None:
        """Fail what has not moved, in the order of submit."""
        self._closed = True
        for copy in self.pending:
            copy.progress.fail(ClosedError("the device was closed before this copy was over"))
        self._tell_recorded()

    # Turns

    def _submit(self, plan: CopyPlan, to_device: bool, after: Sequence[Fence]) -> VirtualCopy:
        if self._closed:
            raise ClosedError("the device is closed; it copies nothing any more")
        check_plan(plan)
        stream = self._to_device if to_device else self._to_host
        name = f"{stream.name} #{self.num_submitted}"
        progress = VirtualProgress(plan.kv.num_layers, name, stream, recorded=not self.holds_recording)
        copy = VirtualCopy(plan, to_device, after, progress, self._pump)
        self._check(copy)
        if self._failures:
            copy.fail(*self._failures.popleft())
        self.num_submitted += 1
        self._pending = [*self.pending, copy]
        for fence in chain.from_iterable(map(parts, copy.after)):
            if isinstance(fence, ThreadFence):
                fence.add_callback(self._pump)
            elif isinstance(fence, LayerFence):
                fence.when_settled(self._pump)
            elif self.auto:
                self._pump_behind(fence)
        self._pump()
        return copy

    def _pump_behind(self, fence: Fence) -> None:
        # One of another kind tells nobody that it has passed.
        if fence.passed():
            self._pump()
        elif not self._closed:
            asyncio.get_running_loop().call_later(POLL_S, self._pump_behind, fence)

    def _pump(self) -> None:
        if self.auto:
            self.advance_all()
        else:
            self._take_turns()

    def _take_turns(self) -> list[VirtualCopy]:
        """Start, or fail, what has come to its turn; return what may move, in the order of submit."""
        movable: list[VirtualCopy] = []
        for to_device in (True, False):
            for copy in [copy for copy in self.pending if copy.to_device is to_device]:
                if self._closed:
                    return []
                if copy.take_turn():
                    movable.append(copy)
                if not copy.progress.is_over:  # else it has failed, and the next one is first
                    break
        self._tell_recorded()
        return sorted(movable, key=self._pending.index)

    def _tell_recorded(self) -> None:
        for changed in list(self._recorded_waits):
            post_to_loop(changed.get_loop().call_soon_threadsafe, resolve, changed)

    def _check(self, copy: VirtualCopy) -> None:
        targets = copy.plan.device_pages if copy.to_device else copy.plan.host_pages
        if len(np.unique(targets)) != len(targets):
            raise InvariantError(f"{copy!r} writes a page twice: {targets.tolist()}")
        for other in self.pending:
            # Within a direction copies keep the order of submit, but one that has to wait may be passed.
            both_at_once = other.to_device is copy.to_device and other.is_ready() and copy.is_ready()
            if both_at_once or copy.is_behind(other):
                continue
            device_pages = np.intersect1d(copy.plan.device_pages, other.plan.device_pages)
            host_pages = np.intersect1d(copy.plan.host_pages, other.plan.host_pages)
            if other.to_device is copy.to_device:  # then both only read the one side
                device_pages, host_pages = (
                    (device_pages, host_pages[:0]) if copy.to_device else (device_pages[:0], host_pages)
                )
            if len(device_pages) or len(host_pages):
                raise InvariantError(
                    f"{copy!r} touches device pages {device_pages.tolist()} and host pages "
                    f"{host_pages.tolist()} of {other!r}, which is not over; "
                    "put it behind the last fence of that copy"
                )
