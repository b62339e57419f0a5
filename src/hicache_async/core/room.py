"""Room: who leaves a tier so that somebody else gets pages. One plan, made and booked in one sync step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..types import Pages, Residency, Tier
from .node import Node
from .pool import Owner, PagePool
from .tree import PrefixTree


@dataclass(slots=True)
class Move:
    """A node whose device pages go to host pages that are its own already; the copy is still to be made.

    ``device_pages`` are out of the tree: to be freed behind the copy's fence.
    """

    node: Node
    device_pages: Pages
    host_pages: Pages


@dataclass(slots=True)
class RoomPlan:
    """What making room did: pages to be had at once, and copies that must be submitted now."""

    num_pages: int = 0
    moves: list[Move] = field(default_factory=list)


class Room:
    """Make room in the device's and the host's pool by evicting what was used longest ago.

    A device victim with a host copy just loses its device pages. One without is dropped under the
    write-through policies, whose copy is made at commit; under write_back it moves to host pages
    reserved in the same step, if need be those of the host's own oldest nodes. Nothing waits for the
    store, and no source of a running move is ever a victim: it is pinned.

    Args:
        write_back: whether device victims move to the host.
    """

    def __init__(self, tree: PrefixTree, pools: dict[Tier, PagePool], *, write_back: bool) -> None:
        self._tree = tree
        self._pools = pools
        self._write_back = write_back
        self.evicted_pages = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.dropped_pages: Counter[str] = Counter()
        """Pages of prefix that left the last tier of this process, by reason."""

    def plan_room(self, tier: Tier, num_pages: int) -> RoomPlan:
        """Evict until ``num_pages`` of ``tier`` can be taken, or nothing more can go.

        Returns: how many can be taken once the returned moves are submitted and their device pages freed.
        Ownership: device pages of a move are the caller's to free, behind the fence of its copy.
        """
        if tier is Tier.HOST:
            self._make_host_room(num_pages)
            return RoomPlan(self._pools[Tier.HOST].available(fenced=False))
        plan = RoomPlan()
        pool, queue = self._pools[Tier.DEVICE], self._tree.queues[Tier.DEVICE]
        skipped: list[Node] = []
        missing = num_pages - pool.available(fenced=True)
        while missing > 0 and (victim := queue.pop()) is not None:
            if victim.residency is Residency.BOTH:
                self._free(Tier.DEVICE, victim)
            elif (move := self._move_to_host(victim)) is not None:
                # Its host pages are empty as yet: they must not make room for the next move.
                self._tree.pin(Tier.HOST, victim)
                plan.moves.append(move)
            elif not self._drop(victim):
                skipped.append(victim)
                continue
            missing -= victim.num_pages
        for node in skipped:
            queue.offer(node)
        for move in plan.moves:
            self._tree.unpin(Tier.HOST, move.node)
        plan.num_pages = pool.available(fenced=True) + sum(len(move.device_pages) for move in plan.moves)
        return plan

    def _make_host_room(self, num_pages: int) -> None:
        queue = self._tree.queues[Tier.HOST]
        skipped: list[Node] = []
        missing = num_pages - self._pools[Tier.HOST].available(fenced=False)
        while missing > 0 and (victim := queue.pop()) is not None:
            if victim.residency is not Residency.BOTH and (victim.is_held or victim.children):
                skipped.append(victim)
                continue
            if victim.residency is not Residency.BOTH:
                is_stored = victim.stored == self._tree.store_epoch
                reason = "host_eviction" if is_stored else "host_eviction_unstored"
                self.dropped_pages[reason] += victim.num_pages
            self._free(Tier.HOST, victim)
            missing -= victim.num_pages
        for node in skipped:
            queue.offer(node)

    def _move_to_host(self, victim: Node) -> Move | None:
        if not self._write_back:
            return None
        num_pages, host = victim.num_pages, self._pools[Tier.HOST]
        if num_pages > host.capacity:
            return None
        self._make_host_room(num_pages)
        if host.available(fenced=False) < num_pages:
            return None
        host_pages = host.take(num_pages, Owner.LEASE, fenced=False).pages
        self._tree.put(Tier.HOST, victim, host_pages, source=Owner.LEASE)
        self.evicted_pages[Tier.DEVICE] += num_pages
        return Move(victim, self._tree.take(Tier.DEVICE, victim), host_pages)

    def _drop(self, victim: Node) -> bool:
        # A device-only node goes with what hangs below it on the host; held nodes below keep it.
        nodes = list(victim.subtree())
        if any(node.is_held for node in nodes):
            return False
        reason = "host_full" if self._write_back else "unbacked_eviction"
        self.evicted_pages[Tier.DEVICE] += victim.num_pages
        self.evicted_pages[Tier.HOST] += sum(node.num_pages for node in nodes if node.host.pages is not None)
        self.dropped_pages[reason] += self._tree.prune(victim)
        return True

    def _free(self, tier: Tier, victim: Node) -> None:
        self.evicted_pages[tier] += victim.num_pages
        self._pools[tier].free(self._tree.take(tier, victim), Owner.TREE)
