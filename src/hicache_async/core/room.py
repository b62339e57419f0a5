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
        writes: whether this rank stores its pages; where another one does, it is not known here which are.
    """

    def __init__(
        self, tree: PrefixTree, pools: dict[Tier, PagePool], *, write_back: bool, writes: bool = True
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._write_back = write_back
        self._writes = writes
        self.evicted_pages = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.dropped_pages: Counter[str] = Counter()
        """Pages of prefix that left the last tier of this process, by reason."""

    def plan_room(self, tier: Tier, num_pages: int, *, spare_copies: bool = False) -> RoomPlan:
        """Evict until ``num_pages`` of ``tier`` can be taken, or nothing more can go.

        Args:
            spare_copies: whether host copies of what the device has stay: who copies ahead of need would
                otherwise undo its own work.
        Returns: how many can be taken once the returned moves are submitted and their device pages freed.
        Ownership: device pages of a move are the caller's to free, behind the fence of its copy.
        """
        if tier is Tier.HOST:
            self._make_host_room(num_pages, spare_copies=spare_copies)
            return RoomPlan(self._pools[Tier.HOST].available(fenced=False))
        plan = RoomPlan()
        pool, queue = self._pools[Tier.DEVICE], self._tree.queues[Tier.DEVICE]
        skipped: list[Node] = []
        emptied: list[Node] = []
        missing = num_pages - pool.available(fenced=True)
        while missing > 0 and (victim := queue.pop()) is not None:
            going = min(missing, victim.num_pages)
            movable = self._movable_pages(victim, going)
            if victim.residency is Residency.BOTH:
                self._free(Tier.DEVICE, victim, going)
                emptied.append(victim)
            elif movable < going and self._drop(victim, going - movable):
                going -= movable  # what the host can take comes next, as the end of what is left
            elif movable:
                going = movable
                plan.moves.append(self._move_to_host(victim, going))
                # Its host pages are empty as yet: they must not make room for the next move.
                self._tree.pin(Tier.HOST, victim)
            else:
                skipped.append(victim)
                continue
            missing -= going
        for node in skipped:
            queue.offer(node)
        self._merge(emptied, moved={move.node for move in plan.moves})
        for move in plan.moves:
            self._tree.unpin(Tier.HOST, move.node)
        plan.num_pages = pool.available(fenced=True) + sum(len(move.device_pages) for move in plan.moves)
        return plan

    def _merge(self, emptied: list[Node], moved: set[Node]) -> None:
        # The bytes of what has moved are on their way, which its node does not say yet.
        for node in emptied:
            if node.only_child not in moved:
                self._tree.merge(node)

    def _make_host_room(self, num_pages: int, *, spare_copies: bool = False) -> None:
        queue = self._tree.queues[Tier.HOST]
        skipped: list[Node] = []
        emptied: list[Node] = []
        missing = num_pages - self._pools[Tier.HOST].available(fenced=False)
        while missing > 0 and (victim := queue.pop()) is not None:
            leaves = victim.residency is not Residency.BOTH
            if (victim.is_held or victim.children) if leaves else spare_copies:
                skipped.append(victim)
                continue
            going = min(missing, victim.num_pages)
            if leaves:
                unstored = self._writes and victim.stored != self._tree.store_epoch
                self.dropped_pages["host_eviction_unstored" if unstored else "host_eviction"] += going
            self._free(Tier.HOST, victim, going)
            emptied.append(victim)
            missing -= going
        for node in skipped:
            queue.offer(node)
        self._merge(emptied, moved=set())

    def _cut_tail(self, victim: Node, num_pages: int) -> None:
        # Exactly what is needed goes, from the end: `victim` becomes its own last pages.
        if num_pages < victim.num_pages:
            self._tree.split(victim, victim.num_pages - num_pages)

    def _movable_pages(self, victim: Node, num_pages: int) -> int:
        # How many pages the host takes of a victim that would be lost; its own oldest nodes leave for them.
        if not self._write_back or victim.residency is Residency.BOTH:
            return 0
        self._make_host_room(num_pages)
        return min(num_pages, self._pools[Tier.HOST].available(fenced=False))

    def _move_to_host(self, victim: Node, num_pages: int) -> Move:
        self._cut_tail(victim, num_pages)
        host_pages = self._pools[Tier.HOST].take(num_pages, Owner.LEASE, fenced=False).pages
        self._tree.put(Tier.HOST, victim, host_pages, source=Owner.LEASE)
        self.evicted_pages[Tier.DEVICE] += num_pages
        return Move(victim, self._tree.take(Tier.DEVICE, victim), host_pages)

    def _drop(self, victim: Node, num_pages: int) -> bool:
        # A device-only node goes with what hangs below it on the host; held nodes below keep it.
        if victim.is_held or (victim.children and any(node.is_held for node in victim.subtree())):
            return False
        self._cut_tail(victim, num_pages)
        lost = "host_full" if self._write_back else "unbacked_eviction"
        for node in victim.subtree():
            self._tree.departed.remember(node)
            is_stored = node.stored == self._tree.store_epoch
            self.dropped_pages["device_eviction" if is_stored else lost] += node.num_pages
        dropped = self._tree.prune(victim)
        self.evicted_pages[Tier.DEVICE] += num_pages
        self.evicted_pages[Tier.HOST] += dropped - num_pages
        return True

    def _free(self, tier: Tier, victim: Node, num_pages: int) -> None:
        self._cut_tail(victim, num_pages)
        self.evicted_pages[tier] += num_pages
        if victim.residency is not Residency.BOTH:
            self._tree.departed.remember(victim)
        self._pools[tier].free(self._tree.take(tier, victim), Owner.TREE)
