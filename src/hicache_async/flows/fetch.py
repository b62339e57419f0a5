"""Fetch: one read of a run of pages from the store into the host, shared by all who want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeVarTuple

from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..config import PrefetchOverflow
from ..core.codecs import is_lossless
from ..core.holding import Holding
from ..core.node import Node
from ..core.pool import NO_PAGES, Owner
from ..core.walk import Match
from ..types import Pages, Stop, StopToken, Tier
from .calls import answered_count, checked_count, page_count, report_fault, start_store_call
from .charge import Charge
from .context import Context, Pinned
from .deadlines import Deadline
from .forecast import evictable_host_pages
from .gates import quota_pages, share_of
from .offload import Offloads
from .page_bytes import PageBuffers, batch_pages, empty_buffers, publish
from .stored import mark_stored

Ts = TypeVarTuple("Ts")

READ_REASONS = (Stop.VANISHED, Stop.CORRUPT, Stop.STORE_FAULT, Stop.BREAKER_OPEN)
"""What a store may say of a read that came back short; whatever else it says is a fault of its own."""


class Interested(Protocol):
    """A request that waits for a fetch.

    Attributes:
        priority: the fetch is served as the highest of those who have joined it.
    """

    priority: int

    def reached(self, node: Node, end_page: int, charge: Charge) -> None:
        """Hear that pages up to ``end_page`` are attached, ending at ``node``; may leave the fetch."""
        ...

    def fetch_ended(self, fetch: Fetch) -> None:
        """Hear that nothing more will come; not called for one who has left."""
        ...


class Fetch:
    """Reads pages ``[start_page, end_page)`` of a prompt, batch by batch, and attaches each as it settles.

    It holds an admission slot from its start to its end. The last one to withdraw stops it, and hears of
    what was in hand as long as it listens. Its pages belong to the hop that fills them; a batch that settles
    after the fetch has ended, or after its store was taken away, is given back unread.

    Args:
        holding: of the request that starts it: only the tokens are used, it may be released at any time.
        match: how far its prompt is local now; the fetch goes on from there.
        is_large: as the slot was taken.

    Attributes:
        attached_page: up to here the pages are there.
        stop: why it ends, or will end at the latest, where it does.
        interested: requests that keep it going.
        has_ended: nothing more is attached.
    """

    __slots__ = (
        "_anchor", "_anchor_pins", "_batch_end", "_charge", "_ctx", "_data", "_deadline", "_epoch", "_hashes", "_hop",
        "_is_large", "_listening", "_match", "_offloads", "_priority", "_store", "attached_page", "end_page",
        "has_ended", "interested", "start_page", "stop",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        store: Store,
        offloads: Offloads,
        holding: Holding,
        match: Match,
        end_page: int,
        *,
        is_large: bool,
    ) -> None:
        self._ctx = ctx
        self._store = store
        self._epoch = ctx.tree.store_epoch
        self._offloads = offloads
        self._data = holding.key.data
        self._hashes = holding.hashes(end_page)
        self._match: Match | None = match
        self._is_large = is_large
        self.end_page = end_page
        self.start_page = self.attached_page = self._batch_end = match.local_pages
        self.stop = Stop.COMPLETE
        self.has_ended = False
        self.interested: set[Interested] = set()
        self._listening: dict[Interested, None] = {}
        self._priority: int | None = None
        self._hop: Hop[int] | None = None
        self._deadline: Deadline | None = None
        self._charge = Charge(ctx)
        self._anchor: Node | None = None
        self._anchor_pins: list[Pinned] = []
        ctx.fetches[self._hashes[self.start_page]] = self

    def num_shared(self, hashes: Sequence[bytes]) -> int:
        """Return how many pages still to come a prompt with these page hashes has, too."""
        pairs = zip(
            self._hashes[self.attached_page : self.end_page], hashes[self.attached_page :], strict=False
        )
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def join(self, request: Interested) -> None:
        """Take an interest, and hear of what is attached."""
        self.interested.add(request)
        self._listening[request] = None
        if self._priority is None or request.priority > self._priority:
            self._priority = request.priority
            if self._hop is not None:
                self._hop.stop.priority = self._priority

    def leave(self, request: Interested) -> None:
        """Withdraw interest, and hear no more."""
        self.withdraw(request)
        self._listening.pop(request, None)

    def withdraw(self, request: Interested) -> None:
        """Withdraw interest; the last one out stops the read after the page in hand."""
        self.interested.discard(request)
        if not self.interested and not self.has_ended:
            self.stop = Stop.STOPPED
            self._forget()
            if self._hop is not None:
                self._hop.stop.stop()

    def _forget(self) -> None:
        # From now on whoever wants these pages starts a read of its own.
        fetches, page = self._ctx.fetches, self.attached_page
        if page < self.end_page and fetches.get(self._hashes[page]) is self:
            del fetches[self._hashes[page]]

    def start(self) -> None:
        """Begin. Whoever has joined may hear at once that it has ended."""
        self._attempt(self._begin)

    def _attempt(self, step: Callable[[*Ts], None], *args: *Ts) -> None:
        try:
            step(*args)
        except Exception as bug:  # noqa: BLE001 - a mover's top level: those who wait have to hear of it
            self._ctx.fail(bug)
            self._end()

    def _begin(self) -> None:
        if self._hold_anchor() and self._reserve():
            self._read_on()
        else:
            self._end()

    def _hold_anchor(self) -> bool:
        # Under write-through a host page needs its ancestors on the host: bring the anchor there first.
        match, self._match = self._match, None
        assert match is not None
        anchor = self._ctx.tree.cut(match, self.start_page)
        if anchor.parent is not None and anchor.host.pages is None and not self._ctx.is_write_back:
            self._offloads.offload_path(anchor, min_hits=0)
            if anchor.host.pages is None:
                self.stop = Stop.ANCHOR_NOT_BACKED
                logger.info("prefetch.anchor_not_backed", page=self.start_page)
                return False
        self._hold(anchor)
        return True

    def _hold(self, anchor: Node) -> None:
        ctx = self._ctx
        pins = [ctx.anchor(anchor)]
        if anchor.host.pages is not None:
            pins.append(ctx.pin(anchor, Tier.HOST))
        self._let_go()
        self._anchor, self._anchor_pins = anchor, pins

    def _let_go(self) -> None:
        for pinned in self._anchor_pins:
            self._ctx.unpin(pinned)
        self._anchor, self._anchor_pins = None, []

    def _reserve(self) -> bool:
        ctx = self._ctx
        wanted = self.end_page - self.start_page
        quota = quota_pages(ctx)
        allowed = min(wanted, quota)
        room = ctx.host_pool.available(fenced=False)
        if room < allowed:
            room = self._make_room(wanted, allowed, room)
        share = share_of(ctx.config, wanted, quota_pages=quota, room_pages=room)
        self.stop = share.stop
        self._charge.book(ctx.host_pool.take(share.num_pages, Owner.HOP, fenced=False).pages)
        return share.num_pages > 0

    def _make_room(self, wanted: int, allowed: int, free: int) -> int:
        # What is to be brought whole or not at all evicts nothing for the second.
        ctx = self._ctx
        if ctx.config.prefetch_overflow is PrefetchOverflow.REFUSE:
            possible = free + evictable_host_pages(ctx.tree, None, 0, allowed - free)
            if min(allowed, possible) < wanted:
                return possible
        return ctx.room.plan_room(Tier.HOST, allowed).num_pages

    # Batch by batch

    def _read_on(self) -> None:
        ctx = self._ctx
        if not len(self._charge.unread) or self.stop is Stop.STOPPED or not ctx.reuses:
            self._end()
            return
        self._deadline = ctx.deadlines.add(ctx.config.store_timeout_s, self)
        self._hop = self._start_read(self._charge.take_unread(batch_pages(ctx)))

    def _start_read(self, pages: Pages) -> Hop[int]:
        ctx, start = self._ctx, self.attached_page
        self._batch_end = start + len(pages)
        keys = ctx.keys.keys(self._hashes[start : self._batch_end])
        read = partial(self._read, pages, keys, empty_buffers(ctx, pages))
        hop = start_store_call(ctx, "read", read, self._settled, priority=self._priority or 0)
        hop.on_late = self._failed_late
        ctx.hop_pages[hop] = pages
        return hop

    def _read(self, pages: Pages, keys: Sequence[str], buffers: PageBuffers, stop: StopToken) -> object:
        if self._ctx.arena.is_direct and len(keys) == len(pages):
            return self._store.read(keys, buffers.chunks, stop)
        return self._read_and_publish(pages, keys, buffers, stop)

    async def _read_and_publish(
        self, pages: Pages, keys: Sequence[str], buffers: PageBuffers, stop: StopToken
    ) -> object:
        answer = await self._store.read(keys, buffers.chunks, stop)
        count = page_count(answer, len(pages), len(keys))
        if isinstance(count, int) and 0 < count <= len(pages):
            await publish(self._ctx, pages[:count], buffers, stop)
        return count

    def _failed_late(self, error: BaseException) -> None:
        # A thread of it may still write into its pages; nobody has to wait for that.
        if not self.has_ended:
            ctx = self._ctx
            ctx.deadlines.cancel(self._deadline)
            report_fault(ctx, "store.read", repr(error))
            if self.stop is Stop.COMPLETE:
                self.stop = Stop.STORE_FAULT
            self._end()

    def time_is_up(self) -> None:
        """End it: the store has not read a batch in time."""
        if self._hop is not None:
            self._hop.stop.stop()
        self._ctx.metrics.counters["store_timeouts"] += 1
        self.stop = Stop.STORE_FAULT
        self._end()

    def _settled(self, hop: Hop[int]) -> None:
        self._ctx.deadlines.cancel(self._deadline)
        self._attempt(self._go_on, hop)

    def _go_on(self, hop: Hop[int]) -> None:
        pages = self._ctx.hop_pages.pop(hop)
        self._attach(hop, pages)
        if self.has_ended:
            return
        if self.attached_page < self._batch_end:
            self._explain_short(hop, len(pages))
            self._end()
        else:
            self._read_on()

    def _attach(self, hop: Hop[int], pages: Pages) -> None:
        # The only place where a batch is published or given back.
        ctx, start = self._ctx, self.attached_page
        if self.has_ended:
            ctx.host_pool.free(pages, Owner.HOP)
            self._charge.end_reading(self.attached_page - self.start_page)
            return
        has_store = self._epoch == ctx.tree.store_epoch
        count = (checked_count(ctx, hop, len(pages)) or 0) if has_store else 0
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
            codec = ctx.keys.namespace.codec
            if not is_lossless(codec):
                ctx.lossy_codec = codec
            for run in graft.duplicates:
                ctx.host_pool.free(pages[run], Owner.HOP)
            self._advance(graft.end, start + count)
        if count < len(pages):
            ctx.host_pool.free(pages[count:], Owner.HOP)
        ctx.metrics.counters["fetched_pages"] += count

    def _advance(self, end: Node, end_page: int) -> None:
        # The end of what is attached becomes the anchor of the next batch, and every request's pin; and who
        # finds its prompt to end here now joins from here.
        ctx = self._ctx
        num_pages = end_page - self.attached_page
        mark_stored(ctx.tree, end, num_pages, num_pages)
        if len(self._charge.unread):
            self._hold(end)
        self._forget()
        self.attached_page = end_page
        if end_page < self.end_page and self.interested:
            ctx.fetches.setdefault(self._hashes[end_page], self)
        for request in tuple(self._listening):
            request.reached(end, end_page, self._charge)

    def _explain_short(self, hop: Hop[int], num_pages: int) -> None:
        if self.stop in (Stop.STOPPED, Stop.ANCHOR_NOT_BACKED, Stop.DETACHED):
            return
        if answered_count(hop, num_pages) is None:
            self.stop = Stop.STORE_FAULT
        else:
            reason = hop.stop.reason or Stop.VANISHED
            known = isinstance(reason, Stop) and reason in READ_REASONS
            self.stop = reason if known else Stop.STORE_FAULT

    def _end(self) -> None:
        ctx = self._ctx
        if self.has_ended:
            return
        self.has_ended = True
        self._let_go()
        ctx.host_pool.free(self._charge.unread, Owner.HOP)
        hung = ctx.hop_pages.get(self._hop, NO_PAGES) if self._hop is not None else NO_PAGES
        self._charge.end_reading(self.attached_page - self.start_page, len(hung))
        self._forget()
        ctx.admission.give_back(is_large=self._is_large)
        for request in tuple(self._listening):
            request.fetch_ended(self)
