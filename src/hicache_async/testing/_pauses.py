"""Every pause of every task of a loop, counted; and the ways to cancel a call at the k-th of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import CodeType, CoroutineType, FrameType
from typing import Any, TypeAlias

import anyio

SWALLOWED = "the cancel was swallowed"
LEFT_BLOCK = "the cancel was raised beyond the block that it was for"

Work: TypeAlias = Callable[[], Coroutine[Any, Any, object]]


class Pauses:
    """Counts each time that a task of the running loop suspends or ends, whoever made it, and calls back at one.

    It takes the place of the loop's task factory and goes on to it, so tasks that start eagerly still do.

    Attributes:
        count: pauses since :meth:`watch`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._make_task: Any = self._loop.get_task_factory() or _plain_task
        self._loop.set_task_factory(self._factory)
        self.count = 0
        self._at = 0
        self._strike: Callable[[], None] = lambda: None
        self._as_it_ends = False

    def watch(self, at: int, strike: Callable[[], None], *, as_it_ends: bool = False) -> None:
        """Count from 0, and call ``strike`` in the turn after pause number ``at``, from 1; 0: never.

        Args:
            as_it_ends: call it in the very turn in which what is waited for has come, before the task hears of it.
        """
        self.count, self._at, self._strike, self._as_it_ends = 0, at, strike, as_it_ends

    def paused(self, awaited: object) -> None:
        """Count one pause of a task that now waits for a future, or for the next turn only, or has ended: None."""
        self.count += 1
        if self.count != self._at:
            return
        if self._as_it_ends and isinstance(awaited, asyncio.Future):
            # The task adds its own callback when it gets the future, so this one is called before it.
            awaited.add_done_callback(lambda _: self._strike())
        else:
            self._loop.call_soon(self._strike)

    def _factory(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        return self._make_task(loop, Counted(coroutine, self.paused), **options)


def _plain_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


class Counted(Coroutine[Any, Any, Any]):
    """A coroutine that tells each time it suspends or ends, and is else the one inside."""

    def __init__(self, inner: CoroutineType[Any, Any, Any], paused: Callable[[object], None]) -> None:
        self._inner = inner
        self._paused = paused

    def send(self, value: object, /) -> object:
        """Run up to the next suspension."""
        return self._told(lambda: self._inner.send(value))

    def throw(self, *error: Any) -> object:
        """Raise inside, and run up to the next suspension."""
        return self._told(lambda: self._inner.throw(*error))

    def _told(self, step: Callable[[], object]) -> object:
        awaited = None
        try:
            awaited = step()
        finally:
            self._paused(awaited)
        return awaited

    def close(self) -> None:
        """End it."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only a task runs this")

    # What anyio and debuggers look at

    @property
    def cr_await(self) -> object:
        """What it waits for."""
        return self._inner.cr_await

    @property
    def cr_code(self) -> CodeType:
        """Its code."""
        return self._inner.cr_code

    @property
    def cr_frame(self) -> FrameType | None:
        """Where it is."""
        return self._inner.cr_frame

    @property
    def cr_running(self) -> bool:
        """Whether it runs."""
        return self._inner.cr_running

    @property
    def cr_suspended(self) -> bool:
        """Whether it is suspended."""
        return self._inner.cr_suspended


class Cancel:
    """One call and one way to cancel it: natively.

    Attributes:
        name: of the way.
        as_it_ends: whether it strikes in the turn in which what the call waits for has come.
        closes_loop: whether the loop ends with it.
        task: what runs the call.
        struck: whether the cancel came before the call was over.
    """

    name = "natively"
    as_it_ends = False
    closes_loop = False

    def __init__(self, work: Work) -> None:
        self._work = work
        self.struck = False
        self.strikes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.get_running_loop().create_task(self._run(), name="exam:call")

    async def _run(self) -> object:
        return await self._work()

    def strike(self) -> None:
        """Cancel the call; does nothing when it is over."""
        if not self.task.done() and not self.struck:
            self.struck = True
            self._cancel()
        if not self.strikes.done():
            self.strikes.set_result(None)

    def _cancel(self) -> None:
        self.task.cancel()

    def complaint(self) -> str | None:
        """Say what became of the cancel of the call, which is over, if it is not what should have; None: it is."""
        return SWALLOWED if self.struck and not self.task.cancelled() else None

    @property
    def error(self) -> BaseException | None:
        """What the call raised, other than that it was cancelled."""
        return None if self.task.cancelled() else self.task.exception()


class Twice(Cancel):
    """Cancelled, and again in the turn in which it deals with the first cancel."""

    name = "twice"

    def _cancel(self) -> None:
        self.task.cancel()
        asyncio.get_running_loop().call_soon(self.task.cancel)


class AsItEnds(Cancel):
    """Cancelled in the turn in which what it waits for has come: it must not be lost."""

    name = "as the wait ends"
    as_it_ends = True


class ByScope(Cancel):
    """Cancelled by an anyio scope, which cancels again at every await until its block is left."""

    name = "by an anyio scope"

    def __init__(self, work: Work) -> None:
        self._scope = anyio.CancelScope()
        super().__init__(work)

    async def _run(self) -> object:
        with self._scope:
            return await self._work()
        return None

    def _cancel(self) -> None:
        self._scope.cancel()

    def complaint(self) -> str | None:
        """Say whether the cancel left its scope; one that comes too late ends nothing, so it may end well."""
        return LEFT_BLOCK if self.task.cancelled() else None


class ByTimeout(Cancel):
    """Cancelled by ``asyncio.timeout``."""

    name = "by asyncio.timeout"

    def __init__(self, work: Work) -> None:
        self._limit: asyncio.Timeout | None = None
        self._ended_by_limit = False
        super().__init__(work)

    async def _run(self) -> object:
        at_once = asyncio.get_running_loop().time() if self.struck else None
        limit = self._limit = asyncio.timeout_at(at_once)
        try:
            async with limit:
                return await self._work()
        except TimeoutError:
            self._ended_by_limit = True
            if not limit.expired():
                raise
        return None

    def _cancel(self) -> None:
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def complaint(self) -> str | None:
        """Say whether the time ran out and nothing came of it."""
        if self.task.cancelled():
            return LEFT_BLOCK
        ran_out = self._limit is not None and self._limit.expired()
        return SWALLOWED if ran_out and not self._ended_by_limit else None


class ByShutdown(Cancel):
    """Cancelled with everything else when its loop ends, as ``asyncio.run`` does."""

    name = "by the end of its loop"
    closes_loop = True

    def _cancel(self) -> None:
        pass  # whoever runs the loop sees the strike and ends it, a turn or two later

    def complaint(self) -> str | None:
        """Say whether the call was swallowed; one that was over before its loop ended was not."""
        was_cancelled = self.task.cancelled() or self.task.cancelling() == 0
        return None if was_cancelled else SWALLOWED


WAYS: dict[str, type[Cancel]] = {
    way.name: way for way in (Cancel, Twice, AsItEnds, ByScope, ByTimeout, ByShutdown)
}
