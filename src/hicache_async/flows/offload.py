"""Offload, L1 to L2: at commit under the write-through policies, at eviction under write_back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .._hop import Hop
from .._log import logger
from ..abc import Fence
from ..core.node import Node, pages_of
from ..core.pool import Owner
from ..core.room import Move
from ..types import Tier
from .context import Context, Pinned, copy_plan
from .readiness import awaits_engine, open_fences, settle_ready, wait_fence


class Offloads:
    """Copy nodes to the host and hand them on to the store.

    Host pages are attached when the copy is submitted, behind its fence; readers wait for the fence.
    Source and target are pinned until it has been observed.

    Args:
        on_over: called when a copy is over, with the ends of the paths that it was made for; none if it
            failed.
    """

    def __init__(self, ctx: Context, on_over: Callable[[Sequence[Node]], None]) -> None:
        self._ctx = ctx
        self._on_over = on_over
        self._hops: set[Hop[None]] = set()
        self._pinning: dict[Hop[None], int] = {}
        """Copies whose source is still on the device, and how many pages each copies."""

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._hops

    @property
    def pages_ahead(self) -> int:
        """Device pages that can go without a copy once the copies under way have ended."""
        return sum(self._pinning.values())

    async def settled(self) -> None:
        """Return when the copies under way now have settled."""
        if self._hops:
            await asyncio.wait([hop.settled for hop in self._hops])

    def next_settled(self) -> asyncio.Future[None] | None:
        """Return what resolves when a copy ends and its source may leave the device; None: there is none."""
        return next((hop.settled for hop in self._pinning), None)

    def offload_path(self, end: Node, *, min_hits: int, only_unstored: bool = False) -> bool:
        """Copy what the path to ``end`` lacks on the host, ancestors first, up to the first node with fewer hits.

        A node whose bytes a forward is still writing ends it, too: its copy is made when that is over.

        Args:
            min_hits: commits that a node must have seen.
            only_unstored: whether what the store has need not be on the host.
        Returns: whether all of the path is on the host now, or on its way.
        """
        ctx = self._ctx
        missing = [
            node
            for node in end.path()
            if node.host.pages is None and not (only_unstored and node.stored == ctx.tree.store_epoch)
        ]
        wanted = next(
            (i for i, node in enumerate(missing) if node.hits < min_hits or awaits_engine(node)), len(missing)
        )
        nodes = missing[:wanted]
        if not nodes:
            return not missing
        if len(self._hops) >= ctx.config.max_offloads_in_flight:
            ctx.metrics.counters["offloads_skipped_queue_full"] += 1
            return False
        taken = self._fit(nodes, self._make_room(nodes))
        if not taken:
            ctx.metrics.counters["offloads_skipped_no_host_room"] += 1
            return False
        self._submit(taken, pinned=taken[-1:], ends=[end])
        return len(taken) == len(missing)

    def _make_room(self, nodes: Sequence[Node]) -> int:
        # The path above keeps its host pages while room is made for what comes below it; under write_back
        # it may be in the store instead.
        ctx = self._ctx
        num_pages = sum(node.num_pages for node in nodes)
        above = nodes[0].parent
        gives_way = above is None or (ctx.is_write_back and above.stored == ctx.tree.store_epoch)
        held = None
        if above is not None and above.host.pages is not None and not gives_way:
            held = ctx.pin(above, Tier.HOST)
        available = ctx.room.plan_room(Tier.HOST, num_pages).num_pages
        if held is not None:
            ctx.unpin(held)
        return min(num_pages, available)

    def _fit(self, nodes: Sequence[Node], num_pages: int) -> list[Node]:
        taken: list[Node] = []
        for node in nodes:
            if node.num_pages > num_pages:
                if num_pages:
                    taken.append(self._ctx.tree.split(node, num_pages))
                break
            num_pages -= node.num_pages
            taken.append(node)
        return taken

    def offload_nodes(self, nodes: Sequence[Node]) -> None:
        """Copy device nodes of any paths, as many of the first as the host can take beside its other copies."""
        ctx = self._ctx
        if not nodes:
            return
        if len(self._hops) >= ctx.config.max_offloads_in_flight:
            ctx.metrics.counters["offloads_skipped_queue_full"] += 1
            return
        num_pages = sum(node.num_pages for node in nodes)
        available = ctx.room.plan_room(Tier.HOST, num_pages, spare_copies=True).num_pages
        if taken := self._fit(nodes, available):
            self._submit(taken, pinned=taken, ends=taken)

    def _submit(self, nodes: Sequence[Node], *, pinned: Sequence[Node], ends: Sequence[Node]) -> None:
        ctx = self._ctx
        device_pages = pages_of(nodes, Tier.DEVICE)
        host_pages = ctx.host_pool.take(len(device_pages), Owner.LEASE, fenced=False).pages
        plan = copy_plan(ctx, device_pages, host_pages)
        ready = open_fences(nodes, Tier.DEVICE)
        fence = ctx.attempt(lambda: ctx.device.device_to_host(plan, ready))
        if fence is None:
            ctx.host_pool.free(host_pages, Owner.LEASE)
            return
        ctx.tree.put_run(Tier.HOST, nodes, host_pages, source=Owner.LEASE, ready=(fence,))
        pins = [ctx.pin(node, Tier.DEVICE, Tier.HOST) for node in pinned]
        ctx.metrics.counters["offloaded_pages"] += len(host_pages)
        self._pinning[self._watch(fence, pins, ends)] = len(host_pages)

    def submit_evictions(self, moves: Sequence[Move]) -> None:
        """Copy evicted nodes out and free their device pages behind the copy's fence."""
        if not moves:
            return
        ctx = self._ctx
        device_pages = np.concatenate([move.device_pages for move in moves])
        host_pages = np.concatenate([move.host_pages for move in moves])
        plan = copy_plan(ctx, device_pages, host_pages)
        fence = ctx.attempt(lambda: ctx.device.device_to_host(plan, ()))
        ctx.device_pool.free(device_pages, Owner.TREE, after=fence)
        if fence is None:
            return
        pins: list[Pinned] = []
        for move in moves:
            move.node.host.ready = (fence,)
            pins.append(ctx.pin(move.node, Tier.HOST))
        ctx.metrics.counters["offloaded_pages"] += len(host_pages)
        ctx.metrics.counters["offloaded_pages_at_eviction"] += len(host_pages)
        self._watch(fence, pins, [move.node for move in moves])

    def _watch(self, fence: Fence, pins: Sequence[Pinned], ends: Sequence[Node]) -> Hop[None]:
        settled = partial(self._settled, fence=fence, pins=pins, ends=ends)
        hop = self._ctx.hops.start_call("offload", lambda stop: wait_fence(self._ctx, fence), settled)
        self._hops.add(hop)
        return hop

    def _settled(self, hop: Hop[None], *, fence: Fence, pins: Sequence[Pinned], ends: Sequence[Node]) -> None:
        self._hops.discard(hop)
        self._pinning.pop(hop, None)
        ctx = self._ctx
        for pinned in pins:
            settle_ready(ctx, pinned.node, Tier.HOST, fence, hop.error)
            ctx.unpin(pinned)
        for pinned in pins:
            self._merge(pinned.node)
        if hop.error is not None:
            ctx.metrics.counters["failed_copies"] += 1
            logger.warning("copy.failed", direction="device_to_host", fault=repr(hop.error))
            ends = ()
        self._on_over([end.reachable() for end in ends])

    def _merge(self, node: Node) -> None:
        # A prompt that left the device piece by piece is one node again.
        parent = node.parent
        self._ctx.tree.merge(node)
        if parent is not None:
            self._ctx.tree.merge(parent)
