"""How long the prefix tree takes, beside a comparison of the same bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from hicache_async import TokenKey
from hicache_async.core.hashing import HashChain
from hicache_async.core.pool import FreeList, Owner, PagePool
from hicache_async.core.tokens import TOKEN_NBYTES
from hicache_async.core.tree import PrefixTree
from hicache_async.types import Tier

from .harness import Benchmark, Record, measure, timed

NUM_TOKENS = 32_768
PAGE_SIZE = 64
NUM_PAGES = NUM_TOKENS // PAGE_SIZE
PAGE_NBYTES = PAGE_SIZE * TOKEN_NBYTES
NODES = (1, 8, 16, 512)
CHAIN = HashChain(b"", PAGE_NBYTES)


def chain_tree(key: TokenKey, num_nodes: int) -> PrefixTree:
    """Return a tree with all of ``key`` on the device, in a chain of nodes: a conversation of many turns."""
    pools = {tier: PagePool(tier.value, FreeList(NUM_PAGES), NUM_PAGES) for tier in Tier}
    tree = PrefixTree(PAGE_NBYTES, pools)
    hashes = key.page_hashes(CHAIN, NUM_PAGES)
    pages_per_node = NUM_PAGES // num_nodes
    end = tree.root(CHAIN.seed)
    for start in range(0, NUM_PAGES, pages_per_node):
        pages = pools[Tier.DEVICE].take(pages_per_node, Owner.LEASE, fenced=False).pages
        stop = start + pages_per_node
        graft = tree.graft(Tier.DEVICE, end, key.data, hashes[:stop], start, pages, source=Owner.LEASE)
        end = graft.end
    return tree


async def match_records(quick: bool) -> AsyncIterator[Record]:
    """Match a prompt of 32,768 tokens that is all there, by its key, marking the path as used."""
    for num_nodes in NODES:
        yield await _match(num_nodes, rounds=3 if quick else 101)


async def _match(num_nodes: int, rounds: int) -> Record:
    key = TokenKey(np.random.default_rng(1).integers(0, 1 << 17, NUM_TOKENS, dtype=np.uint32))
    one, other = bytes(key.data), bytes(bytearray(key.data))
    tree = chain_tree(key, num_nodes)
    found = tree.match(CHAIN.seed, key.data, NUM_PAGES)
    assert (found.device_pages, len(found.path)) == (NUM_PAGES, num_nodes)
    return await measure(
        "tree.match",
        {"nodes": num_nodes, "tokens": NUM_TOKENS, "page_size": PAGE_SIZE},
        timed(lambda: tree.match(CHAIN.seed, key.data, NUM_PAGES), repeats=100 if num_nodes < 100 else 20),
        timed(lambda: one == other, repeats=100),
        floor_name="memcmp of the same bytes",
        unit="us",
        rounds=rounds,
    )


BENCHMARKS = [Benchmark("tree.match", match_records)]
