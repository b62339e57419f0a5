"""Backup, L2 to L3: ancestors first, up to the first hole; what was missed is made up for at the next call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..core.node import Node, pages_of
from ..types import Pages, StopToken, Tier
from .calls import answered_count, fault_of, start_store_call
from .context import Context, Pinned, settled_within
from .page_bytes import batch_pages, filled_views
from .stored import mark_stored

MAX_HUNG_WRITES = 2
"""Writes that outlived their deadline and still hold pages; with so many no further one is started."""


class Backups:
    """Write the host pages of whole paths to the store, one batch at a time.

    Asking is cheap and may be repeated.

    Args:
        offload_idle: brings a path to the host where idle room allows; under write_back the ancestors
            of an evicted node may still be on the device only, and a tail without its head is of no use.
    """

    def __init__(self, ctx: Context, offload_idle: Callable[[Node], bool]) -> None:
        self._ctx = ctx
        self._offload_idle = offload_idle
        self._waiting: dict[Node, None] = {}
        self._wake = asyncio.Event()
        self._hung = 0
        self._healthy = True
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def is_due(self, node: Node) -> bool:
        """Whether ``node`` is on the host, all of it, and not known to be stored."""
        on_host = node.host.pages is not None and node.host.is_ready()
        return on_host and node.stored != self._ctx.tree.store_epoch

    def request(self, end: Node) -> None:
        """See to it that the path to ``end`` is stored; a full queue skips and counts."""
        ctx = self._ctx
        if ctx.store is None or not ctx.keys.writes or not ctx.reuses or end in self._waiting:
            return
        if len(self._waiting) >= ctx.config.max_backups_pending:
            ctx.metrics.counters["backups_skipped_queue_full"] += 1
            return
        self._waiting[end] = None
        self.is_idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Serve requests until cancelled."""
        try:
            while True:
                while self._waiting:
                    end = next(iter(self._waiting))
                    del self._waiting[end]
                    await self._store_path(end)
                self.is_idle.set()
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.is_idle.set()

    async def _store_path(self, end: Node) -> None:
        while end.attached and self._ctx.reuses and (store := self._ctx.store) is not None:
            if self._hung >= MAX_HUNG_WRITES:
                self._ctx.metrics.counters["backups_skipped_store_hung"] += 1
                return
            nodes = self._next_batch(end)
            if not nodes or not await self._write(store, nodes):
                return

    def _next_batch(self, end: Node) -> list[Node]:
        # The first run of unstored nodes on the path, at most one batch; a longer node is split.
        ctx = self._ctx
        room = batch_pages(ctx)
        nodes: list[Node] = []
        for node in end.path():
            if node.stored == ctx.tree.store_epoch:
                if nodes:
                    break
                continue
            if not self.is_due(node):
                if not nodes:
                    ctx.metrics.counters["backups_stopped_at_hole"] += 1
                    self._offload_idle(end)
                break
            if node.num_pages > room:
                if room:
                    nodes.append(ctx.tree.split(node, room))
                break
            room -= node.num_pages
            nodes.append(node)
        return nodes

    async def _write(self, store: Store, nodes: Sequence[Node]) -> bool:
        ctx = self._ctx
        last, epoch = nodes[-1], ctx.tree.store_epoch
        pages = pages_of(nodes, Tier.HOST)
        keys = ctx.keys.keys([page_hash for node in nodes for page_hash in node.hashes])
        pinned = ctx.pin(last, Tier.HOST)

        async def write(stop: StopToken) -> int:
            return await store.write(keys, await filled_views(ctx, pages, stop))

        hop = start_store_call(
            ctx, "write", write, partial(self._settled, pinned=pinned, pages=pages, epoch=epoch)
        )
        if not await settled_within(ctx.clock, hop.settled, ctx.config.store_timeout_s):
            self._hung += 1
            hop.settled.add_done_callback(self._unhang)
            self._note_health(False, f"a write did not end in {ctx.config.store_timeout_s} s")
            return False
        return answered_count(hop, len(pages)) == len(pages)

    def _unhang(self, settled: asyncio.Future[None]) -> None:
        self._hung -= 1

    def _settled(self, hop: Hop[int], *, pinned: Pinned, pages: Pages, epoch: int) -> None:
        ctx = self._ctx
        answer = answered_count(hop, len(pages))
        count = answer or 0
        if epoch == ctx.tree.store_epoch:
            mark_stored(ctx.tree, pinned.node, len(pages), count)
        ctx.unpin(pinned)
        ctx.metrics.counters["backed_up_pages"] += count
        if count < len(pages):
            ctx.metrics.counters["backup_pages_failed"] += len(pages) - count
        if answer is None:
            ctx.metrics.counters["store_faults"] += 1
            self._note_health(False, fault_of(hop, len(pages)))
        else:  # of a store that got full in the middle the next call tells more
            self._note_health(count > 0, f"0 of {len(pages)} pages were written")

    def _note_health(self, healthy: bool, fault: str) -> None:
        if self._healthy and not healthy:
            logger.warning(
                "backup.stopped", fault=fault, hint="requests go on; retried at the next commit or hit"
            )
        self._healthy = healthy

    def drop_all(self) -> None:
        """Forget all requests; counts them."""
        self._ctx.metrics.counters["backups_dropped"] += len(self._waiting)
        self._waiting.clear()
