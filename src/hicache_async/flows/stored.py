"""What the tree knows of the store: which nodes are stored, however they were split meanwhile."""

from __future__ import annotations

from ..core.node import Node
from ..core.tree import PrefixTree


def mark_stored(tree: PrefixTree, last: Node, num_pages: int, count: int) -> None:
    """Note that of the ``num_pages`` above the end of ``last`` the first ``count`` are stored.

    A node of which only a part is stored is split.
    """
    node, end = last, num_pages
    while end > 0 and node.parent is not None:
        start, above = end - node.num_pages, node.parent
        if end <= count:
            node.stored = tree.store_epoch
        elif 0 <= start < count:
            tree.split(node, count - start).stored = tree.store_epoch
        node, end = above, start
