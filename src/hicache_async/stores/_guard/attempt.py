"""Attempts: single tries of a store's operations, which their caller can leave while they still run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from ..._fence import resolve
from ...abc import Clock
from ...errors import StoreUnavailable
from ...types import StopToken


class Deadline:
    """When an operation has to be over, all its attempts together.

    Args:
        on_passed: called then, once, unless it is cancelled before.

    Attributes:
        over: resolves then.
    """

    __slots__ = ("_clock", "_end_s", "_on_passed", "_timer", "over", "timeout_s")

    def __init__(self, clock: Clock, timeout_s: float, on_passed: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_passed = on_passed
        self._clock = clock
        self._end_s = clock.monotonic() + timeout_s
        self._timer = clock.call_later(timeout_s, self._pass)

    @property
    def left_s(self) -> float:
        """Seconds until it passes."""
        return 0.0 if self.over.done() else self._end_s - self._clock.monotonic()

    def cancel(self) -> None:
        """Let it never pass."""
        self._timer.cancel()

    async def pause(self, delay_s: float) -> None:
        """Return after ``delay_s``, by the clock of the deadline; at once for 0."""
        if delay_s <= 0:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(delay_s, partial(resolve, over))
        try:
            await over
        finally:
            timer.cancel()

    def _pass(self) -> None:
        self._on_passed()
        resolve(self.over)


class Attempts:
    """Run attempts as tasks of their own, and keep those that outlive their caller until they have ended.

    Only an attempt at a lookup is cancelled: it fills no buffer. One at a read is told to stop and left
    alone; while it runs, its stop token is busy, and its buffers belong to it.
    """

    def __init__(self) -> None:
        self._left: set[asyncio.Task[object]] = set()

    @property
    def num_left(self) -> int:
        """How many run that nobody waits for any more."""
        return len(self._left)

    async def run(
        self,
        attempt: Callable[[], Awaitable[object]],
        deadline: Deadline,
        stop: StopToken,
        *,
        is_lookup: bool,
    ) -> object:
        """Return what ``attempt`` answers.

        Raises: StoreUnavailable: the deadline has passed; the attempt was torn away. Else what it raised.
        Cancellation: leaves the attempt, as the deadline does.
        """

        async def run() -> object:
            return await attempt()

        task = asyncio.get_running_loop().create_task(run(), name="hicache:guarded-call")
        try:
            if not task.done():
                await asyncio.wait((task, deadline.over), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave(task, stop, is_lookup=is_lookup)
            raise
        if not _has_ended(task):
            self._leave(task, stop, is_lookup=is_lookup)
        if not task.done():
            raise StoreUnavailable(f"no answer in {deadline.timeout_s:g} s")
        if task.cancelled():
            raise StoreUnavailable("the call was cancelled, and not by its caller")
        return task.result()

    def _leave(self, task: asyncio.Task[object], stop: StopToken, *, is_lookup: bool) -> None:
        # Of an attempt that was torn away, and bracketed no thread of its own, nobody can tell whether it
        # left one behind: its token stays busy for ever, as its caller's page stays taken.
        was_tracked = stop.tracked
        stop.stop()
        stop.job_started()
        self._left.add(task)

        def ended(task: asyncio.Task[object]) -> None:
            self._left.discard(task)
            has_ended = _has_ended(task)  # whatever it raised has been seen now
            if was_tracked or has_ended:
                stop.job_ended()

        task.add_done_callback(ended)
        if is_lookup:
            task.cancel()


def _has_ended(task: asyncio.Task[object]) -> bool:
    # By itself, even if with a CancelledError of its own, and not torn away by a foreign cancel.
    if not task.done():
        return False
    if task.cancelled():
        return task.cancelling() == 0
    task.exception()  # seen, whether or not anybody is left to hear of it
    return True
