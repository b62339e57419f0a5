"""Our side of the tree: PrefixTree, its pages' books, and Room, which evicts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hicache_async import TokenKey
from hicache_async.types import Tier

from ..geometry import LONG_PROMPT_PAGES, long_prompt
from ..trees import CHAIN, Leaves, chain_tree
from .tree_sides import report_tree


class Ours:
    """Tokens come as a NumPy array of int32, of which each match makes a key."""

    def __init__(self) -> None:
        self._tokens = np.asarray(long_prompt(), dtype=np.int32)

    def matching(self, num_nodes: int) -> Callable[[], object]:
        """Return what makes a key and matches it."""
        tree, tokens = chain_tree(TokenKey(self._tokens), num_nodes), self._tokens
        return lambda: tree.match(CHAIN.seed, TokenKey(tokens).data, LONG_PROMPT_PAGES)

    def pinning(self, num_nodes: int) -> Callable[[], object]:
        """Return what pins and unpins the last node on the device."""
        key = TokenKey(self._tokens)
        tree = chain_tree(key, num_nodes)
        end = tree.match(CHAIN.seed, key.data, LONG_PROMPT_PAGES).path[-1]

        def pin_and_unpin() -> None:
            tree.pin(Tier.DEVICE, end)
            tree.unpin(Tier.DEVICE, end)

        return pin_and_unpin

    def leaves(self, num_leaves: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what evicts and grows leaves of a full device."""
        leaves = Leaves(num_leaves)
        leaves.fill()
        return leaves.evict, leaves.grow


if __name__ == "__main__":
    report_tree(Ours())
