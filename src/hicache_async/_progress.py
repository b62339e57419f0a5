"""CopyProgress: how far one copy has come, and the light fence of each of its layers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable

from ._fence import OrderedFence, resolve
from ._threads import check_process, post_to_loop

_HAND_OVER_S = 1e-6  # in effect about 60 us, the timer slack of Linux


class CopyProgress:
    """Count the layers of one copy that have moved, and wake who waits for them.

    One object for the whole copy, so that a fence per layer costs little.

    Args:
        name: for messages.
        stream, first_sequence: where on which queue the first layer stands; the next ones follow it.
    Attributes:
        num_done: layers that have moved.
        error: what ended the copy early; the layers from ``num_done`` on have failed.
    """

    __slots__ = (
        "_callbacks",
        "_lock",
        "_pid",
        "error",
        "first_sequence",
        "name",
        "num_done",
        "num_layers",
        "stream",
    )

    def __init__(self, num_layers: int, name: str, stream: Hashable, first_sequence: int) -> None:
        self.num_layers = num_layers
        self.name = name
        self.stream = stream
        self.first_sequence = first_sequence
        self.num_done = 0
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._callbacks: dict[int, list[Callable[[], None]]] = {}

    def is_settled(self, layer: int) -> bool:
        """Return whether ``layer`` has moved or failed. Any thread, never blocks."""
        return self.num_done > layer or self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether no more layer will move."""
        return self.is_settled(self.num_layers - 1)

    def advance(self) -> None:
        """Declare the next layer moved. Only the one who copies calls it."""
        with self._lock:
            self.num_done += 1
            callbacks = self._callbacks.pop(self.num_done - 1, [])
        for callback in callbacks:
            callback()
        if callbacks and not self.is_over:
            # Who was woken needs the interpreter, which a loop of short copies lets go only for moments
            # too short to wake up in: without a pause it would wait for the switch interval, 5 ms.
            time.sleep(_HAND_OVER_S)

    def fail(self, error: BaseException) -> None:
        """Declare the remaining layers failed; does nothing when the copy is over."""
        with self._lock:
            if self.is_over:
                return
            self.error = error
            callbacks = [callback for waiting in self._callbacks.values() for callback in waiting]
            self._callbacks.clear()
        for callback in callbacks:
            callback()

    def block(self, layer: int) -> None:
        """Wait in the calling thread until ``layer`` is settled."""
        settled = threading.Event()
        self.when_settled(layer, settled.set)
        settled.wait()

    def when_settled(self, layer: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in the thread that settles ``layer``; at once when it is settled.

        Raises: WrongLoopError: in a forked child, where no thread would.
        """
        check_process(self._pid, f"the copy {self.name!r}", "open a cache of its own")
        with self._lock:
            if not self.is_settled(layer):
                self._callbacks.setdefault(layer, []).append(callback)
                return
        callback()

    def forget(self, layer: int, callback: Callable[[], None]) -> None:
        """Take back a callback: a copy that hangs must not collect the waiters that gave up."""
        with self._lock:
            if waiting := self._callbacks.get(layer):
                self._callbacks[layer] = [other for other in waiting if other is not callback]


class LayerFence(OrderedFence):
    """Passed when the layers of a copy up to and including one have moved, or have failed."""

    __slots__ = ("_only_orders", "layer", "progress")

    def __init__(self, progress: CopyProgress, layer: int, *, only_orders: bool = False) -> None:
        super().__init__(progress.stream, progress.first_sequence + layer)
        self.progress = progress
        self.layer = layer
        self._only_orders = only_orders

    def __repr__(self) -> str:
        state = "open" if not self.passed() else "passed" if self.error is None else "failed"
        return f"<{type(self).__name__} {self.progress.name} layer {self.layer} {state}>"

    @property
    def error(self) -> BaseException | None:
        """What failed this layer, if anything did."""
        return None if self._only_orders or self.progress.num_done > self.layer else self.progress.error

    def ordering(self) -> LayerFence:
        """Return a fence of the same place that raises nothing."""
        return type(self)(self.progress, self.layer, only_orders=True)

    def passed(self) -> bool:
        """Return whether the layer has moved or failed. Never blocks; any thread."""
        return self.progress.is_settled(self.layer)

    def block(self, stream: object | None = None) -> None:
        """Wait in the calling thread.

        Raises: what failed the copy.
        """
        if not self.passed():
            self.progress.block(self.layer)
        if self.error is not None:
            raise self.error

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in the thread that settles the layer; at once when it is settled."""
        self.progress.when_settled(self.layer, callback)

    async def reached(self) -> None:
        """Return when the layer has moved or failed. Cancellation: ends the wait only."""
        if self.passed():
            return
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            post_to_loop(loop.call_soon_threadsafe, resolve, settled)

        self.when_settled(wake)
        try:
            await settled
        except asyncio.CancelledError:
            self.progress.forget(self.layer, wake)
            raise

    async def wait(self) -> None:
        """Return when the layer has moved.

        Raises: what failed the copy. Cancellation: ends the wait only.
        """
        await self.reached()
        if self.error is not None:
            raise self.error
