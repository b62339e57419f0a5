"""Load, L2 to L1: wait for what others compute, take a slot and room, agree, submit; usable layer by layer."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .._fence import OrderedFence, combine, parts, resolve
from .._hop import Hop
from .._log import logger
from ..abc import Fence, SupportsRecording
from ..core.holding import Holding
from ..core.node import Node, pages_of
from ..core.pool import Owner
from ..core.walk import Match
from ..errors import ConsensusError
from ..types import Pages, State, Tier
from .allocate import DeviceRoom
from .context import Context, Pinned, consensus_error, copy_plan, leave_ranks
from .readiness import open_fences, settle_ready, wait_fence
from .waiting import end_of


@dataclass(slots=True, eq=False)
class Loading:
    """The cached prefix of a request on its way to the device.

    Attributes:
        tokens: agreed on all ranks; the only length an engine may compute from.
        reserved_tokens: agreed room beyond it, for ``allocate``.
        pages: device pages of the prefix, int64 [tokens / page_size].
        loaded_tokens: how many of ``tokens`` this load brings from the host.
    """

    tokens: int
    reserved_tokens: int
    pages: Pages
    loaded_tokens: int
    _fences: list[Sequence[Fence]] = field(repr=False)
    _ctx: Context = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether all layers are there."""
        return all(fence.passed() for fences in self._fences for fence in fences)

    def block(self, layer: int, stream: object | None = None) -> None:
        """Order ``stream`` behind layer ``layer`` of the prefix; without streams the calling thread waits.

        ``stream=None`` is the engine's compute stream. Any thread.
        Raises: what failed; the bytes are then not to be used.
        """
        for fences in self._fences:
            _of_layer(fences, layer).block(self._ctx.kv.compute_stream if stream is None else stream)

    async def ready(self, layer: int) -> None:
        """Return when layer ``layer`` of the prefix is there. Raises: as :meth:`block`."""
        for fences in self._fences:
            await wait_fence(self._ctx, _of_layer(fences, layer))

    async def finished(self) -> None:
        """Return when all of the prefix is there. Raises: as :meth:`block`."""
        for fences in self._fences:
            await wait_fence(self._ctx, fences[-1])


def _of_layer(fences: Sequence[Fence], layer: int) -> Fence:
    return fences[layer] if len(fences) > 1 else fences[0]


class Slots:
    """A counted right, given by priority and then in order."""

    def __init__(self, count: int, ctx: Context) -> None:
        self._free = count
        self._ctx = ctx
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0

    async def take(self, priority: int) -> None:
        """Take one, waiting in turn.

        Cancellation: a slot that had just been given is handed on.
        """
        if self._free:
            self._free -= 1
            return
        self._sequence += 1
        given: asyncio.Future[None] = self._ctx.loop.create_future()
        heapq.heappush(self._waiting, (-priority, self._sequence, given))
        try:
            await self._ctx.until(given)
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Give one back, to the first who waits."""
        while self._waiting:
            given = heapq.heappop(self._waiting)[2]
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


@dataclass(slots=True)
class _Placed:
    """What a rank can offer, in pages: on the device, on the way from the host, and room beyond."""

    device_pages: int
    end_page: int
    host_pinned: Pinned | None


class Loads:
    """Bring prefixes to the device."""

    def __init__(self, ctx: Context, device_room: DeviceRoom) -> None:
        self._ctx = ctx
        self._device_room = device_room
        self._slots = Slots(ctx.config.max_loads_in_flight, ctx)

    async def wait_pending(self, holding: Holding, lease: object) -> None:
        """Wait while another lease has announced the pages that ``holding`` misses first.

        Returns without a suspension after its last look, so that the caller may announce.
        """
        ctx = self._ctx
        while ctx.reuses:
            missing = missing_hashes(holding)
            pending = ctx.announcements.pending(lease, missing)
            if not pending:
                return
            ended: asyncio.Future[None] = ctx.loop.create_future()
            ctx.announcements.when_ended(missing[:pending], partial(resolve, ended))
            ctx.metrics.counters["loads_waited_for_announced"] += 1
            await ctx.until(ended)
            holding.check_live()

    async def load(
        self, holding: Holding, total_tokens: int, ticket: bytes, *, priority: int, step: Callable[[], int]
    ) -> tuple[Loading, int]:
        """Bring what is local to the device and reserve room up to ``total_tokens``.

        Never raises for room: what cannot be placed is left out and counted.

        Args:
            step: what this rank votes for as the step at which the load enters.
        Returns: the loading, and what was agreed about its step.
        Raises: ConsensusError: a rank was lost, or this rank cannot give what it offered.
        Ownership: the copy's target pages are the tree's at once, behind its fences.
        Cancellation: before the agreement nothing is moved; what is reserved stays with the lease, whose
            release tells the other ranks.
        """
        ctx = self._ctx
        # Ranks take up their loads in orders of their own: one that held a slot until the others have
        # voted would wait for those that wait for a slot there.
        slot = ctx.ranks.size == 1 and ctx.reuses and self._host_pages(holding.match()) > 0
        if slot:
            await self._slots.take(priority)
        placed: _Placed | None = None
        try:
            holding.check_live()
            placed = self._pin(holding)
            await self._make_room(holding, placed, total_tokens)
            offer = self._offer(holding, placed, total_tokens)
            agreed = await self._agree(ticket, (*offer, step()))
            holding.check_live()
            loading = self._submit(holding, placed, int(agreed[0]), int(agreed[1]), slot=slot)
            slot = False
            return loading, int(agreed[2])
        finally:
            if placed is not None and placed.host_pinned is not None:
                ctx.unpin(placed.host_pinned)
            if slot:
                self._slots.give_back()

    def _offer(self, holding: Holding, placed: _Placed, total_tokens: int) -> tuple[int, int]:
        # The tokens that can be served here, and the room beyond.
        ctx = self._ctx
        # Where a tier is being cleared, or was while room was waited for, nothing may be promised.
        end = holding.device_end
        if ctx.offers_nothing or (end is not None and not end.attached):
            placed.device_pages = placed.end_page = 0
        room = (placed.device_pages + len(holding.table.reserved)) * ctx.page_tokens
        tokens = placed.end_page * ctx.page_tokens
        return tokens, max(0, min(total_tokens, room) - tokens)

    async def _agree(self, ticket: bytes, offer: Sequence[int]) -> Sequence[int]:
        ctx = self._ctx
        if ctx.ranks_lost is not None or ctx.ranks.size == 1:
            return offer
        settled: asyncio.Future[None] = ctx.loop.create_future()
        ctx.votes.add(settled)
        try:
            agreed = await ctx.agree(ticket, offer)
        finally:
            ctx.votes.discard(settled)
            settled.set_result(None)
        if agreed is None:
            if ctx.ranks_lost is None:
                ctx.check_open()
            raise consensus_error(ctx.ranks_lost)
        return agreed

    async def recorded(self, loading: Loading) -> None:
        """Return when a stream can be ordered behind every layer of ``loading``.

        To wait for a fence of a stream that was never recorded is no wait at all: what is computed then is garbage.
        Raises: ClosedError: the cache is closing. Cancellation: ends the wait only.
        """
        ctx, device = self._ctx, self._ctx.device
        fences = [fence for fences in loading._fences for fence in fences]
        if all(fence.is_recorded for fence in fences if isinstance(fence, OrderedFence)):
            return
        assert isinstance(device, SupportsRecording), (
            f"{device!r} has fences that nobody can wait to be recorded"
        )
        recording = ctx.loop.create_task(device.recorded(fences))
        try:
            while not recording.done():
                await ctx.until(end_of(recording))
            recording.result()
        finally:
            recording.cancel()

    def _host_pages(self, match: Match) -> int:
        num_pages = match.local_pages - match.device_pages
        worth = num_pages * self._ctx.page_tokens >= self._ctx.config.effective_load_threshold_tokens
        return num_pages if worth else 0

    def _pin(self, holding: Holding) -> _Placed:
        # Both ends before anything else: making room must not evict what is about to be loaded.
        ctx, tree = self._ctx, self._ctx.tree
        if not ctx.reuses:
            return _Placed(0, 0, None)
        match = holding.match()
        device_pages, end_page = match.device_pages, match.device_pages + self._host_pages(match)
        device_end = tree.cut(match, device_pages)
        tree.pin(Tier.DEVICE, device_end)
        holding.device_end = device_end
        host_pinned = ctx.pin(tree.cut(match, end_page), Tier.HOST) if end_page > device_pages else None
        return _Placed(device_pages, end_page, host_pinned)

    async def _make_room(self, holding: Holding, placed: _Placed, total_tokens: int) -> None:
        # Pages whose copy to the host is under way come back in a moment: rather than give up what is
        # cached, wait for them.
        ctx, table = self._ctx, holding.table
        total_pages = min(-(-total_tokens // ctx.page_tokens), ctx.device_pool.capacity)
        wanted = max(total_pages, placed.end_page) - placed.device_pages
        table.reserve(self._device_room.grant(wanted))
        while len(table.reserved) < wanted and await self._device_room.copies_ended():
            holding.check_live()
            table.reserve(self._device_room.grant(wanted - len(table.reserved)))
        short = placed.end_page - placed.device_pages - len(table.reserved)
        if short > 0:
            placed.end_page -= short
            ctx.metrics.counters["load_tokens_without_device_room"] += short * ctx.page_tokens

    def _submit(
        self, holding: Holding, placed: _Placed, tokens: int, reserved_tokens: int, *, slot: bool
    ) -> Loading:
        ctx, tree = self._ctx, self._ctx.tree
        end_page = tokens // ctx.page_tokens
        end: Node | None = None
        loaded_tokens = 0
        copies = False
        if (device_end := holding.device_end) is not None:
            match = holding.match()
            end_page = min(end_page, match.local_pages if device_end.attached else 0)
            self._check_promise(tokens, end_page)
            tokens = end_page * ctx.page_tokens  # less where a tier was cleared while this waited
            end = tree.cut(match, end_page)
            nodes = [node for node in end.path() if node.device.pages is None]
            copies = bool(nodes) and self._copy(holding, nodes, slot=slot)
            loaded_tokens = sum(node.num_pages for node in nodes) * ctx.page_tokens
            if nodes and not copies:
                self._check_promise(tokens, placed.device_pages)
                end, end_page, loaded_tokens = device_end, placed.device_pages, 0
                tokens = end_page * ctx.page_tokens
            tree.pin(Tier.DEVICE, end)
            tree.unpin(Tier.DEVICE, device_end)
            holding.settle_load(end, end_page)
        else:
            holding.loaded = True
        if slot and not copies:
            self._slots.give_back()
        self._trim_reserve(holding, end_page, tokens + reserved_tokens)
        fences: list[Sequence[Fence]] = []
        for node in end.path() if end is not None else ():
            ready = node.device.ready
            if ready and not any(ready is known for known in fences):
                fences.append(ready)
        return Loading(tokens, reserved_tokens, holding.table.pages.copy(), loaded_tokens, fences, ctx)

    def _check_promise(self, agreed_tokens: int, end_page: int) -> None:
        # What the other ranks compute from is agreed: a rank that has less of it now cannot go on with them.
        ctx = self._ctx
        if ctx.ranks.size == 1 or ctx.ranks_lost is not None or end_page * ctx.page_tokens >= agreed_tokens:
            return
        leave_ranks(ctx)  # so that no step waits for this rank
        if ctx.state is State.FAILED:
            raise ctx.invariant_error()
        ctx.lose_ranks(
            ConsensusError(
                f"rank {ctx.ranks.rank} has offered {agreed_tokens} tokens and has lost all but "
                f"{end_page * ctx.page_tokens} of them since, to a failed copy or forward"
            )
        )
        raise consensus_error(ctx.ranks_lost)

    def _copy(self, holding: Holding, nodes: Sequence[Node], *, slot: bool) -> bool:
        ctx, tree = self._ctx, self._ctx.tree
        host_pages = pages_of(nodes, Tier.HOST)
        grant = holding.table.first_reserved(len(host_pages))
        plan = copy_plan(ctx, targets := grant.pages, host_pages)
        after = [*open_fences(nodes, Tier.HOST), *parts(combine(grant.after))]
        fences = ctx.attempt(lambda: ctx.device.host_to_device(plan, after))
        if fences is None:
            return False
        holding.table.take_reserved(len(host_pages))
        tree.put_run(Tier.DEVICE, nodes, targets, source=Owner.LEASE, ready=fences)
        pinned = ctx.pin(nodes[-1], Tier.DEVICE, Tier.HOST)
        ctx.metrics.counters["loaded_pages"] += len(host_pages)
        settled = partial(self._settled, pinned=pinned, last=fences[-1], slot=slot)
        ctx.hops.start_call("load", lambda stop: wait_fence(ctx, fences[-1]), settled)
        return True

    def _settled(self, hop: Hop[None], *, pinned: Pinned, last: Fence, slot: bool) -> None:
        ctx = self._ctx
        settle_ready(ctx, pinned.node, Tier.DEVICE, last, hop.error)
        ctx.unpin(pinned)
        if slot:
            self._slots.give_back()
        if hop.error is not None:
            ctx.metrics.counters["failed_copies"] += 1
            logger.warning("copy.failed", direction="host_to_device", fault=repr(hop.error))
        self._device_room.pump()

    def _trim_reserve(self, holding: Holding, end_page: int, total_tokens: int) -> None:
        keep = max(0, -(-total_tokens // self._ctx.page_tokens) - end_page)
        if keep < len(holding.table.reserved):
            holding.table.free_reserved(keep)
            self._device_room.pump()


def missing_hashes(holding: Holding) -> list[bytes]:
    """Return the hashes of the pages that the request could reuse and that are not local."""
    match = holding.match()
    return holding.hashes(holding.limit_pages)[match.local_pages : holding.limit_pages]
