"""Prefix trees of two shapes: one long conversation, and many prompts that share nothing."""

from __future__ import annotations

from itertools import count

from hicache_async import TokenKey
from hicache_async.core.hashing import HashChain
from hicache_async.core.pool import FreeList, Owner, PagePool
from hicache_async.core.room import Room
from hicache_async.core.tokens import TOKEN_NBYTES
from hicache_async.core.tree import TIERS, PrefixTree
from hicache_async.types import Tier

from . import geometry

PAGE_NBYTES = geometry.PAGE_SIZE * TOKEN_NBYTES
CHAIN = HashChain(b"", PAGE_NBYTES)


def make_pools(num_pages: int) -> dict[Tier, PagePool]:
    """Return the books of both tiers, all pages free."""
    return {tier: PagePool(tier.value, FreeList(num_pages), num_pages) for tier in TIERS}


def chain_tree(key: TokenKey, num_nodes: int) -> PrefixTree:
    """Return a tree with all of ``key`` on the device, in a chain of nodes: a conversation of many turns."""
    num_pages = len(key) // geometry.PAGE_SIZE
    pools = make_pools(num_pages)
    tree = PrefixTree(PAGE_NBYTES, pools)
    hashes = key.page_hashes(CHAIN, num_pages)
    pages_per_node = num_pages // num_nodes
    end = tree.root(CHAIN.seed)
    for start in range(0, num_pages, pages_per_node):
        pages = pools[Tier.DEVICE].take(pages_per_node, Owner.LEASE, fenced=False).pages
        stop = start + pages_per_node
        graft = tree.graft(Tier.DEVICE, end, key.data, hashes[:stop], start, pages, source=Owner.LEASE)
        end = graft.end
    found = tree.match(CHAIN.seed, key.data, num_pages)
    assert (found.device_pages, len(found.path)) == (num_pages, num_nodes), found
    return tree


class Leaves:
    """A tree that fills the device with prompts of one page each; nothing of them is anywhere else.

    Args:
        num_leaves: pages of the device.
    """

    def __init__(self, num_leaves: int) -> None:
        self._pools = make_pools(num_leaves)
        self._numbers = count()
        self.tree = PrefixTree(PAGE_NBYTES, self._pools)
        self.room = Room(self.tree, self._pools, write_back=False)

    def fill(self) -> None:
        """Grow leaves until the device is full."""
        for _ in range(self._pools[Tier.DEVICE].num_free):
            self.grow()

    def grow(self) -> None:
        """Attach a prompt that was never there, in the page that is free."""
        key = TokenKey(geometry.page(next(self._numbers)))
        pages = self._pools[Tier.DEVICE].take(1, Owner.LEASE, fenced=False).pages
        root = self.tree.root(CHAIN.seed)
        hashes = key.page_hashes(CHAIN, 1)
        self.tree.graft(Tier.DEVICE, root, key.data, hashes, 0, pages, source=Owner.LEASE)

    def evict(self) -> None:
        """Make room for one page while none is free: the leaf that was used longest ago goes."""
        assert self.room.plan_room(Tier.DEVICE, 1).num_pages == 1
