"""Device pages for leases: granted at once, or in turn. Freed pages go to the waiter at the head."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .._fence import combine
from ..core.holding import Holding
from ..core.pool import Grant, Owner
from ..errors import CapacityError
from ..types import Tier
from .context import Context
from .offload import Offloads


@dataclass(slots=True, eq=False)
class _Waiter:
    holding: Holding
    total_pages: int
    kept_pages: int
    """The reserve it came with, which stays its own when it is refused."""
    granted: asyncio.Future[None]


class DeviceRoom:
    """Grant device pages, evicting what was used longest ago.

    Those who wait form one FIFO. What becomes free goes into the reserve of the one at its head, not
    to a common list, so a big request is not starved by small ones.

    Args:
        holdings: all live holdings, to tell whether anybody is left who could give something back.
    """

    def __init__(self, ctx: Context, offloads: Offloads, holdings: Callable[[], Iterable[Holding]]) -> None:
        self._ctx = ctx
        self._offloads = offloads
        self._holdings = holdings
        self._waiters: deque[_Waiter] = deque()

    def grant(self, num_pages: int) -> Grant:
        """Take up to ``num_pages`` for a lease, evicting for them. Never waits."""
        ctx = self._ctx
        available = ctx.device_pool.available(fenced=True)
        if available < num_pages and ctx.reuses:
            plan = ctx.room.plan_room(Tier.DEVICE, num_pages)
            self._offloads.submit_evictions(plan.moves)
            available = ctx.device_pool.available(fenced=True)
        return ctx.device_pool.take(min(num_pages, available), Owner.LEASE, fenced=True)

    def ensure(self, holding: Holding, total_pages: int) -> None:
        """Fill the reserve so that ``holding`` can hold ``total_pages``.

        Raises: CapacityError: there is no room; nothing is taken.
        """
        missing = holding.table.missing_pages(total_pages)
        if not missing:
            return
        ctx = self._ctx
        grant = (
            self.grant(missing) if missing <= ctx.device_pool.capacity else Grant(holding.table.reserved[:0])
        )
        if len(grant.pages) < missing:
            got = len(grant.pages)
            self._give_back(grant)
            raise CapacityError(
                f"{missing} more device pages are needed to hold {total_pages}, {got} of {ctx.device_pool.capacity} "
                "can be had: preempt a request (release its lease) and try again"
            )
        holding.table.reserve(grant)

    def _give_back(self, grant: Grant) -> None:
        self._ctx.device_pool.free(grant.pages, Owner.LEASE, after=combine(grant.after))

    async def wait(self, holding: Holding, total_pages: int) -> None:
        """As :meth:`ensure`, but wait in turn while somebody can still give pages back.

        Raises: CapacityError: all who hold device pages wait for some themselves, or there are not so many.
        Cancellation: what was granted so far stays in the reserve of the lease.
        """
        ctx = self._ctx
        if holding.table.missing_pages(total_pages) > ctx.device_pool.capacity - len(holding.table):
            self.ensure(holding, total_pages)
        waiter = _Waiter(holding, total_pages, len(holding.table.reserved), ctx.loop.create_future())
        self._waiters.append(waiter)
        self.pump()
        try:
            await ctx.until(waiter.granted)
            holding.check_live()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.pump()

    def pump(self) -> None:
        """Serve the waiters in order; called whenever pages came back or lost a pin."""
        while self._waiters:
            head = self._waiters[0]
            missing = head.holding.table.missing_pages(head.total_pages)
            if missing and not head.holding.released:
                head.holding.table.reserve(self.grant(missing))
                missing = head.holding.table.missing_pages(head.total_pages)
            if not missing or head.holding.released:
                self._waiters.popleft()
                if not head.granted.done():
                    head.granted.set_result(None)
            elif self._is_stuck():
                self._refuse(self._waiters.pop())
            else:
                return

    def _is_stuck(self) -> bool:
        if self._ctx.hops.live or self._ctx.device_pool.settling():
            return False
        waiting = {waiter.holding for waiter in self._waiters}
        return not any(holding not in waiting and holding.table.holds_pages for holding in self._holdings())

    def _refuse(self, waiter: _Waiter) -> None:
        if waiter.granted.done():
            return
        waiter.holding.table.free_reserved(keep_pages=waiter.kept_pages)
        waiter.granted.set_exception(
            CapacityError(
                f"every request that holds device pages waits for more; this one, for {waiter.total_pages} pages, "
                "came last: preempt it (release its lease) and start it again"
            )
        )
