"""Book: what one rank waits for, what it has heard, and the loss that ends it all. Sync, on one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ConsensusError
from .ballot import RecentResults, Result


@dataclass(slots=True)
class _Pending:
    num_values: int
    waiters: list[asyncio.Future[Result]] = field(default_factory=list)


class Book:
    """The tickets of one rank: voted for, settled, waited for.

    Attributes:
        ended: why nothing settles here any more; None: it still does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.ended: str | None = None
        self._loss: str | None = None
        self._pending: dict[bytes, _Pending] = {}
        self._results = RecentResults()
        self._callbacks: list[Callable[[ConsensusError], None]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a ticket that this rank voted for has not settled."""
        return bool(self._pending)

    def open(self, ticket: bytes, num_values: int) -> bool:
        """Note a vote; returns whether it is the first for a ticket that has not settled."""
        if self.ended is not None or ticket in self._pending or self._results.get(ticket) is not None:
            return False
        self._pending[ticket] = _Pending(num_values)
        return True

    def result(self, ticket: bytes) -> Result | None:
        """Return what a ticket settled at; None: it has not, or that is forgotten."""
        return self._results.get(ticket)

    def wait(self, ticket: bytes) -> asyncio.Future[Result]:
        """Return a future, the caller's alone, of a ticket that was voted for and has not settled."""
        future: asyncio.Future[Result] = self.loop.create_future()
        self._pending[ticket].waiters.append(future)
        return future

    def settle(self, ticket: bytes, result: Result) -> None:
        """Note a result and wake who waits for it; a second one for a ticket does nothing."""
        if self.ended is not None or self._results.get(ticket) is not None:
            return
        self._results.add(ticket, result)
        pending = self._pending.pop(ticket, None)
        for waiter in pending.waiters if pending else ():
            if not waiter.done():  # a cancelled one
                waiter.set_result(result)

    def settle_all_at_zeros(self) -> None:
        """Settle what is waited for at zeros, because nobody counts votes any more."""
        for ticket, pending in list(self._pending.items()):
            self.settle(ticket, (0,) * pending.num_values)

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        """Call ``callback`` when a rank is lost; at once if one has been."""
        if self._loss is not None:
            callback(ConsensusError(self._loss))
        else:
            self._callbacks.append(callback)

    def lose(self, reason: str) -> None:
        """Tell of a lost rank: callbacks first, then the waiters raise. The first loss counts."""
        if self.ended is not None:
            return
        self._loss = self.ended = reason
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(ConsensusError(reason))
            except Exception as bug:  # noqa: BLE001 - the others must hear of the loss whatever one of them does
                context = {"message": "a callback of when_lost raised", "exception": bug}
                self.loop.call_exception_handler(context)
        self._release_waiters(reason)

    def close(self, reason: str) -> None:
        """End without a loss, because this rank leaves: waiters raise, callbacks hear nothing."""
        self._callbacks.clear()
        if self.ended is None:
            self.ended = reason
            self._release_waiters(reason)

    def _release_waiters(self, reason: str) -> None:
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_exception(ConsensusError(reason))
