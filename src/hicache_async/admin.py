"""Admin: what an operator does with a running cache."""

from __future__ import annotations

from .flows.context import Context
from .flows.movers import Movers
from .types import Tier


class Admin:
    """Operations beside the request path; ``cache.admin``."""

    def __init__(self, ctx: Context, movers: Movers) -> None:
        self._ctx = ctx
        self._movers = movers

    async def flush(self, tier: Tier = Tier.STORE) -> None:
        """Wait until what was on its way down to ``tier`` has arrived or was given up.

        Args:
            tier: HOST: running offloads; STORE: these and the backups that follow.
        Raises: ClosedError: the cache is closed.
        Cancellation: ends the wait only.
        """
        self._ctx.check_open()
        if tier is Tier.HOST:
            await self._movers.offloads.settled()
        elif tier is Tier.STORE:
            await self._movers.drain()
