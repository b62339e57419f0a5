"""Fetch: one read of a run of pages from the store into the host, shared by all who want it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol

from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..core.hashing import HashChain
from ..core.node import Node
from ..core.pool import NO_PAGES, Owner
from ..types import Pages, Stop, StopToken, Tier
from .calls import answered_count, checked_count, start_store_call
from .charge import Charge
from .context import Context, Pinned, settled_within
from .gates import quota_pages, share_of
from .offload import Offloads
from .page_bytes import batch_pages, empty_views, publish
from .stored import mark_stored


class Interested(Protocol):
    """A request that waits for a fetch."""

    def reached(self, node: Node, end_page: int, charge: Charge) -> None:
        """Hear that pages up to ``end_page`` are attached, ending at ``node``."""
        ...


class Fetch:
    """Reads pages ``[start_page, end_page)`` of a prompt, batch by batch, and attaches each as it settles.

    The last one to withdraw stops it, and hears of what was in hand as long as it listens. Its pages
    belong to the hop that fills them; a batch that settles after the fetch has ended, or after its store
    was taken away, is given back unread.

    Attributes:
        interested: requests that keep it going.
    """

    def __init__(
        self,
        ctx: Context,
        store: Store,
        offloads: Offloads,
        data: bytearray,
        hashes: Sequence[bytes],
        chain: HashChain,
        start_page: int,
        end_page: int,
    ) -> None:
        self._ctx = ctx
        self._store = store
        self._epoch = ctx.tree.store_epoch
        self._offloads = offloads
        self._data = data
        self._hashes = hashes
        self._chain = chain
        self.start_page = start_page
        self.end_page = end_page
        self.attached_page = start_page
        self.stop = Stop.COMPLETE
        self.interested: set[Interested] = set()
        self._listening: set[Interested] = set()
        self.done: asyncio.Future[None] = ctx.loop.create_future()
        self._batch_end = start_page
        self._hop: Hop[int] | None = None
        self._charge = Charge(ctx)
        self._anchor: Node | None = None
        self._anchor_pins: list[Pinned] = []
        ctx.fetches[self.first_hash] = self
        ctx.spawn(self._run(), "fetch")

    @property
    def first_hash(self) -> bytes:
        """What single-flight goes by."""
        return self._hashes[self.start_page]

    def num_shared(self, hashes: Sequence[bytes]) -> int:
        """Return how many of its pages, from the first on, a prompt with these page hashes has, too."""
        pairs = zip(self._hashes[self.start_page : self.end_page], hashes[self.start_page :], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def join(self, request: Interested) -> None:
        """Take an interest, and hear of what is attached."""
        self.interested.add(request)
        self._listening.add(request)

    def leave(self, request: Interested) -> None:
        """Withdraw interest, and hear no more."""
        self.withdraw(request)
        self._listening.discard(request)

    def withdraw(self, request: Interested) -> None:
        """Withdraw interest; the last one out stops the read after the page in hand."""
        self.interested.discard(request)
        if not self.interested and not self.done.done():
            self.stop = Stop.STOPPED
            self._forget()
            if self._hop is not None:
                self._hop.stop.stop()

    def _forget(self) -> None:
        # From now on whoever wants these pages starts a read of its own.
        if self._ctx.fetches.get(self.first_hash) is self:
            del self._ctx.fetches[self.first_hash]

    async def _run(self) -> None:
        try:
            if self.stop is not Stop.STOPPED and self._hold_anchor() and self._reserve():
                await self._read_all()
        finally:
            self._end()

    def _hold_anchor(self) -> bool:
        # Under write-through a host page needs its ancestors on the host: bring the anchor there first.
        ctx, tree = self._ctx, self._ctx.tree
        match = tree.match(self._chain.seed, self._data, self.start_page)
        anchor = tree.cut(match, self.start_page) if match.local_pages == self.start_page else None
        if (
            anchor is not None
            and anchor.parent is not None
            and anchor.host.pages is None
            and not ctx.is_write_back
        ):
            self._offloads.offload_path(anchor, min_hits=0)
            if anchor.host.pages is None:
                anchor = None
        if anchor is None:
            self.stop = Stop.ANCHOR_NOT_BACKED
            logger.info("prefetch.anchor_not_backed", page=self.start_page)
            return False
        self._anchor, self._anchor_pins = anchor, [ctx.anchor(anchor)]
        if anchor.host.pages is not None:
            self._anchor_pins.append(ctx.pin(anchor, Tier.HOST))
        return True

    def _reserve(self) -> bool:
        ctx = self._ctx
        wanted = self.end_page - self.start_page
        quota = quota_pages(ctx)
        room = ctx.room.plan_room(Tier.HOST, max(0, min(wanted, quota))).num_pages
        share = share_of(ctx.config, wanted, quota_pages=quota, room_pages=room)
        self.stop = share.stop
        self._charge.book(ctx.host_pool.take(share.num_pages, Owner.HOP, fenced=False).pages)
        return share.num_pages > 0

    async def _read_all(self) -> None:
        ctx = self._ctx
        while len(self._charge.unread) and self.stop is not Stop.STOPPED and ctx.reuses:
            pages = self._charge.take_unread(batch_pages(ctx))
            hop = self._hop = self._start_read(pages)
            if not await settled_within(ctx.clock, hop.settled, ctx.config.store_timeout_s):
                hop.stop.stop()
                ctx.metrics.counters["store_timeouts"] += 1
                self.stop = Stop.STORE_FAULT
                return
            if self.attached_page < self._batch_end:
                self._explain_short(hop, len(pages))
                return

    def _start_read(self, pages: Pages) -> Hop[int]:
        ctx, start = self._ctx, self.attached_page
        self._batch_end = start + len(pages)
        keys = ctx.keys.keys(self._hashes[start : self._batch_end])
        views = empty_views(ctx, pages)

        async def read(stop: StopToken) -> int:
            count = await self._store.read(keys, views, stop)
            if isinstance(count, int) and 0 < count <= len(keys):
                await publish(ctx, pages[:count], views[:count], stop)
            return count

        hop = start_store_call(ctx, "read", read, partial(self._attach, pages=pages, start=start))
        ctx.hop_pages[hop] = pages
        return hop

    def _attach(self, hop: Hop[int], *, pages: Pages, start: int) -> None:
        # The only place where a batch is published or given back.
        ctx = self._ctx
        del ctx.hop_pages[hop]
        has_store = self._epoch == ctx.tree.store_epoch
        count = (checked_count(ctx, hop, len(pages)) or 0) if has_store else 0
        if self.done.done():
            ctx.host_pool.free(pages, Owner.HOP)
            self._charge.end_reading(self.attached_page - self.start_page)
            return
        anchor = self._anchor
        if not has_store:
            self.stop = Stop.DETACHED
        elif anchor is None or not anchor.attached or not ctx.reuses:
            count = 0
            self.stop = Stop.ANCHOR_NOT_BACKED
        if count and anchor is not None:
            graft = ctx.tree.graft(
                Tier.HOST, anchor, self._data, self._hashes, start, pages[:count], source=Owner.HOP
            )
            ctx.host_pool.free(pages[:count][~graft.taken], Owner.HOP)
            self._advance(graft.end, start + count)
        ctx.host_pool.free(pages[count:], Owner.HOP)
        ctx.metrics.counters["fetched_pages"] += count

    def _advance(self, end: Node, end_page: int) -> None:
        # The end of what is attached becomes the anchor of the next batch, and every request's pin.
        ctx = self._ctx
        num_pages = end_page - self.attached_page
        mark_stored(ctx.tree, end, num_pages, num_pages)
        pins = [ctx.anchor(end), ctx.pin(end, Tier.HOST)]
        self._let_go()
        self._anchor, self._anchor_pins = end, pins
        self.attached_page = end_page
        for request in self._listening:
            request.reached(end, end_page, self._charge)

    def _explain_short(self, hop: Hop[int], num_pages: int) -> None:
        if self.stop in (Stop.STOPPED, Stop.ANCHOR_NOT_BACKED, Stop.DETACHED):
            return
        if answered_count(hop, num_pages) is None:
            self.stop = Stop.STORE_FAULT
        else:
            self.stop = hop.stop.reason or Stop.VANISHED

    def _let_go(self) -> None:
        for pinned in self._anchor_pins:
            self._ctx.unpin(pinned)
        self._anchor, self._anchor_pins = None, []

    def _end(self) -> None:
        ctx = self._ctx
        self._let_go()
        ctx.host_pool.free(self._charge.unread, Owner.HOP)
        hung = ctx.hop_pages.get(self._hop, NO_PAGES) if self._hop is not None else NO_PAGES
        self._charge.end_reading(self.attached_page - self.start_page, len(hung))
        self._forget()
        self.done.set_result(None)
