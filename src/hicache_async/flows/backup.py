"""Backup, L2 to L3: ancestors first, up to the first hole; what was missed is made up for at the next call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from .._fence import resolve
from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..core.node import Node, pages_of
from ..types import Pages, StopToken, Tier
from .calls import answered_count, fault_of, page_count, start_store_call
from .context import Context, Pinned, settled_within
from .gates import refusal_of
from .page_bytes import batch_pages, filled_buffers
from .stored import mark_stored

MAX_HUNG_WRITES = 2
"""Writes that outlived their deadline and still hold pages; with so many no further one is started."""


class Backups:
    """Write the host pages of whole paths to the store, one batch at a time.

    Asking is cheap and may be repeated. Requests are served in order, and between two of them one path of
    what was on the host when the store was attached. What a store refuses to be asked for is skipped and
    counted; when it refuses no more the next request or flush has all of it made up for.

    Args:
        fill_hole: called with the end of a path of which the first unstored page is not on the host.
    """

    def __init__(self, ctx: Context, fill_hole: Callable[[Node], None]) -> None:
        self._ctx = ctx
        self._fill_hole = fill_hole
        self._waiting: dict[Node, int] = {}
        """Ends of paths and the numbers of their requests, oldest first."""
        self._last_number = 0
        self._serving = 0
        """The number of the request that is being served; 0: none is."""
        self._backlog: Iterator[Node] | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._write_over: asyncio.Future[None] | None = None
        self._hung: set[Hop[int]] = set()
        self._healthy = True
        self._has_skipped = False
        """Whether something was skipped, or failed, that the store then refused to be asked for again."""
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
        if not self._can_write or end in self._waiting or self._is_refused():
            return
        self._make_up()
        if len(self._waiting) >= self._ctx.config.max_backups_pending:
            self._ctx.metrics.counters["backups_skipped_queue_full"] += 1
            return
        self._last_number += 1
        self._waiting[end] = self._last_number
        self._start()

    def catch_up(self) -> None:
        """See to it that what is on the host now is stored, too; the tree is walked as the queue drains."""
        if self._can_write:
            self._backlog = host_ends(self._ctx.tree.roots.values())
            self._start()

    def _is_refused(self) -> bool:
        # Where it is, something is skipped for that.
        store = self._ctx.store
        if store is None or refusal_of(store) is None:
            return False
        self._ctx.metrics.counters["backups_skipped_store_refused"] += 1
        self._has_skipped = True
        return True

    def _make_up(self) -> None:
        store = self._ctx.store
        if self._has_skipped and store is not None and refusal_of(store) is None:
            self._has_skipped = False
            self.catch_up()

    @property
    def _can_write(self) -> bool:
        return self._ctx.store is not None and self._ctx.keys.writes and self._ctx.reuses

    def _start(self) -> None:
        self.is_idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Serve requests until cancelled."""
        try:
            while True:
                while self._waiting or self._backlog is not None:
                    await self._serve_oldest()
                    await self._serve_backlog()
                self.is_idle.set()
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._serving = 0
            self.drop_all()
            self.is_idle.set()

    async def _serve_oldest(self) -> None:
        if self._waiting:
            end = next(iter(self._waiting))
            self._serving = self._waiting.pop(end)
            await self._store_path(end)
            self._serving = 0
            self._note_progress()

    async def _serve_backlog(self) -> None:
        if self._backlog is None:
            return
        end = next(self._backlog, None)
        if end is None or len(self._hung) >= MAX_HUNG_WRITES:
            self._backlog = None
            self._note_progress()
        elif self.is_due(end):
            await self._store_path(end)
        await asyncio.sleep(0)  # of a large tree much may be stored already, or out of reach

    def _note_progress(self) -> None:
        # Wakes those who wait now, and nobody after them.
        self._progress.set()
        self._progress.clear()

    async def flushed(self) -> None:
        """Return when all that is requested now was written, given up or dropped, whatever is requested later."""
        self._make_up()
        last, backlog = self._last_number, self._backlog
        while self._oldest_number <= last or (backlog is not None and backlog is self._backlog):
            await self._progress.wait()

    @property
    def _oldest_number(self) -> int:
        return self._serving or next(iter(self._waiting.values()), self._last_number + 1)

    async def _store_path(self, end: Node) -> None:
        while (left := end.reachable()).parent is not None and self._ctx.reuses:
            store = self._ctx.store
            if store is None or self._is_refused():
                return
            if len(self._hung) >= MAX_HUNG_WRITES:
                self._ctx.metrics.counters["backups_skipped_store_hung"] += 1
                return
            nodes = self._next_batch(left)
            if not nodes:
                return
            if not await self._write(store, nodes):
                self._has_skipped |= store is self._ctx.store and refusal_of(store) is not None
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
                    self._fill_hole(end)
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

        async def write(stop: StopToken) -> object:
            buffers = await filled_buffers(ctx, pages, stop)
            if epoch != ctx.tree.store_epoch:  # the store has been taken away meanwhile
                return 0
            return page_count(await store.write(keys, buffers.chunks), len(pages), len(keys))

        hop = start_store_call(
            ctx, "write", write, partial(self._settled, pinned=pinned, pages=pages, epoch=epoch)
        )
        over = self._write_over = ctx.loop.create_future()
        hop.settled.add_done_callback(lambda _: resolve(over))
        await settled_within(ctx.clock, over, ctx.config.store_timeout_s)
        if epoch != ctx.tree.store_epoch:
            return False
        if not hop.settled.done():
            self._hung.add(hop)
            hop.settled.add_done_callback(lambda _: self._hung.discard(hop))
            self._note_health(False, f"a write did not end in {ctx.config.store_timeout_s} s")
            return False
        return answered_count(hop, len(pages)) == len(pages)

    def _settled(self, hop: Hop[int], *, pinned: Pinned, pages: Pages, epoch: int) -> None:
        ctx = self._ctx
        if epoch != ctx.tree.store_epoch:  # of a store that was taken away: its answer is nobody's
            ctx.unpin(pinned)
            return
        answer = answered_count(hop, len(pages))
        count = answer or 0
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
        self._backlog = None
        self._note_progress()

    def leave_store(self) -> None:
        """Forget all requests and the writes under way: their store is taken away, and the next one starts anew."""
        self.drop_all()
        self._hung.clear()
        self._healthy, self._has_skipped = True, False
        if self._write_over is not None:
            resolve(self._write_over)


def host_ends(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield the last host node of every path, walking down as it is asked for the next.

    The tree may change between two: what is split still ends where it did, and of what has left the rest of
    its path comes in its place.
    """
    stack = list(roots)
    while stack:
        node = stack.pop()
        children = list(node.children.values()) if node.children else []
        stack += children
        left = node.reachable()
        goes_on = left is node and any(child.host.pages is not None for child in children)
        if left.host.pages is not None and not goes_on:
            yield left
