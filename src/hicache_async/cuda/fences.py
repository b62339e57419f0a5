"""CudaFence: a point on a stream, known by an event that may be recorded a moment later."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from .._fence import OrderedFence, Places
from .._progress import LayerFence
from ._waiting import Event
from .runtime import Runtime, Stream


class StreamOrder(Places):
    """The fences of one stream: their places, and how far the stream is known to have come.

    Attributes:
        key: what the stream is known by.
        passed: the highest sequence that was seen to have passed; -1: none.
    """

    __slots__ = ("key", "passed")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self.passed = -1


class Recorded(Protocol):
    """What a fence stands for.

    Attributes:
        event: behind it; only once it is recorded.
        error: what failed it, once it is recorded. Its event is then behind all that was done of it.
        recording: passes when it is recorded, fails where nothing was; None: it is recorded.
    """

    recording: LayerFence | None

    @property
    def event(self) -> Event: ...

    @property
    def error(self) -> BaseException | None: ...


class CudaFence(OrderedFence):
    """A point on a stream.

    Args:
        order: the stream's; ``sequence``: its place there.
        point: what is there.
        compute_stream: what ``block(None)`` orders.
        only_orders: whether it keeps to itself what failed.
    """

    __slots__ = ("_compute_stream", "_lost", "_only_orders", "_order", "_point", "_runtime")

    def __init__(
        self,
        runtime: Runtime,
        order: StreamOrder,
        sequence: int,
        point: Recorded,
        *,
        compute_stream: Stream,
        only_orders: bool = False,
    ) -> None:
        super().__init__(order, sequence)
        self._runtime = runtime
        self._order = order
        self._point = point
        self._compute_stream = compute_stream
        self._only_orders = only_orders
        self._lost: RuntimeError | None = None

    def ordering(self) -> CudaFence:
        """Return a fence of the same place that raises nothing."""
        return CudaFence(
            self._runtime,
            self._order,
            self.sequence,
            self._point,
            compute_stream=self._compute_stream,
            only_orders=True,
        )

    def __repr__(self) -> str:
        state = "open" if not self.passed() else "passed" if self.error is None else "failed"
        return f"<{type(self).__name__} {self._order.key} #{self.sequence} {state}>"

    @property
    def recording(self) -> LayerFence | None:
        """Passes when a stream can be ordered behind this fence; None: it can."""
        recording = self._point.recording
        return recording.ordering() if recording is not None and self._only_orders else recording

    @property
    def is_recorded(self) -> bool:
        """Whether a stream can be ordered behind it, or it has failed."""
        return self._point.recording is None or self._point.recording.passed()

    @property
    def has_event(self) -> bool:
        """Whether something is recorded here, once ``recording`` has passed; else nothing was done."""
        return self._point.recording is None or self._point.recording.error is None

    @property
    def event(self) -> Event:
        """What is recorded here, if anything is."""
        return self._point.event

    @property
    def error(self) -> BaseException | None:
        """What failed here, as far as that is known."""
        if self._only_orders:
            return None
        if self._point.recording is not None and self._point.recording.error is not None:
            return self._point.recording.error
        return self._lost or self._point.error

    def passed(self) -> bool:
        """Return whether the stream has come this far, or is lost. Never blocks; any thread."""
        if not self.is_recorded:
            return False
        if not self.has_event or self._lost is not None or self._order.passed >= self.sequence:
            return True
        try:
            passed = self.event.query()
        except RuntimeError as lost:  # the device has failed, and will say so for ever
            self._lost = lost
            return True
        if passed:
            self._order.passed = max(self._order.passed, self.sequence)
        return passed

    def block(self, stream: object | None = None) -> None:
        """Order ``stream``, or the engine's compute stream, behind this point.

        Waits in the calling thread only until the point is recorded: a stream that waits for an event which
        is not yet recorded does not wait at all.

        Raises: what failed before it was recorded, or is known to have failed since.
        """
        if self.recording is not None:
            self.recording.block()
        if self.error is not None:
            raise self.error
        if self.has_event:
            self._runtime.order(self._compute_stream if stream is None else stream, self.event)
