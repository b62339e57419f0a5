"""Device pages for leases: granted at once, or in turn. Freed pages go to the waiter at the head."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .._fence import resolve
from ..abc import Fence
from ..core.holding import Holding
from ..core.page_table import PageTable
from ..core.pool import NO_PAGES, Grant, Owner
from ..errors import CapacityError
from ..types import Pages, State, Tier
from .context import Context
from .offload import Offloads

COPY_WAIT_S = 1.0
"""How long a load waits for a running copy to give room. Copies take milliseconds; this ends a hung one."""


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Device pages to compute into.

    Attributes:
        pages: only the new pages, int64, in logical order; never a half-full tail handed out before.
        after: block the computing stream (or thread) on it before writing; None: write at once.
    """

    pages: Pages
    after: Fence | None
    _compute_stream: object | None = field(default=None, repr=False)

    def block(self, stream: object | None = None) -> None:
        """Order ``stream`` behind :attr:`after`; without streams the calling thread waits. Any thread.

        ``stream=None`` is the engine's compute stream.

        A page that was evicted a moment ago may still be read by the copy that takes its bytes to the
        host: call this before anything is written, once per allocation.
        """
        if self.after is not None:
            self.after.block(self._compute_stream if stream is None else stream)


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
    Attributes:
        step: its reserve is what the engine's step was granted and has not used.
    """

    def __init__(self, ctx: Context, offloads: Offloads, holdings: Callable[[], Iterable[Holding]]) -> None:
        self._ctx = ctx
        self._offloads = offloads
        self._holdings = holdings
        self._waiters: deque[_Waiter] = deque()
        self.step = PageTable(ctx.device_pool)

    def grant(self, num_pages: int) -> Grant:
        """Take up to ``num_pages`` for a lease, evicting for them. Never waits."""
        ctx = self._ctx
        available = ctx.device_pool.available(fenced=True)
        if available < num_pages and ctx.reuses:
            plan = ctx.room.plan_room(Tier.DEVICE, num_pages)
            self._offloads.submit_evictions(plan.moves)
            available = ctx.device_pool.available(fenced=True)
        elif available < num_pages and ctx.state is State.FAILED:
            self._reclaim()
            available = ctx.device_pool.available(fenced=True)
        return ctx.device_pool.take(min(num_pages, available), Owner.LEASE, fenced=True)

    def _reclaim(self) -> None:
        # Nobody will ever match what the tree holds. Who might still read it is not to be asked of a tree in
        # doubt: so its pages come back when no request holds any of them, and no copy runs.
        pool = self._ctx.device_pool
        if not self._is_moving() and all(holding.table.owned.all() for holding in self._holdings()):
            pool.free(pool.owned_by(Owner.TREE), Owner.TREE)

    async def copies_ended(self) -> bool:
        """Wait for a copy to the host to end, which frees its source for eviction; False: none will soon.

        Raises: ClosedError: the cache is closing. Cancellation: ends the wait only.
        """
        ctx = self._ctx
        settled = self._offloads.next_settled()
        if settled is None or not ctx.reuses:
            return False
        over: asyncio.Future[None] = ctx.loop.create_future()
        settled.add_done_callback(lambda _: resolve(over))
        timer = ctx.clock.call_later(COPY_WAIT_S, lambda: resolve(over))
        try:
            await ctx.until(over)
        finally:
            timer.cancel()
        return settled.done()

    def grant_step(self, num_pages: int) -> int:
        """Take back what the last step has not used; grant up to ``num_pages`` and return how many."""
        self.step.free_reserved()
        self.step = PageTable(self._ctx.device_pool)
        self.pump()
        self.step.reserve(self.grant(num_pages))
        return len(self.step.reserved)

    def trim_step(self, num_pages: int) -> None:
        """Give back what the step was granted here beyond what every rank can grant."""
        if num_pages < len(self.step.reserved):
            self.step.free_reserved(keep_pages=num_pages)
            self.pump()

    def ensure(self, holding: Holding, total_pages: int, *, in_step: bool = False) -> None:
        """Fill the reserve so that ``holding`` can hold ``total_pages``.

        Args:
            in_step: whether pages of the step may be used; they are used first, and with other ranks no
                others, for these might have none.
        Raises: CapacityError: there is no room; nothing is taken.
        """
        missing = holding.table.missing_pages(total_pages)
        from_step = min(missing, len(self.step.reserved)) if in_step else 0
        missing -= from_step
        ctx = self._ctx
        agreed_only = in_step and ctx.ranks.size > 1 and ctx.ranks_lost is None
        may_have = 0 < missing <= ctx.device_pool.capacity and not agreed_only
        grant = self.grant(missing) if may_have else Grant(NO_PAGES)
        if len(grant.pages) < missing:
            got = len(grant.pages)
            ctx.device_pool.give_back(grant, Owner.LEASE)
            raise CapacityError(
                f"{missing} more device pages are needed to hold {total_pages}, {got} of "
                f"{ctx.device_pool.capacity} can be had: preempt a request (release its lease) and try again"
            )
        holding.table.reserve(grant)
        if from_step:
            holding.table.reserve(self.step.take_reserved(from_step))

    def place(self, holding: Holding, total_pages: int) -> Allocation:
        """Hand out what is reserved for ``holding``, until it holds ``total_pages``."""
        table = holding.table
        return Allocation(table.place(total_pages), table.open_fence(), self._ctx.kv.compute_stream)

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
            table, gone = head.holding.table, head.holding.released or head.granted.done()
            if not gone and (missing := table.missing_pages(head.total_pages)):
                table.reserve(self.grant(missing))
            if gone or not table.missing_pages(head.total_pages):
                self._waiters.popleft()
                resolve(head.granted)
            elif self._is_stuck():
                self._refuse(self._waiters.pop())
            else:
                return

    def _is_stuck(self) -> bool:
        ctx = self._ctx
        if ctx.device_pool.settling() or self.step.holds_pages or (ctx.reuses and self._is_moving()):
            return False
        waiting = {waiter.holding for waiter in self._waiters}
        return not any(holding not in waiting and holding.table.holds_pages for holding in self._holdings())

    def _is_moving(self) -> bool:
        # Whether something runs whose end lets device pages go; a call of the store keeps none.
        return not self._offloads.is_idle or any(Tier.DEVICE in move.tiers for move in self._ctx.moves)

    def _refuse(self, waiter: _Waiter) -> None:
        if waiter.granted.done():
            return
        waiter.holding.table.free_reserved(keep_pages=waiter.kept_pages)
        waiter.granted.set_exception(
            CapacityError(
                f"every request that holds device pages waits for more; this one, for {waiter.total_pages} "
                "pages, came last: preempt it (release its lease) and start it again"
            )
        )
