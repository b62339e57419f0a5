"""VirtualDevice: a device whose copies move when the test says so, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from .._fence import POLL_S, PassedFence, ThreadFence, parts, poll
from .._progress import CopyProgress, LayerFence
from ..abc import CopyPlan, Fence, PagedBytes
from ..errors import ClosedError, InvariantError
from ..memory.copying import check_plan, copy_layer
from ..memory.host import POISON
from ..memory.layout import page_runs
from ..types import Pages

UNDEFINED = 0xDB
"""What the targets of a started copy hold until their layer has moved."""


class NotReadyError(AssertionError):
    """Bytes were asked for before they have moved: with a real device a wrong result or a deadlock."""


class VirtualFence(LayerFence):
    """A fence that never waits: blocking on it too early is the caller's bug."""

    __slots__ = ()

    def block(self, stream: object | None = None) -> None:
        """Return, or raise what failed the copy.

        Raises:
            NotReadyError: the test has not moved this layer yet.
        """
        if not self.passed():
            raise NotReadyError(f"{self!r}: used before its bytes have moved; advance() the device first")
        super().block(stream)


class VirtualCopy:
    """One submitted copy.

    Attributes:
        plan: what moves; ``to_device``: in which direction.
        after: the fences it stays behind.
    """

    def __init__(self, plan: CopyPlan, to_device: bool, after: Sequence[Fence], number: int) -> None:
        self.plan = plan
        self.to_device = to_device
        self.after = tuple(after)
        direction, num_layers = "host_to_device" if to_device else "device_to_host", plan.kv.num_layers
        self.progress = CopyProgress(num_layers, f"{direction} #{number}", direction, number * num_layers)
        self._is_started = False

    def __repr__(self) -> str:
        return f"<VirtualCopy {self.progress.name} {self.num_done}/{self.progress.num_layers} layers>"

    @property
    def num_done(self) -> int:
        """Layers that have moved."""
        return self.progress.num_done

    def is_ready(self) -> bool:
        """Return whether everything that this copy stays behind has passed."""
        return all(fence.passed() for fence in self.after)

    def fail(self, error: BaseException) -> None:
        """Fail the layers that have not moved."""
        self.progress.fail(error)

    def start(self) -> None:
        """Spoil the targets, once: from now on what they held is gone; fail if a fence before it failed."""
        if self._is_started:
            return
        self._is_started = True
        try:
            for fence in self.after:
                fence.block()
        except Exception as error:  # noqa: BLE001 - whatever a fence carries is what this copy fails with
            self.fail(error)
            return
        target, pages = (
            (self.plan.kv, self.plan.device_pages)
            if self.to_device
            else (self.plan.arena, self.plan.host_pages)
        )
        VirtualDevice.poison(target, pages, UNDEFINED)

    def move_layer(self) -> None:
        """Move the next layer, reading the source as it is now."""
        kv, arena, device_pages, host_pages = (
            self.plan.kv,
            self.plan.arena,
            self.plan.device_pages,
            self.plan.host_pages,
        )
        if self.to_device:
            copy_layer(arena, kv, self.num_done, page_runs(host_pages, device_pages))
        else:
            copy_layer(kv, arena, self.num_done, page_runs(device_pages, host_pages))
        self.progress.advance()


class VirtualDevice:
    """Stricter than any GPU, and without threads: everything happens in the calls of the test.

    - Bytes move in :meth:`advance` only (``auto=True``: as soon as the fences before them have passed).
    - The source is read at that moment, as late as a real copy may read it.
    - The targets of a copy that may start are spoiled at once, as early as a real copy may write them.
    - Two copies that touch the same page without an order between them are refused at submit.
    - Blocking on a fence that has not passed raises instead of waiting.

    Args:
        auto: move bytes without being told.
    Attributes:
        num_submitted: copies so far.
    """

    def __init__(self, auto: bool = False) -> None:
        self.auto = auto
        self.num_submitted = 0
        self._pending: list[VirtualCopy] = []
        self._compute: CopyProgress | None = None
        self._num_computed = 0
        self._closed = False

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def fence(self, stream: object | None = None) -> Fence:
        """Return a passed fence, or after :meth:`begin_compute` one that :meth:`end_compute` lets pass."""
        return PassedFence() if self._compute is None else VirtualFence(self._compute, 0)

    def begin_compute(self) -> None:
        """Behave as if a forward had been queued: fences made from now on are open."""
        if self._compute is None:
            self._compute = CopyProgress(1, "compute", "compute", self._num_computed)
            self._num_computed += 1

    def end_compute(self) -> None:
        """Behave as if the queued forward had ended."""
        if self._compute is not None:
            compute, self._compute = self._compute, None
            compute.advance()

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

    def advance(self, layer: int | None = None, *, copy: VirtualCopy | None = None) -> int:
        """Move one layer of the first copy that may move; returns how many layers moved, 0 if none may.

        Args:
            layer: move up to and including this layer instead.
            copy: move this one; each direction keeps its order, so it must be the first of its own.
        """
        movable = [chosen for chosen in self._movable() if copy is None or chosen is copy]
        if not movable:
            return 0
        chosen = movable[0]
        last = chosen.num_done if layer is None else min(layer, chosen.progress.num_layers - 1)
        num_moved = 0
        while chosen.num_done <= last and not chosen.progress.is_over:
            chosen.move_layer()
            num_moved += 1
        self._movable()  # a copy behind this one may start now, and spoils its targets when it can
        return num_moved

    def advance_all(self) -> int:
        """Move everything that may move; returns how many layers moved."""
        total = 0
        while num_moved := self.advance():
            total += num_moved
        return total

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed. Raises: what failed. Cancellation: ends the wait only."""
        if isinstance(fence, ThreadFence | VirtualFence):
            await fence.wait()
            return
        await poll(fence)

    async def aclose(self) -> None:
        """Fail what has not moved."""
        self._closed = True
        for copy in self.pending:
            copy.fail(ClosedError("the device was closed before this copy was over"))

    @staticmethod
    def poison(paged: PagedBytes, pages: Pages, value: int = POISON) -> None:
        """Fill pages of a DeviceKV or a HostArena; called when pages are freed, it exposes a late reader."""
        for layer in range(paged.num_layers):
            for plane in paged.planes(layer):
                plane.numpy()[pages] = value

    def _submit(self, plan: CopyPlan, to_device: bool, after: Sequence[Fence]) -> VirtualCopy:
        if self._closed:
            raise ClosedError("the device is closed; it copies nothing any more")
        copy = VirtualCopy(plan, to_device, after, self.num_submitted)
        self._check(copy)
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
            self._movable()

    def _movable(self) -> list[VirtualCopy]:
        """Start what may start: the first copy of each direction, when the fences before it have passed."""
        movable: list[VirtualCopy] = []
        for to_device in (True, False):
            for copy in [copy for copy in self.pending if copy.to_device is to_device]:
                if not copy.is_ready():
                    break
                copy.start()
                if not copy.progress.is_over:  # else it failed with a fence before it; the next one is first
                    movable.append(copy)
                    break
        return sorted(movable, key=self._pending.index)

    def _check(self, copy: VirtualCopy) -> None:
        check_plan(copy.plan)
        targets = copy.plan.device_pages if copy.to_device else copy.plan.host_pages
        if len(np.unique(targets)) != len(targets):
            raise InvariantError(f"{copy!r} writes a page twice: {targets.tolist()}")
        for other in self.pending:
            # Within a direction the order of submit is the order of the copies.
            if other.to_device is not copy.to_device and not self._is_behind(copy, other):
                device_pages = np.intersect1d(copy.plan.device_pages, other.plan.device_pages)
                host_pages = np.intersect1d(copy.plan.host_pages, other.plan.host_pages)
                if len(device_pages) or len(host_pages):
                    raise InvariantError(
                        f"{copy!r} touches device pages {device_pages.tolist()} and host pages "
                        f"{host_pages.tolist()} of {other!r}, which is not over; "
                        "put it behind the last fence of that copy"
                    )

    def _is_behind(self, copy: VirtualCopy, other: VirtualCopy) -> bool:
        """Whether ``copy`` waits for the last layer of ``other``, or of a later copy of that direction."""
        later = [pending.progress for pending in self.pending if pending.to_device is other.to_device]
        later = later[later.index(other.progress) :]
        return any(
            isinstance(fence, LayerFence)
            and fence.progress in later
            and fence.layer == fence.progress.num_layers - 1
            for fence in copy.after
        )
