"""The copies and fences of a VirtualDevice; a fence raises where a real one would let wrong bytes pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .._fence import OrderedFence, Places, parts
from .._progress import CopyProgress, LayerFence
from ..abc import CopyPlan, Fence, PagedBytes
from ..memory.copying import copy_layer
from ..memory.host import POISON
from ..memory.layout import page_runs
from ..types import Pages

UNDEFINED = 0xDB
"""What the targets of a started copy hold until their layer has moved."""


class NotReadyError(AssertionError):
    """Bytes were asked for before they have moved: with a real device a wrong result or a deadlock."""


class NotRecordedError(AssertionError):
    """A stream was to wait for what is not recorded yet: with a real device it would not wait at all."""


def poison(paged: PagedBytes, pages: Pages, value: int = POISON) -> None:
    """Fill pages of a DeviceKV or a HostArena; called when pages are freed, it exposes a late reader."""
    for layer in range(paged.num_layers):
        for plane in paged.planes(layer):
            plane.numpy()[pages] = value


class VirtualStream(Places):
    """Gives work its place; fences know the stream by this object, so no two devices have one in common.

    Attributes:
        queued: what an engine computes on it and has not ended, oldest first.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.queued: deque[VirtualProgress] = deque()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class VirtualProgress(CopyProgress):
    """How far some work has come, and how much of it is recorded.

    Attributes:
        num_recorded: layers behind which a stream can be ordered.
    """

    __slots__ = ("num_recorded",)

    def __init__(self, num_layers: int, name: str, stream: VirtualStream, *, recorded: bool = True) -> None:
        super().__init__(num_layers, name, stream, stream.place(num_layers))
        self.num_recorded = num_layers if recorded else 0


class VirtualFence(LayerFence):
    """A fence that never waits: blocking on it too early is the caller's bug."""

    __slots__ = ()
    progress: VirtualProgress

    @property
    def is_recorded(self) -> bool:
        """Whether a stream can be ordered behind it, or it has failed before it came to that."""
        return self.progress.num_recorded > self.layer or self.passed()

    def block(self, stream: object | None = None) -> None:
        """Return, or raise what failed the copy.

        Raises:
            NotRecordedError: the test has not recorded this layer yet.
            NotReadyError: the test has not moved this layer yet.
        """
        if not self.is_recorded:
            raise NotRecordedError(f"{self!r}: used before it was recorded; await recorded() first")
        if not self.passed():
            raise NotReadyError(f"{self!r}: used before its bytes have moved; advance() the device first")
        super().block(stream)


class VirtualCopy:
    """One submitted copy.

    Attributes:
        plan: what moves; ``to_device``: in which direction.
        after: the fences it stays behind.
    """

    def __init__(
        self,
        plan: CopyPlan,
        to_device: bool,
        after: Sequence[Fence],
        progress: VirtualProgress,
        on_failing: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.to_device = to_device
        self.after = tuple(after)
        self.progress = progress
        self._on_failing = on_failing
        self._is_started = False
        self._failure: BaseException | None = None
        self._fails_from = 0

    def __repr__(self) -> str:
        return f"<VirtualCopy {self.progress.name} {self.num_done}/{self.progress.num_layers} layers>"

    @property
    def num_done(self) -> int:
        """Layers that have moved."""
        return self.progress.num_done

    def is_ready(self) -> bool:
        """Return whether everything that this copy stays behind has passed."""
        return all(fence.passed() for fence in self.after)

    def is_behind(self, other: VirtualCopy) -> bool:
        """Return whether this copy waits for the last layer of ``other``, or for what follows that on its stream."""
        stream, end = other.progress.stream, other.progress.first_sequence + other.progress.num_layers
        return any(
            isinstance(part, OrderedFence) and part.stream is stream and part.sequence >= end - 1
            for fence in self.after
            for part in parts(fence)
        )

    def fail(self, error: BaseException, layer: int = 0) -> None:
        """Fail what has not moved of the layers from ``layer`` on; a second call does nothing.

        It fails at its turn, when what it stays behind has passed and the copies before it in its
        direction are over, for no fence passes before an earlier one of its stream.
        """
        assert 0 <= layer < self.progress.num_layers, f"{self!r} has no layer {layer} to fail at"
        if self._failure is None:
            self._failure, self._fails_from = error, layer
            self._on_failing()

    def take_turn(self) -> bool:
        """Start, or fail, if it has come to that; returns whether a layer may move. For the first in its direction."""
        if self.progress.is_over or not self.is_ready():
            return False
        if self.progress.num_recorded and not self._is_started:
            self._start()
        self._fail_if_due()
        return self.may_move

    @property
    def may_move(self) -> bool:
        """Whether the next layer may move, once its turn has come."""
        return not self.progress.is_over and self.num_done < self.progress.num_recorded

    def move_layer(self) -> None:
        """Move the next layer, reading the source as it is now."""
        plan = self.plan
        if self.to_device:
            runs = page_runs(plan.host_pages, plan.device_pages)
            copy_layer(plan.arena, plan.kv, self.num_done, runs)
        else:
            runs = page_runs(plan.device_pages, plan.host_pages)
            copy_layer(plan.kv, plan.arena, self.num_done, runs)
        self.progress.advance()
        self._fail_if_due()

    def _start(self) -> None:
        # From now on what the targets held is gone, unless a fence before it has failed: then nothing is written.
        self._is_started = True
        try:
            for fence in self.after:
                fence.block()
        except Exception as error:  # noqa: BLE001 - whatever a fence carries is what this copy fails with
            self.progress.fail(error)
            return
        if self.to_device:
            poison(self.plan.kv, self.plan.device_pages, UNDEFINED)
        else:
            poison(self.plan.arena, self.plan.host_pages, UNDEFINED)

    def _fail_if_due(self) -> None:
        if self._failure is not None and self.num_done >= self._fails_from:
            self.progress.fail(self._failure)
