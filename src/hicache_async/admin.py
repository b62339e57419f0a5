"""Admin: what an operator does with a running cache."""

from __future__ import annotations

from collections.abc import Callable

from ._fence import resolve
from .errors import ConfigError
from .flows.context import Context
from .flows.movers import Movers
from .types import Tier


class Admin:
    """Operations beside the request path; ``cache.admin``.

    Args:
        check: raises unless the cache is open and used on its own loop.
    """

    def __init__(self, ctx: Context, movers: Movers, check: Callable[[], None]) -> None:
        self._ctx = ctx
        self._movers = movers
        self._check = check

    async def flush(self, tier: Tier = Tier.STORE) -> None:
        """Wait until what was on its way down to ``tier`` has arrived or was given up.

        Args:
            tier: HOST: running offloads; STORE: these and the backups that follow.
        Raises: ClosedError: the cache is closed, or was while this waited.
        Cancellation: ends the wait only.
        """
        self._check()
        if tier not in (Tier.HOST, Tier.STORE):
            raise ConfigError(f"tier is {tier!r}; things move down to {Tier.HOST} or {Tier.STORE}")
        work = self._movers.offloads.settled() if tier == Tier.HOST else self._movers.drain()
        arrived = self._ctx.loop.create_future()
        waiting = self._ctx.spawn(work, "flush")
        waiting.add_done_callback(lambda _: resolve(arrived))
        try:
            await self._ctx.until(arrived)
        finally:
            waiting.cancel()
