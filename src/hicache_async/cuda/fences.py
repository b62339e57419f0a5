"""CudaFence: a point on a stream, known by an event that may be recorded a moment later."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from .._fence import OrderedFence
from .._progress import LayerFence
from ._waiting import Event
from .runtime import Runtime, Stream


class StreamOrder:
    """The fences of one stream: their places, and how far the stream is known to have come.

    Attributes:
        key: what the stream is known by.
        passed: the highest sequence that was seen to have passed; -1: none.
    """

    __slots__ = ("__weakref__", "_next", "key", "passed")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.passed = -1
        self._next = 0

    def place(self, num_fences: int = 1) -> int:
        """Return the sequence of the first of the next ``num_fences`` fences. Loop thread only."""
        first, self._next = self._next, self._next + num_fences
        return first


class CudaFence(OrderedFence):
    """A point on a stream.

    Args:
        order: the stream's.
        sequence: its place there.
        event: returns what was recorded there; called only when it is.
        recording: passes when it is recorded; None: it is. It fails where nothing was queued up to here.
        compute_stream: what ``block(None)`` orders.
    """

    __slots__ = ("_compute_stream", "_error", "_event", "_order", "_runtime", "recording")

    def __init__(
        self,
        runtime: Runtime,
        order: StreamOrder,
        sequence: int,
        event: Callable[[], Event],
        *,
        recording: LayerFence | None = None,
        compute_stream: Stream,
    ) -> None:
        super().__init__(order, sequence)
        self._runtime = runtime
        self._order = order
        self._event = event
        self._compute_stream = compute_stream
        self._error: BaseException | None = None
        self.recording = recording

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "passed" if self.passed() else "open"
        return f"<{type(self).__name__} {self._order.key} #{self.sequence} {state}>"

    @property
    def error(self) -> BaseException | None:
        """What failed here, as far as that is known."""
        return self._error or (None if self.recording is None else self.recording.error)

    @property
    def event(self) -> Event:
        """What is recorded here. Only once ``recording`` has passed."""
        return self._event()

    def passed(self) -> bool:
        """Return whether the stream has come this far, or has failed. Never blocks; any thread."""
        if self.recording is not None:
            if not self.recording.passed():
                return False
            if self.recording.error is not None:
                return True
        if self._error is not None or self._order.passed >= self.sequence:
            return True
        try:
            passed = self.event.query()
        except RuntimeError as lost:  # the device has failed, and will say so for ever
            self._error = lost
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
        if self._error is not None:
            raise self._error
        self._runtime.order(self._compute_stream if stream is None else stream, self.event)
