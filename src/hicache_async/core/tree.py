"""PrefixTree: which prefixes are cached, in which tier, in which pages.

A compressed radix tree over page-aligned token bytes. What always holds:

- a node's pages in a tier are all there or none; residency is computed from them;
- every attached node has at least one tier;
- the device is closed upwards: every node above one with device pages has device pages;
- pins sit at the end of what they protect; a node with a pinned node below keeps the tier;
- a split puts the new node above, so whoever holds a node still holds the same end.
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
        self._ghost_root = Node(None, b"", [])

    # Looking

    def match(self, seed: bytes, data: bytes | bytearray, num_pages: int) -> Match:
        """Walk down as far as the first ``num_pages`` pages of ``data`` are cached, and mark the path as used."""
        root = self.roots.get(seed)
        if root is None:
            root = Node(None, seed, [])
        path: list[Node] = []
        node, offset, step = root, 0, self.page_nbytes
        stop = num_pages * step
        device_end = tail = 0
        while offset < stop and node.children:
            child = node.children.get(bytes(data[offset : offset + step]))
            if child is None:
                break
            length = len(child.segment)
            whole = offset + length <= stop and data.startswith(child.segment, offset)
            matched = length if whole else self._common_pages(child, data, offset, stop) * step
            path.append(child)
            if child.device.pages is not None and device_end == offset:
                device_end += matched
            offset += matched
            tail = matched
            if not whole:
                break
            node = child
        self._tick += 1
        for node in path:
            node.used = self._tick
        return Match(root, path, device_end // step, offset // step, tail // step)

    def _common_pages(self, node: Node, data: bytes | bytearray, offset: int, stop: int) -> int:
        length = min(len(node.segment), stop - offset)
        mine = np.frombuffer(node.segment, np.uint32, count=length // 4)
        theirs = np.frombuffer(data, np.uint32, count=length // 4, offset=offset)
        differs = mine != theirs
        first = int(differs.argmax())
        same = length // 4 if not differs[first] else first
        return same * 4 // self.page_nbytes

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
        assert parent is not None and parent.children is not None
        cut = num_pages * self.page_nbytes
        upper = Node(parent, node.segment[:cut], node.hashes[:num_pages])
        upper.hits, upper.used, upper.stored, upper.attached = node.hits, node.used, node.stored, node.attached
        for tier in TIERS:
            above, below = upper.copy_in(tier), node.copy_in(tier)
            if below.pages is not None:
                above.pages, below.pages = below.pages[:num_pages].copy(), below.pages[num_pages:].copy()
                above.ready = below.ready
                above.children = 1
        if parent is not self._ghost_root:
            parent.children[self._first_page(node)] = upper
        node.segment, node.hashes = node.segment[cut:], node.hashes[num_pages:]
        upper.children = {self._first_page(node): node}
        node.parent = upper
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

        Ownership: taken pages go from ``source`` to the tree.
        """
        node = self.root(parent.segment) if parent.parent is None else parent
        step, position = self.page_nbytes, start_page
        end_page = start_page + len(pages)
        taken = np.ones(len(pages), dtype=np.bool_)
        self._touch(node)
        while position < end_page:
            key = bytes(data[position * step : (position + 1) * step])
            child = node.children.get(key) if node.children else None
            if child is None:
                segment = bytes(data[position * step : end_page * step])
                child = Node(node, segment, list(hashes[position:end_page]))
                if node.children is None:
                    node.children = {}
                node.children[key] = child
            else:
                common = self._common_pages(child, data, position * step, end_page * step)
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

    def put(self, tier: Tier, node: Node, pages: Pages, *, source: Owner, ready: Sequence[Fence] = ()) -> None:
        """Give a node its pages of ``tier``."""
        assert node.parent is not None and len(pages) == node.num_pages
        self._pools[tier].move(pages, source, Owner.TREE)
        copy = node.copy_in(tier)
        copy.pages, copy.ready = pages.copy(), ready
        node.parent.copy_in(tier).children += 1
        self.queues[tier].offer(node)

    def take(self, tier: Tier, node: Node) -> Pages:
        """Take a node's pages of ``tier`` away and return them; a node left without a tier leaves the tree.

        Ownership: the pages are still booked as the tree's; the caller moves or frees them at once.
        """
        copy, parent = node.copy_in(tier), node.parent
        assert copy.pages is not None and parent is not None
        leaves = node.residency is not Residency.BOTH
        if leaves and (node.children or node.is_held):
            raise InvariantError(f"{node!r} would lose its last tier with nodes below it or somebody holding it")
        pages, copy.pages, copy.ready = copy.pages, None, ()
        parent.copy_in(tier).children -= 1
        if leaves:
            self._unlink(node)
        self._settle(parent)
        return pages

    def prune(self, node: Node) -> int:
        """Free everything from ``node`` down; nothing there may be held. Returns how many pages of prefix went."""
        nodes = list(node.subtree())
        for below in reversed(nodes):
            for tier in TIERS:
                if below.copy_in(tier).pages is not None:
                    self._pools[tier].free(self.take(tier, below), Owner.TREE)
        return sum(below.num_pages for below in nodes)

    def detach(self, node: Node) -> None:
        """Cut ``node`` and all below it off from matching; what is held lives until it is let go."""
        parent = node.parent
        assert parent is not None and node.attached
        for tier in TIERS:
            if node.copy_in(tier).pages is not None:
                parent.copy_in(tier).children -= 1
                self._ghost_root.copy_in(tier).children += 1
        self._remove_child(parent, node)
        node.parent = self._ghost_root
        nodes = list(node.subtree())
        for below in nodes:
            below.attached = False
            self.detached.add(below)
            for queue in self.queues.values():
                queue.discard(below)
        for below in reversed(nodes):
            self._reap(below)
        self._settle(parent)

    # Holding

    def pin(self, tier: Tier, node: Node) -> None:
        """Keep ``tier`` of ``node`` and of every node above it."""
        node.copy_in(tier).pins += 1

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
            assert parent is not None
            for tier in TIERS:
                copy = node.copy_in(tier)
                if copy.pages is not None and not copy.pins and not copy.children:
                    pages, copy.pages = copy.pages, None
                    parent.copy_in(tier).children -= 1
                    self._pools[tier].free(pages, Owner.TREE)
            if node.residency is not Residency.GHOST or node.children or node.is_held:
                return
            self.detached.discard(node)
            self._remove_child(parent, node)
            node = parent

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        for queue in self.queues.values():
            queue.discard(node)
        self._remove_child(node.parent, node)

    def _remove_child(self, parent: Node, node: Node) -> None:
        if parent is self._ghost_root:
            return
        assert parent.children is not None
        del parent.children[self._first_page(node)]
        if not parent.children:
            parent.children = None

    def _touch(self, node: Node) -> None:
        self._tick += 1
        above: Node | None = node
        while above is not None:
            above.used = self._tick
            above = above.parent

    def _first_page(self, node: Node) -> bytes:
        return node.segment[: self.page_nbytes]
