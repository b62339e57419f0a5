"""Prefetch, L3 to L2: gates, look, agree, then fetch; ended by completion, deadline, stop or cancel."""

from __future__ import annotations

import asyncio

from .._fence import resolve
from .._log import logger
from ..abc import Store, TimerHandle
from ..config import PrefetchPolicy
from ..core.holding import Holding
from ..core.node import Node
from ..types import PrefetchResult, Stop
from .calls import count_prefix
from .charge import Charge
from .context import Context, settled_within
from .fetch import Fetch
from .gates import ask_in_batches, is_worth_fetching, outcome, refusal_to_ask
from .offload import Offloads

STOP_GRACE_S = 0.02
"""How long a stopped prefetch waits for the page in hand, so that what has arrived is not thrown away."""


class Prefetch:
    """One request's prefetch. It runs in a task of the cache; whoever waits for it may go at any time."""

    __slots__ = (
        "_charges", "_ctx", "_fetch", "_holding", "_offloads", "_result", "_start_page", "_stop_reason",
        "_stopped", "_ticket", "_timer", "attached_page",
    )  # fmt: skip

    def __init__(
        self, ctx: Context, offloads: Offloads, holding: Holding, policy: PrefetchPolicy, ticket: bytes
    ) -> None:
        self._ctx = ctx
        self._offloads = offloads
        self._holding = holding
        self._ticket = ticket
        self._start_page = self.attached_page = 0
        self._charges: list[Charge] = []
        self._fetch: Fetch | None = None
        self._stop_reason: Stop | None = None
        self._stopped: asyncio.Future[None] = ctx.loop.create_future()
        self._result: asyncio.Future[PrefetchResult] = ctx.loop.create_future()
        asked = (holding.limit_pages - self._local_pages()) * ctx.page_tokens
        deadline_s = policy.deadline_s(asked, ctx.config)
        self._timer: TimerHandle | None = None
        if deadline_s is not None:
            self._timer = ctx.clock.call_later(deadline_s, self._expire)
        ctx.prefetches.add(self)
        ctx.spawn(self._run(), "prefetch").add_done_callback(self._mover_ended)

    def stop(self) -> int:
        """End the prefetch; returns the tokens attached so far. Sync, may be called again."""
        return self._end(Stop.STOPPED)

    def leave_store(self) -> None:
        """End the prefetch because its store is taken away; what is attached stays."""
        self._end(Stop.DETACHED)

    async def settled(self) -> PrefetchResult:
        """Return what was found and brought, once the prefetch has ended.

        Raises: InvariantError: the cache has failed; ClosedError: it was closed.
        Cancellation: ends the wait only.
        """
        await asyncio.wait((self._result,))
        self._ctx.check_open()
        return self._result.result()

    def reached(self, node: Node, end_page: int, charge: Charge) -> None:
        """Take note of attached pages and keep them on the host for this request."""
        if self._holding.released or self._holding.loaded:
            return
        self._holding.pin_host(node, end_page)
        self.attached_page = max(self.attached_page, end_page)
        if charge not in self._charges:
            charge.hold()
            self._charges.append(charge)

    def give_up_charges(self) -> None:
        """Stop counting against the quota: the request has loaded or gone."""
        for charge in self._charges:
            charge.let_go()
        self._charges.clear()

    @property
    def fetched_pages(self) -> int:
        """Pages brought to the host for this request so far."""
        return max(0, self.attached_page - self._start_page)

    @property
    def start_page(self) -> int:
        """The first page that was missing."""
        return self._start_page

    def _expire(self) -> None:
        self._end(Stop.DEADLINE)

    def _end(self, reason: Stop) -> int:
        if not self._stopped.done() and not self._result.done():
            self._stop_reason = reason
            resolve(self._stopped)
            if self._fetch is not None:
                self._fetch.withdraw(self)
        return self.fetched_pages * self._ctx.page_tokens

    def _mover_ended(self, task: asyncio.Task[None]) -> None:
        self._ctx.prefetches.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._fetch is not None:
            self._fetch.leave(self)
        if not self._result.done():
            self._result.set_exception(self._ctx.invariant_error())
            self._result.exception()  # seen: nobody may be waiting

    async def _run(self) -> None:
        ctx, holding = self._ctx, self._holding
        start_page = self._start_page = self.attached_page = self._local_pages()
        missing = holding.limit_pages - start_page
        found, cut = await self._look(start_page, missing)
        ctx.metrics.unfulfilled[cut or Stop.NOT_STORED] += max(0, missing - found) * ctx.page_tokens
        agreed = await ctx.ranks.agree(self._ticket, ((start_page + found) * ctx.page_tokens,))
        shorter = int(agreed[0]) // ctx.page_tokens - start_page
        if cut is None and shorter < found:
            cut = Stop.PEER_SHORTER
        hit = max(0, min(found, shorter))
        ended = None
        if is_worth_fetching(ctx.config, hit):
            ended = await self._fetch_up_to(start_page + hit)
        self._settle(found, hit, outcome(hit, cut, ended))

    def _local_pages(self) -> int:
        return self._holding.match().local_pages if self._ctx.reuses else 0

    async def _look(self, start_page: int, missing: int) -> tuple[int, Stop | None]:
        ctx = self._ctx
        store, refusal = ctx.store, refusal_to_ask(ctx, missing)
        if store is None or refusal is not None:
            return 0, refusal
        hashes = self._holding.hashes(start_page + missing)

        async def ask(start: int, end: int) -> int | Stop:
            if self._stop_reason is not None:
                return self._stop_reason
            count = await self._count(store, ctx.keys.keys(hashes[start:end]))
            return (self._stop_reason or Stop.STORE_FAULT) if count is None else count

        return await ask_in_batches(ask, start_page, start_page + missing, ctx.config.store_batch_pages)

    async def _count(self, store: Store, keys: list[str]) -> int | None:
        # A deadline ends the wait for an answer, too; the question then ends by itself.
        asking = asyncio.ensure_future(count_prefix(self._ctx, store, keys))
        await asyncio.wait((asking, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        return None

    async def _fetch_up_to(self, goal: int) -> Stop:
        ctx = self._ctx
        before = -1
        while self._stop_reason is None:
            local_pages = self._local_pages()
            if local_pages >= goal:
                return Stop.COMPLETE
            if local_pages <= before:
                return Stop.VANISHED
            fetch = self._join(local_pages, goal)
            if fetch is None:
                return Stop.DETACHED
            await asyncio.wait((fetch.done, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if not fetch.done.done() and not fetch.interested:
                await settled_within(ctx.clock, fetch.done, STOP_GRACE_S)
            fetch.leave(self)
            self._fetch = None
            if self._stop_reason is None and fetch.stop is Stop.COMPLETE:
                before = local_pages
            elif self._stop_reason is None:
                return fetch.stop
        return self._stop_reason

    def _join(self, start_page: int, goal: int) -> Fetch | None:
        ctx, holding = self._ctx, self._holding
        if ctx.store is None:
            return None
        hashes = holding.hashes(goal)
        fetch = ctx.fetches.get(hashes[start_page])
        if fetch is None:
            fetch = Fetch(
                ctx, ctx.store, self._offloads, holding.key.data, hashes, holding.chain, start_page, goal
            )
        else:
            ctx.metrics.counters["fetches_joined"] += 1
        fetch.join(self)
        self._fetch = fetch
        return fetch

    def _settle(self, found: int, hit: int, stop: Stop) -> None:
        ctx = self._ctx
        fetched = min(hit, self.fetched_pages)
        if fetched == hit and hit and stop in (Stop.STOPPED, Stop.DEADLINE, Stop.DETACHED):
            stop = Stop.COMPLETE
        ctx.metrics.unfulfilled[stop] += (found - fetched) * ctx.page_tokens
        result = PrefetchResult(hit * ctx.page_tokens, fetched * ctx.page_tokens, stop)
        logger.debug(
            "prefetch.settled", hit=result.hit_tokens, fetched=result.fetched_tokens, stop=stop.value
        )
        if not self._result.done():
            self._result.set_result(result)
