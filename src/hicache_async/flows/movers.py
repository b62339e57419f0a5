"""Movers: the four arrows of one cache, and what follows from a commit and from a hit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from .._fence import PassedFence
from .._hop import Hop
from ..abc import Fence
from ..core.clear import clear_all
from ..core.holding import Holding
from ..core.node import Node
from ..core.write_policy import ENOUGH_COMMITS, MIN_COMMITS
from ..types import Tier
from .allocate import DeviceRoom
from .backup import Backups
from .clean import Cleaner
from .context import Context
from .load import Loads
from .offload import Offloads
from .pins import Pins
from .readiness import awaits_engine, hold_until
from .steps import Steps
from .write_down import write_down


class Movers:
    """Put together the flows of one cache.

    Args:
        holdings: all live holdings.
    """

    def __init__(self, ctx: Context, holdings: Callable[[], Iterable[Holding]]) -> None:
        self.ctx = ctx
        self.backups = Backups(ctx, self._fill_hole)
        self.offloads = Offloads(ctx, self._offload_over)
        self.device_room = DeviceRoom(ctx, self.offloads, holdings)
        self.loads = Loads(ctx, self.device_room)
        self.steps = Steps(ctx, self.device_room)
        self.pins = Pins(ctx, self.offloads)
        self._cleaner = Cleaner(ctx, self.offloads)
        self._forwards: set[Hop[None]] = set()
        self._behind_forwards: set[Node] = set()
        """Ends of paths that the write policy sees again when the forwards that write into them are over."""
        self._preempted: set[Node] = set()
        """Those of them that go to the host whatever the policy."""

    def committed(self, holding: Holding) -> None:
        """Count the hit and let the write policy act on the committed path."""
        holding.credit()
        if holding.device_end is not None:
            self._apply_write_policy(holding.device_end)
        self._cleaner.run()

    def released(self) -> None:
        """Give what has become free to those who wait, and see to what has become cold."""
        self.device_room.pump()
        self._cleaner.run()

    def _apply_write_policy(self, end: Node) -> None:
        if not end.attached or not self.ctx.reuses:
            return
        if any(awaits_engine(node) for node in end.path()):
            self._behind_forwards.add(end)
        min_hits = MIN_COMMITS.get(self.ctx.config.write_policy)
        if min_hits is not None:
            self.offloads.offload_path(end, min_hits=min_hits)
        self.back_up(end)

    def fence(self) -> Fence:
        """Return a fence behind what the engine's compute stream has queued.

        A device that cannot give one is lost: the cache fails, and keeps nothing that would be behind it.
        """
        ctx = self.ctx
        return ctx.attempt(lambda: ctx.device.fence(ctx.kv.compute_stream)) or PassedFence()

    def hold(self, end: Node, fence: Fence) -> None:
        """Keep the device pages up to ``end`` until the forward behind ``fence`` is over; then the policy acts.

        No copy is queued before: copies of one direction run in order, and one that waits for a forward
        would hold up those that give this very forward its pages.
        """
        self._forwards.add(hold_until(self.ctx, end, fence, self._forward_over))

    def _forward_over(self, hop: Hop[None], end: Node) -> None:
        self._forwards.discard(hop)
        ends, self._behind_forwards = {end, *self._behind_forwards}, set()
        preempted, self._preempted = self._preempted, set()
        for each in preempted:
            self.preempt(each.reachable())
        for each in ends:
            self._apply_write_policy(each.reachable())
        self.released()

    def preempt(self, end: Node) -> None:
        """Copy the path to ``end`` to the host whatever the policy; what a forward still writes, when that is over."""
        if any(awaits_engine(node) for node in end.path()):
            self._preempted.add(end)
        self.offloads.offload_path(end, min_hits=0)
        for node in end.path():
            node.hits = max(node.hits, ENOUGH_COMMITS)

    def back_up(self, end: Node) -> None:
        """See to it that what the host has of the path to ``end`` is stored; makes up for what was missed.

        What is still on its way to the host is seen to when it has arrived.
        """
        for node in reversed(end.path()):
            if self.backups.is_due(node):
                self.backups.request(node)
                return

    def forget(self) -> int:
        """Cut all that is cached off from matching, operator's pins included; returns how many pages of prefix went."""
        self.pins.drop_all()
        num_pages = clear_all(self.ctx.tree)
        self.ctx.room.dropped_pages["cleared"] += num_pages
        self.released()
        return num_pages

    async def flush(self, tier: Tier) -> None:
        """Return when what moves down now has reached ``tier`` or was given up; what comes later is not waited for."""
        # Stage by stage: when the wait for one is over it has asked for what follows from it in the next.
        if self._forwards:
            await asyncio.wait([hop.settled for hop in self._forwards])
        await self.offloads.settled()
        if tier == Tier.STORE:
            await self.backups.flushed()
            if self.ctx.is_write_back:  # a hole that a backup has met is filled by a copy; then it goes on
                await self.offloads.settled()
                await self.backups.flushed()

    async def drain(self) -> None:
        """Return when no forward is awaited, no offload runs and no backup waits."""
        while self._forwards or not self.offloads.is_idle or not self.backups.is_idle.is_set():
            if self._forwards:
                await asyncio.wait([hop.settled for hop in self._forwards])
            await self.offloads.settled()
            await self.backups.is_idle.wait()

    async def finish(self) -> None:
        """Return when nothing moves any more in any direction, and what the policy owes the store is written."""
        while hops := self.ctx.hops.live:
            await asyncio.wait([hop.settled for hop in hops])
            await self.drain()
        await self.drain()
        await write_down(self.ctx, self.offloads, self.back_up, self.drain)

    def _offload_over(self, ends: Sequence[Node]) -> None:
        for end in ends:
            self.back_up(end)
        self.device_room.pump()

    def _fill_hole(self, end: Node) -> None:
        # Under write_back the pages above an evicted node may be on the device only, and a stored tail
        # without its head is of no use to anybody.
        if self.ctx.is_write_back and end.host.pages is not None:
            held = self.ctx.pin(end, Tier.HOST)
            self.offloads.offload_path(end, min_hits=0, only_unstored=True)
            self.ctx.unpin(held)
