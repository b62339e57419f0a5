"""Gathering: rank 0 while the others come, with a door that strangers may knock at.

A stranger is given little: a fixed number of bytes, a few seconds, and one of a few places, which is taken
from the one that has said nothing for longest when another one comes.
"""

from __future__ import annotations

import asyncio

from ..abc import TimerHandle
from ._connection import Connection, Conversation
from ._frames import MAX_VALUES, Frame, Kind
from ._handshake import Hello, Verdict, hear_hello, verdict_bytes
from .ballot import HUB_RANK

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 64
"""Connections that have not proved to belong to the group."""


class Gathering:
    """The ranks that have come, on rank 0.

    Attributes:
        links: to those that are here, by rank.

    Ownership: :meth:`close` ends all of it but what :meth:`take_links` returned.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, secret: bytes) -> None:
        self.links: dict[int, Connection] = {}
        self._loop = loop
        self._size = size
        self._secret = secret
        self._strangers: dict[Connection, TimerHandle] = {}  # the oldest first
        self._changed = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        """The ranks that are not here."""
        return [rank for rank in range(self._size) if rank != HUB_RANK and rank not in self.links]

    async def all_here(self) -> None:
        """Return when nobody is missing."""
        while self.missing:
            self._changed.clear()
            await self._changed.wait()

    def new_connection(self) -> Connection:
        """Return the protocol of a connection that somebody opens."""
        return Connection(self._loop, self._meet)

    def take_links(self) -> dict[int, Connection]:
        """Return the links to those that are here; they are the caller's from now on."""
        links, self.links = self.links, {}
        return links

    def dismiss(self) -> None:
        """Tell those who are here that the group will not exist, and who is missing."""
        missing = tuple(self.missing[:MAX_VALUES])
        for link in self.links.values():
            link.send(Frame(Kind.INCOMPLETE, values=missing))

    def close(self) -> None:
        """End strangers, and links that were not taken; what was written to these still goes out."""
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.abort()
        for link in self.links.values():
            link.close()

    def _meet(self, stranger: Connection) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.abort()
        self._strangers[stranger] = self._loop.call_later(HANDSHAKE_TIMEOUT_S, stranger.abort)
        stranger.begin(self._greet(stranger), lambda cause: self._gone(stranger))

    def _greet(self, stranger: Connection) -> Conversation:
        hello = yield from hear_hello(stranger.write, self._secret)
        self._forget(stranger)
        verdict = self._verdict(hello)
        stranger.write(verdict_bytes(self._secret, hello, verdict))
        if verdict is Verdict.WELCOME:
            self.links[hello.rank] = stranger
            self._changed.set()
        else:
            stranger.close()

    def _verdict(self, hello: Hello) -> Verdict:
        if hello.size != self._size or not HUB_RANK < hello.rank < self._size:
            return Verdict.NO_SUCH_RANK
        return Verdict.TAKEN if hello.rank in self.links else Verdict.WELCOME

    def _forget(self, stranger: Connection) -> None:
        timer = self._strangers.pop(stranger, None)
        if timer is not None:
            timer.cancel()

    def _gone(self, connection: Connection) -> None:
        self._forget(connection)
        self.links = {rank: link for rank, link in self.links.items() if link is not connection}
