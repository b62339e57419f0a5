"""What fences have in common: set by a thread, ordered on a stream, several as one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from ._threads import check_process, post_to_loop
from .abc import Fence


class ThreadFence:
    """A one-shot event that a thread sets or fails, and that any thread or the loop can wait for.

    Ownership: whoever runs the work behind the fence must set or fail it, once.
    """

    __slots__ = ("_callbacks", "_done", "_event", "_lock", "_loop", "_pid", "error", "name")

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "fence") -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.name = name

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "passed" if self._done else "open"
        return f"<{type(self).__name__} {self.name} {state}>"

    def passed(self) -> bool:
        """Return whether the fence was set (or failed). Any thread, never blocks."""
        return self._done

    def block(self, stream: object | None = None) -> None:
        """Wait in the calling thread until the fence is set.

        Raises: what the fence was failed with. WrongLoopError: it is open, and whoever would set it is in
            the process that this one was forked from.
        """
        if not self._done:
            check_process(self._pid, f"the fence {self.name!r}", "open a cache of its own")
            with self._lock:
                if self._event is None:
                    self._event = threading.Event()
                    if self._done:
                        self._event.set()
                event = self._event
            event.wait()
        if self.error is not None:
            raise self.error

    def set(self) -> None:
        """Let everybody pass. Any thread; a second call does nothing."""
        self._settle(None)

    def fail(self, error: BaseException) -> None:
        """Let everybody pass with ``error``. Any thread; does nothing when already settled."""
        if not isinstance(error, BaseException):  # a failure must not pass for a success, nor leave waiters
            error = RuntimeError(f"{self.name} failed with {error!r}")
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self.error = error
            self._done = True
            if self._event is not None:
                self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:  # one call each: one that raises must not rob the others
            post_to_loop(self._loop.call_soon_threadsafe, callback)

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once on the loop after the fence has settled. Loop thread only.

        A fence that has settled already runs it at once.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    async def wait(self) -> None:
        """Return when the fence is set.

        Raises: what the fence was failed with. Cancellation: ends the wait only.
        """
        if not self._done:
            reached: asyncio.Future[None] = self._loop.create_future()
            wake = partial(resolve, reached)
            self.add_callback(wake)
            try:
                await reached
            except asyncio.CancelledError:
                with self._lock:  # an open fence must not collect the waiters that gave up
                    self._callbacks = [callback for callback in self._callbacks if callback is not wake]
                raise
        if self.error is not None:
            raise self.error


class EngineFence(ThreadFence):
    """The fence of :meth:`hicache_async.HiCache.host_fence`: the engine sets it when its forward is over.

    Nobody may be handed a page to wait for it with: the one who would set it may be the one who waits.
    """

    __slots__ = ()


POLL_S = 0.001  # epoll rounds a shorter timer up to this, and uvloop rounds it down to a busy loop


class PassedFence:
    """A fence with nothing before it."""

    __slots__ = ()

    def passed(self) -> bool:
        """Return True."""
        return True

    def block(self, stream: object | None = None) -> None:
        """Return at once."""


class Places:
    """Gives the fences of one stream their places, in the order in which they are asked for."""

    __slots__ = ("__weakref__", "_next_place")

    def __init__(self) -> None:
        self._next_place = 0

    def place(self, num_fences: int = 1) -> int:
        """Return the sequence of the first of the next ``num_fences`` fences. Loop thread only."""
        first, self._next_place = self._next_place, self._next_place + num_fences
        return first


class OrderedFence:
    """A fence that has a place on a stream: it never passes before one of the same stream with a lower sequence.

    So of several on one stream the highest is behind all of them.

    Attributes:
        stream: which; only compared.
        sequence: its place.
    """

    __slots__ = ("sequence", "stream")

    def __init__(self, stream: Hashable, sequence: int) -> None:
        self.stream = stream
        self.sequence = sequence

    @property
    def is_recorded(self) -> bool:
        """Whether a stream can be ordered behind it, or it has failed; it can where nothing is recorded later."""
        return True

    def ordering(self) -> OrderedFence:
        """Return a fence of the same place that only orders: to block on it never raises what failed here.

        For who uses pages again, and not the bytes that came or went: these have a failure of their own.
        """
        return self

    def passed(self) -> bool:
        """Return whether everything before it has been done, or has failed. Never blocks; any thread."""
        raise NotImplementedError

    def block(self, stream: object | None = None) -> None:
        """Order ``stream`` behind it; without streams the calling thread waits."""
        raise NotImplementedError


class AllFences:
    """Several fences as one; made by :func:`combine`."""

    __slots__ = ("fences",)

    def __init__(self, fences: Sequence[Fence]) -> None:
        self.fences = fences

    def passed(self) -> bool:
        """Return whether all have passed."""
        return all(fence.passed() for fence in self.fences)

    def block(self, stream: object | None = None) -> None:
        """Order ``stream`` behind all of them; without streams the calling thread waits."""
        for fence in self.fences:
            fence.block(stream)


def parts(fence: Fence | None) -> Sequence[Fence]:
    """Return the fences that ``fence`` combines; itself, where it combines none."""
    if fence is None:
        return ()
    return fence.fences if isinstance(fence, AllFences) else (fence,)


def combine(fences: Iterable[Fence | None]) -> Fence | None:
    """Return one fence behind all that are still open, of each stream only the last; None: none is open."""
    still_open: dict[object, Fence] = {}
    for fence in fences:
        for part in parts(fence):
            if part.passed():
                continue
            if not isinstance(part, OrderedFence):
                still_open[part] = part
                continue
            known = still_open.get(part.stream)
            if not isinstance(known, OrderedFence) or known.sequence < part.sequence:
                still_open[part.stream] = part
    if not still_open:
        return None
    behind = tuple(still_open.values())
    return behind[0] if len(behind) == 1 else AllFences(behind)


def engine_fence_in(fence: Fence) -> EngineFence | None:
    """Return an open EngineFence that ``fence`` is or contains; None: there is none."""
    return next((part for part in parts(fence) if isinstance(part, EngineFence) and not part.passed()), None)


def resolve(future: asyncio.Future[None]) -> None:
    """Set a future that may have been cancelled or set before."""
    if not future.done():
        future.set_result(None)


async def until_passed(fence: Fence) -> None:
    """Ask a fence until it has passed, failed or not. Cancellation: ends the wait only."""
    while not fence.passed():  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(POLL_S)


async def poll(fence: Fence) -> None:
    """Wait for a fence that can only be asked. Raises: what failed. Cancellation: ends the wait only."""
    await until_passed(fence)
    fence.block()
