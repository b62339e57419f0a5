"""PrefixTree: which prefixes are cached, in which tier, in which pages.

A compressed radix tree over page-aligned token bytes. What always holds:

- a node's pages in a tier are all there or none; residency is computed from them;
- every attached node has at least one tier;
- the device is closed upwards: every node above one with device pages has device pages;
- pins sit at the end of what they protect; a node with a pinned node below keeps the tier;
- a split puts the new node above, so whoever holds a node still holds the same end;
- a detached node that is held stands on the nodes above it as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..abc import Fence
from ..errors import InvariantError
from ..eviction import EvictionPolicy, Lru
from ..types import Pages, Residency, Tier
from .departed import Departed
from .eviction_queue import EvictionQueue
from .node import Node
from .observer import Nobody, TreeObserver
from .pool import Owner, PagePool
from .walk import Match, common_nbytes, pages_off_device, walk_down

TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True)
class Graft:
    """What came of attaching pages: the node at their end, and which of them the tree did not take."""

    end: Node
    num_pages: int
    duplicates: list[slice]

    @property
    def taken(self) -> NDArray[np.bool_]:
        """Which pages the tree took, bool [num_pages]."""
        taken = np.ones(self.num_pages, dtype=np.bool_)
        for run in self.duplicates:
            taken[run] = False
        return taken


class PrefixTree:
    """All cached prefixes of one cache.

    Args:
        page_nbytes: bytes of one page of token ids.
        pools: the books of the device's and the host's pages; the tree moves pages from and to them.
        policies: who leaves a tier first; lru where none is given.
        observer: who hears of changes.
    """

    def __init__(
        self,
        page_nbytes: int,
        pools: dict[Tier, PagePool],
        *,
        policies: Mapping[Tier, EvictionPolicy] | None = None,
        observer: TreeObserver | None = None,
    ) -> None:
        self.page_nbytes = page_nbytes
        self.roots: dict[bytes, Node] = {}
        self.queues = {tier: EvictionQueue(tier, (policies or {}).get(tier, Lru())) for tier in TIERS}
        self.detached: set[Node] = set()
        self.departed = Departed()
        self.store_epoch = 1
        """Rises when the store is attached, cleared or changed: what a node knows of it is then void."""
        self._pools = pools
        self._observer = observer or Nobody()
        self._tick = 0

    # Looking

    def match(self, seed: bytes, data: bytes | bytearray, num_pages: int) -> Match:
        """Walk down as far as the first ``num_pages`` of ``data`` are cached, and mark the path as used."""
        root = self.roots.get(seed) or Node(None, seed, [])
        path, num_local, tail = walk_down(root, data, num_pages, self.page_nbytes)
        if not path:
            return Match(root, path, 0, 0, 0)
        self._tick += 1
        for node in path:
            node.used = self._tick
        return Match(root, path, num_local - pages_off_device(path, tail), num_local, tail)

    def cut(self, match: Match, num_pages: int) -> Node:
        """Return the node that ends at ``num_pages``, splitting where it must; for 0 the root, as :meth:`root`.

        ``match.path`` is out of date for nodes at and below the cut.
        """
        if num_pages == 0:
            return self.root(match.root.segment)
        passed = 0
        for node in match.path:
            if passed + node.num_pages >= num_pages:
                inside = num_pages - passed
                return node if inside == node.num_pages else self.split(node, inside)
            passed += node.num_pages
        raise InvariantError(f"cut at page {num_pages} of a match of {passed} pages")

    # Changing the shape

    def split(self, node: Node, num_pages: int) -> Node:
        """Put a new node with the first ``num_pages`` of ``node`` above it and return it."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self.page_nbytes
        upper = Node(parent, node.segment[:cut], node.hashes[:num_pages])
        upper.hits, upper.stored, upper.priority = node.hits, node.stored, node.priority
        upper.used, upper.created, upper.attached = node.used, node.created, node.attached
        for tier in TIERS:
            below = node.copy_in(tier)
            if below.pages is not None:
                above = upper.own_copy(tier)
                above.pages, below.pages = below.pages[:num_pages].copy(), below.pages[num_pages:].copy()
                above.ready = below.ready
                above.children = 1
        if node.is_linked:
            parent.link(upper)
        node.segment, node.hashes = node.segment[cut:], node.hashes[num_pages:]
        node.parent = upper
        upper.link(node)
        if not upper.attached:
            self.detached.add(upper)
        return upper

    def merge(self, node: Node) -> None:
        """Undo a split: take ``node`` into its only child where nothing tells the two apart.

        Whoever remembers the node finds what became of it by :meth:`Node.reachable`.
        """
        below, parent = node.only_child, node.parent
        if below is None or parent is None or not node.attached or node.is_held or not node.is_like(below):
            return
        for tier in TIERS:
            above, copy = node.copy_in(tier), below.copy_in(tier)
            if above.pages is not None and copy.pages is not None:
                copy.pages = np.concatenate((above.pages, copy.pages))
        below.segment, below.hashes = node.segment + below.segment, node.hashes + below.hashes
        below.parent = parent
        parent.link(below)
        self._forget(node)
        node.parent = below

    def _forget(self, node: Node) -> None:
        node.attached = False
        for queue in self.queues.values():
            queue.discard(node)

    def root(self, seed: bytes) -> Node:
        """Return the root of a namespace of prompts, made when it is not there. Pin it or graft below it."""
        root = self.roots.get(seed)
        if root is None:
            root = self.roots[seed] = Node(None, seed, [])
        return root

    def graft(
        self,
        tier: Tier,
        parent: Node,
        data: bytes | bytearray,
        hashes: Sequence[bytes],
        start_page: int,
        pages: Pages,
        *,
        source: Owner,
        ready: Sequence[Fence] = (),
    ) -> Graft:
        """Attach ``pages`` of ``tier`` below ``parent``, which ends at ``start_page`` of ``data``.

        Where the tree has the run in another tier the node adopts the pages; where it has it in this
        tier the pages are duplicates and stay with their owner.

        Raises: InvariantError: ``parent`` is detached, or is not on the device when ``tier`` is.
        Ownership: taken pages go from ``source`` to the tree.
        """
        if not parent.attached:
            raise InvariantError(f"pages cannot hang below {parent!r}: no match can reach it")
        graft = Graft(parent, len(pages), [])
        if not len(pages):
            return graft
        node = self.root(parent.segment) if parent.parent is None else parent
        step, position = self.page_nbytes, start_page
        end_page = start_page + len(pages)
        self._touch(node)
        while position < end_page:
            key = bytes(data[position * step : (position + 1) * step])
            child = node.children.get(key) if node.children else None
            if child is None:
                segment = bytes(data[position * step : end_page * step])
                child = Node(node, segment, hashes[position:end_page])
                child.created = child.used = self._tick
                self.put(tier, child, pages[position - start_page :], source=source, ready=ready)
                node.link(child, key)
            else:
                common = common_nbytes(child.segment, data, position * step, end_page * step) // step
                if common < child.num_pages:
                    child = self.split(child, common)
                child.used = self._tick
                inside = slice(position - start_page, position - start_page + child.num_pages)
                if child.copy_in(tier).pages is None:
                    self.put(tier, child, pages[inside], source=source, ready=ready)
                else:
                    graft.duplicates.append(inside)
            position += child.num_pages
            node = child
        graft.end = node
        return graft

    def put(
        self, tier: Tier, node: Node, pages: Pages, *, source: Owner, ready: Sequence[Fence] = ()
    ) -> None:
        """Give a node its pages of ``tier``.

        Raises: InvariantError: it has some or they are not as many as it needs, or it would be on the
            device without the node above; nothing is changed.
        """
        copy, parent = node.copy_in(tier), node.parent
        if parent is None or copy.pages is not None or len(pages) != node.num_pages:
            raise InvariantError(f"{node!r} cannot take {len(pages)} pages of {tier}")
        if tier is Tier.DEVICE and parent.parent is not None and parent.device.pages is None:
            raise InvariantError(f"{node!r} would be on the device, {parent!r} above it is not")
        self._pools[tier].move(pages, source, Owner.TREE)
        copy = node.own_copy(tier)
        copy.pages, copy.ready = pages.copy(), ready
        parent.own_copy(tier).children += 1
        self.queues[tier].offer(node)
        self._observer.stored(tier, node)

    def put_run(
        self, tier: Tier, nodes: Sequence[Node], pages: Pages, *, source: Owner, ready: Sequence[Fence]
    ) -> None:
        """Give ``nodes``, from the root's side on, their parts of ``pages``: :meth:`put` for each."""
        start = 0
        for node in nodes:
            self.put(tier, node, pages[start : start + node.num_pages], source=source, ready=ready)
            start += node.num_pages

    def take(self, tier: Tier, node: Node) -> Pages:
        """Take a node's pages of ``tier`` away and return them; a node left without a tier leaves the tree.

        Raises: InvariantError: there are none, or somebody holds them or stands on them; nothing is changed.
        Ownership: the pages are still booked as the tree's; the caller moves or frees them at once.
        """
        copy, parent = node.copy_in(tier), node.parent
        if copy.pages is None or parent is None:
            raise InvariantError(f"{node!r} has no {tier} pages to lose")
        if copy.pins or (tier is Tier.DEVICE and copy.children):
            raise InvariantError(
                f"{node!r} would lose its {tier} pages with a pin or a node standing on them"
            )
        leaves = node.residency is not Residency.BOTH
        if leaves and (node.children or node.is_held):
            raise InvariantError(
                f"{node!r} would lose its last tier with nodes below it or somebody holding it"
            )
        pages, copy.pages, copy.ready = copy.pages, None, ()
        parent.copy_in(tier).children -= 1
        self._observer.removed(tier, node)
        if leaves:
            parent.unlink(node)
            self._forget(node)
        self._settle(parent)
        return pages

    def prune(self, node: Node) -> int:
        """Free everything from ``node`` down; nothing there may be held. Returns how many pages went."""
        num_pages = 0
        for below in reversed(list(node.subtree())) if node.children else (node,):
            num_pages += below.num_pages
            for tier in TIERS:
                if below.copy_in(tier).pages is not None:
                    self._pools[tier].free(self.take(tier, below), Owner.TREE)
        return num_pages

    def detach(self, node: Node) -> None:
        """Cut ``node``, perhaps a root, and all below it off from matching; what is held lives until let go.

        What is held keeps the nodes above the cut as before.
        Raises: InvariantError: it is cut off already.
        """
        parent = node.parent
        if not node.attached:
            raise InvariantError(f"{node!r} is cut off already")
        if parent is None:
            del self.roots[node.segment]
            self._observer.cleared(node.segment)
        else:
            parent.unlink(node)
            parent.detached_children += 1
        nodes = list(node.subtree())
        for below in nodes:
            below.attached = False
            self.detached.add(below)
            for tier, queue in self.queues.items():
                queue.discard(below)
                if parent is not None and below.copy_in(tier).pages is not None:
                    self._observer.removed(tier, below)
        for below in reversed(nodes):
            self._reap(below)

    # Holding

    def pin(self, tier: Tier, node: Node) -> None:
        """Keep ``tier`` of ``node`` and of every node above it.

        Raises: InvariantError: it has no pages there, or is a root that is not in the tree and held by nobody.
        """
        if node.parent is None:
            is_there = self.roots.get(node.segment) is node or node in self.detached
        else:
            is_there = node.copy_in(tier).pages is not None
        if not is_there:
            raise InvariantError(f"{node!r} has nothing on {tier} to pin")
        node.own_copy(tier).pins += 1

    def unpin(self, tier: Tier, node: Node) -> None:
        """Undo one :meth:`pin`.

        Raises: InvariantError: there is none.
        """
        copy = node.copy_in(tier)
        if copy.pins <= 0:
            raise InvariantError(f"{node!r} unpinned from {tier} more often than pinned")
        copy.pins -= 1
        if not copy.pins:
            self._settle(node)

    def anchor(self, node: Node) -> None:
        """Keep at least one tier of ``node``: a move will attach pages below it."""
        node.anchors += 1

    def unanchor(self, node: Node) -> None:
        """Undo one :meth:`anchor`."""
        if node.anchors <= 0:
            raise InvariantError(f"{node!r} let go as an anchor more often than held")
        node.anchors -= 1
        if not node.anchors:
            self._settle(node)

    def _settle(self, node: Node) -> None:
        # Called when something stopped holding `node`, or stopped standing on it.
        if not node.attached:
            self._reap(node)
        elif node.parent is None:
            if not node.children and not node.is_held:
                self.roots.pop(node.segment, None)
        else:
            for queue in self.queues.values():
                queue.offer(node)

    def _reap(self, node: Node) -> None:
        # No match can reach `node`: free what nobody holds, from here upwards.
        while node in self.detached:
            parent = node.parent
            freed = parent is not None and self._free_unheld(node, parent)
            gone = node.residency is Residency.GHOST and not node.children and not node.is_held
            if gone:
                self.detached.discard(node)
            if parent is None or not (freed or gone):
                return
            if gone and node.is_linked:
                parent.unlink(node)
            elif gone:
                parent.detached_children -= 1
            node = parent
        if node.attached:
            self._settle(node)

    def _free_unheld(self, node: Node, parent: Node) -> bool:
        freed = False
        for tier in TIERS:
            copy = node.copy_in(tier)
            if copy.pages is not None and not copy.pins and not copy.children:
                pages, copy.pages, copy.ready = copy.pages, None, ()
                parent.copy_in(tier).children -= 1
                self._pools[tier].free(pages, Owner.TREE)
                freed = True
        return freed

    def _touch(self, node: Node) -> None:
        self._tick += 1
        above: Node | None = node
        while above is not None:
            above.used = self._tick
            above = above.parent
