"""Clear: what leaves the tree when an operator empties a tier, and which stored objects are this cache's."""

from __future__ import annotations

import re

from ..types import Residency, Tier
from .node import Node
from .pool import Owner, PagePool
from .tree import PrefixTree


def clear_all(tree: PrefixTree) -> int:
    """Cut everything off from matching; what is held lives until let go. Returns how many pages of prefix went."""
    roots = list(tree.roots.values())
    num_pages = sum(node.num_pages for root in roots for node in root.subtree())
    for root in roots:
        tree.detach(root)
    tree.departed.clear()
    return num_pages


def clear_tier(tree: PrefixTree, tier: Tier, pool: PagePool) -> int:
    """Let no match find pages of ``tier`` any more, and keep what another tier has.

    A node gives the tier up where nobody holds its pages. Where somebody does, and where what hangs below
    could not be reached without it, the node is cut off with all below; what is held lives until let go.

    Args:
        pool: the book of that tier.
    Returns: how many pages of prefix went, out of every tier. Cost: the size of the tree.
    """
    nodes = [node for root in tree.roots.values() for node in root.subtree() if node is not root]
    for node in reversed(nodes):  # children first: what stands on a node then is held
        if not node.attached or node.copy_in(tier).pages is None:
            continue
        if _can_give_up(node, tier):
            pool.free(tree.take(tier, node), Owner.TREE)
        else:
            tree.detach(node)
    return sum(node.num_pages for node in nodes if not node.attached)


def _can_give_up(node: Node, tier: Tier) -> bool:
    copy = node.copy_in(tier)
    if copy.pins or copy.children:
        return False
    return node.residency is Residency.BOTH or not (node.children or node.is_held)


def namespace_pattern(digest: str) -> re.Pattern[str]:
    """Return what the names of all objects of a namespace begin with, those of other ranks included.

    The manifest of the namespace does not match: it says what the digest means, whoever still uses it.

    Args:
        digest: of the namespace, as ``ukv1-0123456789abcdef``.
    """
    return re.compile(rf"[0-9a-f]{{64}}_{re.escape(digest)}_")
