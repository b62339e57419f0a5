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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..abc import Fence
from ..errors import InvariantError
from ..types import Pages, Residency, Tier
from .eviction import EvictionQueue
from .node import Node
from .pool import Owner, PagePool
from .walk import LONG_NBYTES, common_nbytes, pages_off_device, run_from, shorten

TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True)
class Match:
    """How far a prompt is cached: on the device, and on device or host, both from the root on.

    ``path`` are the nodes walked through; of the last one only ``tail_pages`` pages match.
    """

    root: Node
    path: list[Node]
    device_pages: int
    local_pages: int
    tail_pages: int


@dataclass(slots=True)
class Graft:
    """What came of attaching pages: the node at their end, and which pages the tree took."""

    end: Node
    taken: np.ndarray[tuple[int], np.dtype[np.bool_]]


class PrefixTree:
    """All cached prefixes of one cache.

    Args:
        page_nbytes: bytes of one page of token ids.
        pools: the books of the device's and the host's pages; the tree moves pages from and to them.
    """

    def __init__(self, page_nbytes: int, pools: dict[Tier, PagePool]) -> None:
        self.page_nbytes = page_nbytes
        self.roots: dict[bytes, Node] = {}
        self.queues = {tier: EvictionQueue(tier) for tier in TIERS}
        self.detached: set[Node] = set()
        self.store_epoch = 1
        """Rises when the store is attached, cleared or changed: what a node knows of it is then void."""
        self._pools = pools
        self._tick = 0

    # Looking

    def match(self, seed: bytes, data: bytes | bytearray, num_pages: int) -> Match:
        """Walk down as far as the first ``num_pages`` of ``data`` are cached, and mark the path as used."""
        root = node = self.roots.get(seed) or Node(None, seed, [])
        path: list[Node] = []
        offset, step = 0, self.page_nbytes
        stop = num_pages * step
        tail = 0
        while offset < stop and node.children:
            child = node.only_child or node.children.get(bytes(data[offset : offset + step]))
            if child is None:
                break
            run, segment = [child], child.segment
            if child.only_child is not None and len(segment) < LONG_NBYTES:
                run, segment = run_from(child, (stop - offset) // step)
            if not data.startswith(segment, offset, stop):
                common = common_nbytes(segment, data, offset, stop) // step * step
                if common:
                    tail = shorten(run, common // step)
                    path += run
                    offset += common
                break
            path += run
            offset += len(segment)
            node = run[-1]
            tail = node.num_pages
        self._tick += 1
        for node in path:
            node.used = self._tick
        local = offset // step
        return Match(root, path, local - pages_off_device(path, tail), local, tail)

    def cut(self, match: Match, num_pages: int) -> Node:
        """Return the node that ends at ``num_pages``, splitting where it must; the root for 0.

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
        upper.hits, upper.stored = node.hits, node.stored
        upper.used, upper.attached = node.used, node.attached
        for tier in TIERS:
            above, below = upper.copy_in(tier), node.copy_in(tier)
            if below.pages is not None:
                above.pages, below.pages = below.pages[:num_pages].copy(), below.pages[num_pages:].copy()
                above.ready = below.ready
                above.children = 1
        if self._is_linked(node):
            self._add_child(parent, upper)
        node.segment, node.hashes = node.segment[cut:], node.hashes[num_pages:]
        node.parent = upper
        self._add_child(upper, node)
        if not upper.attached:
            self.detached.add(upper)
        return upper

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
        taken = np.ones(len(pages), dtype=np.bool_)
        if not len(pages):
            return Graft(parent, taken)
        node = self.root(parent.segment) if parent.parent is None else parent
        step, position = self.page_nbytes, start_page
        end_page = start_page + len(pages)
        self._touch(node)
        while position < end_page:
            key = bytes(data[position * step : (position + 1) * step])
            child = node.children.get(key) if node.children else None
            if child is None:
                segment = bytes(data[position * step : end_page * step])
                child = Node(node, segment, list(hashes[position:end_page]))
                self.put(tier, child, pages[position - start_page :], source=source, ready=ready)
                self._add_child(node, child)
            else:
                common = common_nbytes(child.segment, data, position * step, end_page * step) // step
                if common < child.num_pages:
                    child = self.split(child, common)
                inside = slice(position - start_page, position - start_page + child.num_pages)
                if child.copy_in(tier).pages is None:
                    self.put(tier, child, pages[inside], source=source, ready=ready)
                else:
                    taken[inside] = False
            position += child.num_pages
            child.used = self._tick
            node = child
        return Graft(node, taken)

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
        copy.pages, copy.ready = pages.copy(), ready
        parent.copy_in(tier).children += 1
        self.queues[tier].offer(node)

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

        Raises: InvariantError: somebody holds them or stands on them; nothing is changed.
        Ownership: the pages are still booked as the tree's; the caller moves or frees them at once.
        """
        copy, parent = node.copy_in(tier), node.parent
        assert copy.pages is not None and parent is not None
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
        if leaves:
            self._unlink(node)
        self._settle(parent)
        return pages

    def prune(self, node: Node) -> int:
        """Free everything from ``node`` down; nothing there may be held. Returns how many pages went."""
        nodes = list(node.subtree())
        for below in reversed(nodes):
            for tier in TIERS:
                if below.copy_in(tier).pages is not None:
                    self._pools[tier].free(self.take(tier, below), Owner.TREE)
        return sum(below.num_pages for below in nodes)

    def detach(self, node: Node) -> None:
        """Cut ``node`` and all below it off from matching; what is held lives until it is let go.

        What is held keeps the nodes above the cut as before.
        """
        parent = node.parent
        assert parent is not None and node.attached
        self._remove_child(parent, node)
        parent.detached_children += 1
        nodes = list(node.subtree())
        for below in nodes:
            below.attached = False
            self.detached.add(below)
            for queue in self.queues.values():
                queue.discard(below)
        for below in reversed(nodes):
            self._reap(below)

    # Holding

    def pin(self, tier: Tier, node: Node) -> None:
        """Keep ``tier`` of ``node`` and of every node above it.

        Raises: InvariantError: it has no pages there, or is a root that is not in the tree.
        """
        copy = node.copy_in(tier)
        is_there = self.roots.get(node.segment) is node if node.parent is None else copy.pages is not None
        if not is_there:
            raise InvariantError(f"{node!r} has nothing on {tier} to pin")
        copy.pins += 1

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
        changed = True
        while changed and node in self.detached:
            parent, changed = node.parent, False
            assert parent is not None
            for tier in TIERS:
                copy = node.copy_in(tier)
                if copy.pages is not None and not copy.pins and not copy.children:
                    pages, copy.pages, copy.ready = copy.pages, None, ()
                    parent.copy_in(tier).children -= 1
                    self._pools[tier].free(pages, Owner.TREE)
                    changed = True
            if node.residency is Residency.GHOST and not node.children and not node.is_held:
                self.detached.discard(node)
                if self._is_linked(node):
                    self._remove_child(parent, node)
                else:
                    parent.detached_children -= 1
                changed = True
            node = parent
        if changed and node.attached:
            self._settle(node)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        node.attached = False
        for queue in self.queues.values():
            queue.discard(node)
        self._remove_child(node.parent, node)

    def _is_linked(self, node: Node) -> bool:
        # The topmost node of what was detached is not among its parent's children.
        siblings = node.parent.children if node.parent is not None else None
        return siblings is not None and siblings.get(node.segment[: self.page_nbytes]) is node

    def _add_child(self, parent: Node, node: Node) -> None:
        # Takes the place of a child with the same first page.
        if parent.children is None:
            parent.children = {}
        parent.children[node.segment[: self.page_nbytes]] = node
        parent.only_child = node if len(parent.children) == 1 else None

    def _remove_child(self, parent: Node, node: Node) -> None:
        assert parent.children is not None
        del parent.children[node.segment[: self.page_nbytes]]
        parent.only_child = next(iter(parent.children.values())) if len(parent.children) == 1 else None
        if not parent.children:
            parent.children = None

    def _touch(self, node: Node) -> None:
        self._tick += 1
        above: Node | None = node
        while above is not None:
            above.used = self._tick
            above = above.parent
