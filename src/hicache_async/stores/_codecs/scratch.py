"""Scratch: how many bytes of working memory the calls of one store may have at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...errors import StoreUnavailable
from ...types import StopToken


@dataclass(slots=True, eq=False)
class _Waiter:
    stop: StopToken
    nbytes: int
    admitted: asyncio.Future[bool]


class Scratch:
    """Admit calls while their bytes fit; others wait, by priority, equal ones in order of arrival.

    Args:
        max_bytes: a call that needs more is counted as this much, and so has all to itself.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._free = max_bytes
        self._waiting: list[_Waiter] = []
        self._closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes that are taken now."""
        return self.max_bytes - self._free

    async def take(self, nbytes: int, stop: StopToken) -> int:
        """Return how many bytes were taken, once there are so many; they are to be given back.

        Raises: StoreUnavailable: the store was closed. Cancellation: nothing was taken.
        """
        if self._closed:
            raise StoreUnavailable("the store was closed; open another one")
        nbytes = min(nbytes, self.max_bytes)
        if not self._waiting and nbytes <= self._free:
            self._free -= nbytes
            return nbytes
        waiter = _Waiter(stop, nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            if not await waiter.admitted:
                raise StoreUnavailable("the store was closed while the call waited")
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()  # smaller ones may have waited behind it
            elif waiter.admitted.result():
                self.give_back(nbytes)
            raise
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken, and admit who waits for it."""
        self._free += nbytes
        self._admit()

    def close(self) -> None:
        """Turn away who waits, and whoever comes later."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.admitted.done():
                waiter.admitted.set_result(False)

    def _admit(self) -> None:
        while self._waiting:
            first = max(self._waiting, key=lambda waiter: waiter.stop.priority)
            if first.nbytes > self._free:
                return
            self._waiting.remove(first)
            if not first.admitted.done():  # else cancelled in this very turn
                self._free -= first.nbytes
                first.admitted.set_result(True)
