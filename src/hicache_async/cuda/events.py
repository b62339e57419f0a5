"""EventBridge: await the events of a device, through one timer of the loop or through one thread.

A device completes its work by itself and calls nobody. To ask every event by a timer of its own costs a loop more
than the work; here one poller asks the oldest event of each stream, and nobody when nothing waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable

from .._threads import DaemonThreads, post_to_loop
from ..errors import ConfigError, WrongLoopError
from ._waiting import Event, WaitingEvents

TIMER_S = 0.001
"""epoll rounds a shorter timer up to this, and uvloop rounds it down to a busy loop."""

NUM_TURNS = 2
"""Turns of the loop in which events are asked at once, before the timer takes over: a short copy needs no more."""

THREAD_SLEEP_S = 50e-6


class EventBridge:
    """Let coroutines of one loop wait for events of a device.

    Args:
        in_thread: ask in a thread of its own, every 50 us, instead of in the loop every millisecond: a wait
            ends sooner, for more of a core while anything waits.
        timer_s: seconds between two looks of the loop; not below 1 ms.

    Raises:
        ConfigError: a timer below 1 ms.

    **Ownership**: events stay the caller's; each is held until it has completed or nobody waits for it.
    """

    def __init__(self, *, in_thread: bool = False, timer_s: float = TIMER_S) -> None:
        if timer_s < TIMER_S:
            raise ConfigError(
                f"timer_s is {timer_s}; give at least {TIMER_S}, or in_thread=True for shorter waits"
            )
        self._in_thread = in_thread
        self._timer_s = timer_s
        self._waiting = WaitingEvents()
        self._poller: _LoopPoller | _ThreadPoller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._waiting)} waiting, {self.num_queries} queries>"

    @property
    def num_waiting(self) -> int:
        """How many coroutines wait."""
        return len(self._waiting)

    @property
    def num_queries(self) -> int:
        """How often a waiting event was asked so far."""
        return self._waiting.num_queries

    @property
    def is_polling(self) -> bool:
        """Whether a timer or the thread is about to ask; False when nothing waits."""
        return self._poller is not None and self._poller.is_active

    async def wait(self, event: Event, *, stream: Hashable = None, sequence: int = 0) -> None:
        """Return when ``event`` has completed.

        Args:
            event: anything with ``query()``.
            stream: on which it was recorded. Events of one stream complete in the order of their sequence,
                equal ones in that of their waits; it is asked once those before it have completed.
            sequence: its place on the stream.

        Raises: what ``query()`` raises. WrongLoopError: the bridge serves another loop.
        Cancellation: ends the wait only, and the timer with the last one.
        """
        waiting, poller = self._waiting, self._bind()
        if not waiting.is_behind(stream, sequence) and event.query():
            return
        reached: asyncio.Future[None] = poller.loop.create_future()
        waiting.add(stream, sequence, event, reached)
        poller.wake()
        try:
            await reached
        except asyncio.CancelledError:
            if reached.cancelled():  # else it had just been settled
                waiting.gave_up()
                if not waiting:
                    poller.rest()
            raise

    def close(self) -> None:
        """Let go of the thread, if there is one; from now on the loop asks. Loop thread only.

        No wait is ended: what an event stands for may still be going on.
        """
        self._in_thread = False
        if isinstance(self._poller, _ThreadPoller):
            self._poller.close()
            self._poller = _LoopPoller(self._poller.loop, self._waiting, self._timer_s)
            if self._waiting:
                self._poller.wake()

    def _bind(self) -> _LoopPoller | _ThreadPoller:
        loop = asyncio.get_running_loop()
        if self._poller is None:
            self._loop = loop
            self._poller = (
                _ThreadPoller(loop, self._waiting)
                if self._in_thread
                else _LoopPoller(loop, self._waiting, self._timer_s)
            )
        elif loop is not self._loop:
            raise WrongLoopError("this event bridge serves another loop; make one bridge for each loop")
        return self._poller


class _LoopPoller:
    """Ask in the loop: in a few turns at once, then by a timer, and by none when nothing waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiting: WaitingEvents, timer_s: float) -> None:
        self.loop = loop
        self._waiting = waiting
        self._timer_s = timer_s
        self._num_turns = 0
        self._next: asyncio.Handle | None = None

    @property
    def is_active(self) -> bool:
        return self._next is not None

    def wake(self) -> None:
        if self._next is None:
            self._num_turns = 0
            self._next = self.loop.call_soon(self._ask)

    def rest(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _ask(self) -> None:
        self._next = None
        num_settled = self._waiting.settle()
        if not self._waiting:
            return
        self._num_turns = 0 if num_settled else self._num_turns + 1
        if self._num_turns < NUM_TURNS:
            self._next = self.loop.call_soon(self._ask)
        else:
            self._next = self.loop.call_later(self._timer_s, self._ask)


class _ThreadPoller:
    """Look in a thread, which sleeps for good when nothing waits; the loop settles what it has seen to be completed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiting: WaitingEvents) -> None:
        self.loop = loop
        self._waiting = waiting
        self._wanted = threading.Event()
        self._settled = threading.Event()
        self._closed = False
        self._thread = DaemonThreads(1, "hicache-events")
        self._thread.submit(self._look)

    @property
    def is_active(self) -> bool:
        return self._wanted.is_set()

    def wake(self) -> None:
        if not self._wanted.is_set():
            self._wanted.set()

    def rest(self) -> None:
        """Leave it to the thread, which sees that nothing waits."""

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._settled.set()
        self._thread.shutdown()

    def _look(self) -> None:
        post: Callable[..., object] = self.loop.call_soon_threadsafe
        while self._wanted.wait() and not self._closed:
            if self._waiting.has_completed():
                self._settled.clear()
                if self._closed:
                    return
                post_to_loop(post, self._settle)
                self._settled.wait()  # all that have completed until the loop comes to it wake it once
            elif not self._waiting:
                self._wanted.clear()
                if (
                    self._waiting or self._closed
                ):  # one came, or the close did, between the look and the clear
                    self._wanted.set()
            else:
                time.sleep(THREAD_SLEEP_S)

    def _settle(self) -> None:
        self._waiting.settle()
        self._settled.set()
