"""Node: a run of pages in the prefix tree, and what each tier holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

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


class _Nothing(TierCopy):
    """What a tier holds of nodes that it never held; shared by all of them, so it cannot be written."""

    __slots__ = ()

    def __init__(self) -> None:
        for name, value in (("pages", None), ("pins", 0), ("children", 0), ("ready", ())):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a copy that is not there cannot be set; take own_copy() of the node")


NOTHING: Final = _Nothing()

NO_PRIORITY: Final = -(1 << 63)
"""Below every priority, so that the first commit raises it to its own."""


class Node:
    """A compressed run of whole pages.

    Attributes:
        segment: the token ids of the run as little-endian uint32, a whole number of pages.
        children: by the bytes of their first page; None while there are none.
        only_child: the child, where there is exactly one; lets a match walk without looking up keys.
        hashes: the chained hash of each page, from the root of the prompt.
        hits: commits that went through this node.
        used: when it was last matched or committed, in ticks of the tree; never newer than its parent's.
        created: when its first tier got it, in ticks of the tree.
        priority: the highest of the requests that committed it; NO_PRIORITY: none has.
        detached_children: how many children were cut off from matching while somebody held them or a node
            below; they stand on this node as before.
        anchors: moves that will attach pages below; the node may not lose its last tier.
        stored: the store epoch in which all of its pages were known to be stored; 0: never.
        attached: whether a match can reach it. A detached node lives until its last pin is gone; one that
            lost its last tier is of no more use.
    """

    __slots__ = (
        "anchors", "attached", "children", "created", "detached_children", "device", "hashes", "hits", "host",
        "only_child", "parent", "priority", "segment", "stored", "used",
    )  # fmt: skip

    def __init__(self, parent: Node | None, segment: bytes, hashes: Iterable[bytes]) -> None:
        self.parent = parent
        self.segment = segment
        self.children: dict[bytes, Node] | None = None
        self.only_child: Node | None = None
        self.detached_children = 0
        self.device: TierCopy = NOTHING
        self.host: TierCopy = NOTHING
        self.hashes = tuple(hashes)
        self.hits = 0
        self.used = 0
        self.created = 0
        self.priority = NO_PRIORITY
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

    def own_copy(self, tier: Tier) -> TierCopy:
        """Return what ``tier`` holds of this node, to be written."""
        copy = self.device if tier is Tier.DEVICE else self.host
        if copy is NOTHING:
            copy = TierCopy()
            if tier is Tier.DEVICE:
                self.device = copy
            else:
                self.host = copy
        return copy

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

    def is_like(self, below: Node) -> bool:
        """Whether nothing but their place tells this node and ``below`` apart, so that they might be one."""
        mine = (self.residency, self.hits, self.stored, self.used, self.created, self.priority)
        copies = (self.device, self.host, below.device, below.host)
        theirs = (below.residency, below.hits, below.stored, below.used, below.created, below.priority)
        return mine == theirs and all(copy.is_ready() for copy in copies)

    @property
    def first_page(self) -> bytes:
        """The token bytes of the first page, by which the node above knows this one."""
        return self.segment[: len(self.segment) // len(self.hashes)]

    @property
    def is_linked(self) -> bool:
        """Whether the node above knows this one; not so the topmost of what was detached."""
        siblings = self.parent.children if self.parent is not None else None
        return siblings is not None and siblings.get(self.first_page) is self

    def link(self, child: Node, first_page: bytes | None = None) -> None:
        """Make ``child`` known below this node, in place of a child with the same first page.

        Args:
            first_page: that of ``child``, where it is at hand.
        """
        if self.children is None:
            self.children = {}
        self.children[child.first_page if first_page is None else first_page] = child
        self.only_child = child if len(self.children) == 1 else None

    def unlink(self, child: Node) -> None:
        """Undo :meth:`link`."""
        assert self.children is not None
        del self.children[child.first_page]
        self.only_child = next(iter(self.children.values())) if len(self.children) == 1 else None
        if not self.children:
            self.children = None

    def reachable(self) -> Node:
        """Return this node, or what a match still reaches of its path: the node that it was merged into, or
        the first one above that has not been cut off; perhaps a root.
        """
        node = self
        while not node.attached and node.parent is not None:
            node = node.parent
        return node

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
