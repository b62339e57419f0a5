"""HubRanks: a group of processes in which rank 0 counts the votes, over TCP."""

from __future__ import annotations

import asyncio
import math
import secrets
from functools import partial
from typing import Self

from .._clock import LoopClock
from ..config import CacheConfig
from ..errors import ConfigError, ConsensusError
from ._book import Book
from ._connection import Connection
from ._frames import Frame, Kind, hear
from ._gathering import Gathering
from ._handshake import SECRET_NBYTES
from ._member import Member, Role
from ._rendezvous import Announcement, Board, Rendezvous
from ._roles import CountingRole, VotingRole
from ._search import Search, incomplete_text
from .ballot import HUB_RANK, Timeouts


class HubRanks(Member):
    """One rank of a group of processes, a :class:`~hicache_async.abc.Ranks`. Made by :meth:`join`.

    Every other rank is connected to rank 0, which decides each ticket once and tells everybody. A group
    that waits for nothing sends nothing. Votes are neither encrypted nor signed once a rank has proved
    itself: the network between the machines has to be one that you trust.

    Ownership: whoever joined leaves, by :meth:`aclose`.
    """

    def __init__(self, config: CacheConfig, book: Book, role: Role, connections: list[Connection]) -> None:
        super().__init__(config.group_rank, config.group_size, book, role)
        self._connections = connections
        self._close_timeout_s = config.consensus_timeout_s

    @classmethod
    async def join(
        cls,
        config: CacheConfig,
        rendezvous: Rendezvous,
        *,
        host: str = "127.0.0.1",
        name: str = "hicache",
        timeout_s: float | None = None,
    ) -> Self:
        """Join the group of ``config.group_size`` ranks, and return when all have come.

        Args:
            config: which rank this is (``group_rank``), and how long the group waits for what.
            rendezvous: a ``torch.distributed`` store that all ranks reach (TCPStore, FileStore, HashStore,
                PrefixStore). Its calls may block: they run in a thread of their own, so give it a client
                that nobody else waits for meanwhile.
            host: where rank 0 listens: an address of one of its interfaces, that the others can reach.
            name: keeps groups apart that share a rendezvous. A group that is restarted while processes of
                the old one may still live needs another name.
            timeout_s: how long to wait for the others; None: ``config.group_timeout_s``.
        Raises:
            ConfigError: ``host`` is no address of one interface of this machine, or ``timeout_s`` no time.
            ConsensusError: ranks did not come in time; it names them.
        Cancellation: leaves nothing open; the others wait on, and this rank may join again.
        """
        board = Board(rendezvous, name)
        limit_s = config.group_timeout_s if timeout_s is None else timeout_s
        if not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise ConfigError(f"timeout_s is {timeout_s!r}; give seconds, more than 0, or None")
        try:
            if config.group_rank == HUB_RANK:
                return await cls._gather(config, board, host, limit_s)
            return await cls._search(config, board, limit_s)
        finally:
            board.close()

    @classmethod
    async def _gather(cls, config: CacheConfig, board: Board, host: str, limit_s: float) -> Self:
        loop = asyncio.get_running_loop()
        secret = secrets.token_bytes(SECRET_NBYTES)
        gathering = Gathering(loop, config.group_size, secret)
        address = await board.address(host)
        try:
            server = await loop.create_server(gathering.new_connection, address, 0)
        except OSError as error:
            raise ConfigError(
                f"host is {host!r}, on which this machine cannot listen ({error}); give an address of its own"
            ) from error
        try:
            async with asyncio.timeout(limit_s):
                listening_host, port = server.sockets[0].getsockname()[:2]
                announcement = Announcement(listening_host, port, secret, config.group_size)
                while True:
                    await board.announce(announcement)
                    await gathering.all_here()
                    await board.withdraw(announcement)
                    if not gathering.missing:  # none went away meanwhile
                        return cls._start(config, gathering.take_links())
        except TimeoutError:
            gathering.dismiss()
            missing = incomplete_text(gathering.missing)
            raise ConsensusError(f"{missing} within {limit_s} s, of a group of {config.group_size}") from None
        finally:
            server.close()
            gathering.close()

    @classmethod
    def _start(cls, config: CacheConfig, links: dict[int, Connection]) -> Self:
        loop = asyncio.get_running_loop()
        book = Book(loop)
        role = CountingRole(book, _timeouts(config), links, LoopClock(loop))
        for rank, link in links.items():
            link.begin(hear(partial(role.on_frame, rank)), partial(role.on_end, rank))
            link.send(Frame(Kind.START))
        return cls(config, book, role, list(links.values()))

    @classmethod
    async def _search(cls, config: CacheConfig, board: Board, limit_s: float) -> Self:
        loop = asyncio.get_running_loop()
        book = Book(loop)

        def make_role(link: Connection) -> VotingRole:
            return VotingRole(book, _timeouts(config), link, LoopClock(loop))

        search = Search(board, config.group_rank, config.group_size, make_role)
        try:
            async with asyncio.timeout(limit_s):
                link, role = await search.find()
        except TimeoutError:
            raise ConsensusError(
                f"rank {config.group_rank} could not join its group within {limit_s} s: {search.trouble}"
            ) from None
        return cls(config, book, role, [link])

    async def aclose(self) -> None:
        """Leave the group: the others count this rank as voting zeros from then on. May be repeated.

        Waits, at most ``consensus_timeout_s``, until the others have heard. When rank 0 has left, every ticket
        that had not settled does so at zeros, on every rank.

        Cancellation: the connections end at once.
        """
        self._leave()
        open_ends = [link.closed for link in self._connections if not link.closed.done()]
        try:
            if open_ends:
                await asyncio.wait(open_ends, timeout=self._close_timeout_s)
        finally:
            for link in self._connections:
                link.abort()
        if open_ends:
            await asyncio.wait(open_ends)


def _timeouts(config: CacheConfig) -> Timeouts:
    return Timeouts(config.consensus_timeout_s, config.ticket_timeout_s, config.group_timeout_s)
