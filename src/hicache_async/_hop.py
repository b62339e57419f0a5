"""Hop: one piece of work outside the loop, ended by one sync callback on the loop.

Whatever may be written or read by a thread, a copy engine or a store belongs to a Hop from submit to
:meth:`Hop.settle`. Tasks only wait for ``hop.settled``; cancelling them, natively, by a scope or twice,
frees nothing, so no page can change hands while a thread still touches it. A Hop knows no page: what it
owns is known to ``on_settled``, the only place that may give it back or publish it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from ._threads import post_to_loop
from .errors import InvariantError
from .types import StopToken

T = TypeVar("T")


class Hop(Generic[T]):
    """One thread job, one store call or one submitted copy.

    Attributes:
        result, error: the outcome; both None until settled.
        on_late: called with the error of a call that has failed while its jobs still run, so that nobody
            has to wait for these; the hop settles when they have ended.
    """

    __slots__ = (
        "_is_settled",
        "_on_settled",
        "_registry",
        "_settled",
        "error",
        "name",
        "on_late",
        "result",
        "stop",
        "task",
    )

    def __init__(
        self, name: str, on_settled: Callable[[Hop[T]], None], registry: HopRegistry, priority: int = 0
    ) -> None:
        self.name = name
        self.stop = StopToken(priority)
        self.result: T | None = None
        self.error: BaseException | None = None
        self._is_settled = False
        self._settled: asyncio.Future[None] | None = None
        self.task: asyncio.Task[T] | None = None
        self.on_late: Callable[[BaseException], None] | None = None
        self._on_settled: Callable[[Hop[T]], None] | None = on_settled
        self._registry = registry
        registry.live.add(self)

    def __repr__(self) -> str:
        return f"<Hop {self.name} {'settled' if self._is_settled else 'running'}>"

    @property
    def settled(self) -> asyncio.Future[None]:
        """What resolves to None after ``on_settled`` has run; made when somebody asks for it.

        Wait for it with ``asyncio.wait``, which never cancels what it waits for.
        """
        if self._settled is None:
            self._settled = self._registry.loop.create_future()
            if self._is_settled:
                self._settled.set_result(None)
        return self._settled

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Record the outcome, run ``on_settled`` and wake the waiters. Loop thread, once.

        Raises: InvariantError: the hop had settled before.
        """
        live = self._registry.live
        if self not in live:
            raise InvariantError(f"{self!r} settled twice")
        live.remove(self)
        self.result, self.error = result, error
        # Whose callbacks they are mostly has the hop: let go of them, or both wait for the garbage collector.
        on_settled, self._on_settled, self.on_late = self._on_settled, None, None
        assert on_settled is not None
        try:
            on_settled(self)
        except Exception as bug:  # noqa: BLE001 - a mover's top level: a bug must not vanish in a callback
            self._registry.on_bug(bug)
        finally:
            self._is_settled = True
            if self._settled is not None and not self._settled.done():
                self._settled.set_result(None)

    def call_ended(self, task: asyncio.Task[T]) -> None:
        """Settle as :attr:`task` has ended, once the jobs that it started have, too."""
        result: T | None = None
        error: BaseException | None
        if task.cancelled():
            error = asyncio.CancelledError()
            # A store that lets the CancelledError of something of its own out has ended, not been torn.
            torn = task.cancelling() > 0
        else:
            error, torn = task.exception(), False
            if error is None:
                result = task.result()
        if self.stop.busy:
            # What follows goes on in the context of the call, not in that of a thread's last word.
            self.stop.when_quiet(partial(copy_context().run, self.settle, result, error))
            if error is not None and self.on_late is not None:
                self.on_late(error)
        elif not torn or self.stop.tracked:
            self.settle(result, error)


class HopRegistry:
    """Start hops and know which are live.

    Args:
        loop: where callbacks run.
        on_bug: called with an exception that a completion callback raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_bug: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self.on_bug = on_bug
        self.live: set[Hop[Any]] = set()

    def start_job(
        self, name: str, threads: Executor, fn: Callable[[], T], on_settled: Callable[[Hop[T]], None]
    ) -> Hop[T]:
        """Run ``fn`` on ``threads``; the hop settles when it has returned or raised.

        Raises: RuntimeError: the threads were shut down; no hop was made and nothing changes hands.
        """
        job = threads.submit(fn)
        hop = Hop(name, on_settled, self)

        def report(job: Future[T]) -> None:
            error = asyncio.CancelledError() if job.cancelled() else job.exception()
            result = None if error is not None else job.result()
            post_to_loop(self.loop.call_soon_threadsafe, hop.settle, result, error)

        job.add_done_callback(report)
        return hop

    def start_call(
        self,
        name: str,
        call: Callable[[StopToken], Coroutine[Any, Any, T]],
        on_settled: Callable[[Hop[T]], None],
        *,
        priority: int = 0,
    ) -> Hop[T]:
        """Run a coroutine, mostly a store's, as a task that nobody else waits for or cancels.

        The hop settles when the coroutine has ended *and* the jobs it bracketed with its stop token
        have. A coroutine torn away by a foreign cancel (a loop shutting down) that never bracketed a
        job may have left a thread behind: its hop stays live, and what it owns is never reused.

        Args:
            call: a coroutine function; what it raises is the hop's error.
            priority: of the stop token, for stores where calls queue.
        """
        hop = Hop(name, on_settled, self, priority)
        hop.task = self.loop.create_task(call(hop.stop), name=f"hicache:{name}")
        hop.task.add_done_callback(hop.call_ended)
        return hop
