"""Search: how any rank but 0 finds rank 0, trying again for as long as what it finds is not it.

What a rendezvous holds may be old: the address of a group that has ended, where now nobody listens, or
another program does. Rank 0 replaces it when it comes. So an address that does not lead to rank 0 of this
group is a reason to look again, and is told of only when the time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import ConsensusError
from ._connection import Connection, Conversation, Refused
from ._frames import Kind, hear, read_frame
from ._gathering import HANDSHAKE_TIMEOUT_S
from ._handshake import say_hello
from ._rendezvous import Announcement, Board, RendezvousError
from ._roles import VotingRole

RETRY_S = 0.05


class Search:
    """The way of one rank to rank 0.

    Args:
        board: where rank 0 announces itself.
        make_role: called with the connection, once the group exists.

    Attributes:
        trouble: what the last attempt came to.
    """

    def __init__(
        self, board: Board, rank: int, size: int, make_role: Callable[[Connection], VotingRole]
    ) -> None:
        self.trouble = "the rendezvous does not answer, or rank 0 has not announced itself"
        self._board = board
        self._rank = rank
        self._size = size
        self._make_role = make_role
        self._loop = asyncio.get_running_loop()

    async def find(self) -> tuple[Connection, VotingRole]:
        """Return the connection to rank 0 once the group exists; tries again and again.

        Raises: ConsensusError: rank 0 gave up, because others did not come.
        Cancellation: leaves nothing open.
        """
        while True:
            try:
                return await self._approach(await self._board.read())
            except (RendezvousError, Refused, OSError) as error:
                self.trouble = str(error) or "what rank 0 announced cannot be reached"  # a time that is over
            await asyncio.sleep(RETRY_S)

    async def _approach(self, announcement: Announcement) -> tuple[Connection, VotingRole]:
        started: asyncio.Future[VotingRole | Exception] = self._loop.create_future()
        host, port = announcement.host, announcement.port
        where = f"what listens on {host} port {port}"

        def fail(error: Exception) -> None:
            if not started.done():
                started.set_result(error)  # not as its exception, which nobody may come to retrieve

        def converse(connection: Connection) -> Conversation:
            try:
                yield from say_hello(connection.write, announcement.secret, self._rank, self._size)
            except Refused as refusal:
                fail(Refused(f"{where} refuses: {refusal}"))
                raise
            limit.cancel()
            self.trouble = "rank 0 is there, but others have not come"
            frame = yield from read_frame()
            if frame.kind is not Kind.START:
                fail(ConsensusError(incomplete_text(frame.values)))
                raise Refused
            role = self._make_role(connection)
            connection.begin(hear(role.on_frame), role.on_end)
            started.set_result(role)

        def meet(connection: Connection) -> None:
            connection.begin(
                converse(connection), lambda cause: fail(Refused(f"{where} ended the connection"))
            )

        connection = Connection(self._loop, meet)
        limit = self._loop.call_later(
            HANDSHAKE_TIMEOUT_S, lambda: fail(Refused(f"{where} does not answer as rank 0 would"))
        )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._loop.create_connection(lambda: connection, host, port)
            outcome = await started
            if isinstance(outcome, Exception):
                raise outcome
        except BaseException:
            connection.abort()
            raise
        finally:
            limit.cancel()
        return connection, outcome


def incomplete_text(missing: tuple[int, ...] | list[int]) -> str:
    """Return in words who did not come."""
    ranks = ", ".join(map(str, missing))
    return f"{'rank' if len(missing) == 1 else 'ranks'} {ranks} did not come"
