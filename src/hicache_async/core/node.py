"""Node: a run of pages in the prefix tree, and what each tier holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..abc import Fence
from ..types import Pages, Residency, Tier


class TierCopy:
    """What one tier holds of a node: all of its pages or none.

    Attributes:
        pages: page ids, int64 [num_pages of the node], or None.
        pins: leases and moves that end at this node; it and all nodes above keep the tier.
        children: how many children have pages in this tier.
        ready: fences behind which the bytes are there, one per layer or one for all; () when they are.
            A fence that failed has passed too, so only the one who watches it may take it away.
    """

    __slots__ = ("children", "pages", "pins", "ready")

    def __init__(self) -> None:
        self.pages: Pages | None = None
        self.pins = 0
        self.children = 0
        self.ready: Sequence[Fence] = ()

    def is_ready(self) -> bool:
        """Whether the bytes are known to be there: whoever watches the fences has seen them pass unfailed."""
        return not self.ready


class Node:
    """A compressed run of whole pages.

    Attributes:
        segment: the token ids of the run as little-endian uint32, a whole number of pages.
        children: by the bytes of their first page; None while there are none.
        only_child: the child, where there is exactly one; lets a match walk without looking up keys.
        hashes: the chained hash of each page, from the root of the prompt.
        hits: commits that went through this node.
        used: when it was last matched or committed, in ticks of the tree; never newer than its parent's.
        detached_children: how many children were cut off from matching while somebody held them or a node
            below; they stand on this node as before.
        anchors: moves that will attach pages below; the node may not lose its last tier.
        stored: the store epoch in which all of its pages were known to be stored; 0: never.
        attached: whether a match can reach it. A detached node lives until its last pin is gone; one that
            lost its last tier is of no more use.
    """

    __slots__ = (
        "anchors", "attached", "children", "detached_children", "device", "hashes", "hits", "host",
        "only_child", "parent", "segment", "stored", "used",
    )  # fmt: skip

    def __init__(self, parent: Node | None, segment: bytes, hashes: list[bytes]) -> None:
        self.parent = parent
        self.segment = segment
        self.children: dict[bytes, Node] | None = None
        self.only_child: Node | None = None
        self.detached_children = 0
        self.device = TierCopy()
        self.host = TierCopy()
        self.hashes = hashes
        self.hits = 0
        self.used = 0
        self.anchors = 0
        self.stored = 0
        self.attached = True

    def __repr__(self) -> str:
        pins = f"pins {self.device.pins}/{self.host.pins}/{self.anchors}"
        detached = "" if self.attached else " detached"
        return f"<Node {len(self.hashes)} pages {self.residency} {pins}{detached}>"

    def copy_in(self, tier: Tier) -> TierCopy:
        """Return what ``tier`` holds of this node."""
        return self.device if tier is Tier.DEVICE else self.host

    @property
    def num_pages(self) -> int:
        """Length of the run in pages."""
        return len(self.hashes)

    @property
    def residency(self) -> Residency:
        """Which tiers hold the run; GHOST: none."""
        if self.device.pages is not None:
            return Residency.BOTH if self.host.pages is not None else Residency.DEVICE
        return Residency.HOST if self.host.pages is not None else Residency.GHOST

    @property
    def is_held(self) -> bool:
        """Whether a lease or a move ends here, or a detached node stands on this one."""
        return bool(self.device.pins or self.host.pins or self.anchors or self.detached_children)

    def path(self) -> list[Node]:
        """Return the nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def subtree(self) -> Iterator[Node]:
        """Yield this node and all below it, parents before their children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children.values())


def pages_of(nodes: Iterable[Node], tier: Tier) -> Pages:
    """Return the page ids of ``tier`` that ``nodes`` hold, int64, node after node; those without any add none."""
    held = [copy.pages for node in nodes if (copy := node.copy_in(tier)).pages is not None]
    return np.concatenate(held) if held else np.empty(0, dtype=np.int64)
