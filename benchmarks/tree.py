"""How long the prefix tree takes, beside a comparison, a copy or a hash of the same bytes, and what it weighs."""

from __future__ import annotations

import gc
import hashlib
import struct
import tracemalloc
from collections.abc import AsyncIterator

from hicache_async import TokenKey

from . import geometry
from .geometry import LONG_PROMPT_PAGES, LONG_PROMPT_TOKENS, PAGE_SIZE
from .harness import Benchmark, Param, Record, Sample, counted, measure, repeated, timed, undone
from .trees import CHAIN, Leaves, chain_tree

NODES = (1, 8, 16, 512)
NODES_OF_LIST = 8
LEAVES = (1_000, 100_000)
WEIGHED_LEAVES = 22_000
"""Just over two thirds of a power of two, where a dict has just doubled: the most that a leaf weighs."""
LEAF_BUDGET_NBYTES = 1024
PROMPT: dict[str, Param] = {"tokens": LONG_PROMPT_TOKENS, "page_size": PAGE_SIZE}


async def match_records(quick: bool) -> AsyncIterator[Record]:
    """Match a prompt of 32,768 tokens that is all there, by its key, marking the path as used."""
    for num_nodes in NODES:
        yield await _match(num_nodes, rounds=3 if quick else 101)


async def _match(num_nodes: int, rounds: int) -> Record:
    key = TokenKey(geometry.long_prompt())
    one, other = bytes(key.data), bytes(bytearray(key.data))
    tree = chain_tree(key, num_nodes)
    repeats = 100 if num_nodes < 100 else 20
    return await measure(
        "tree.match",
        {"nodes": num_nodes, **PROMPT},
        timed(lambda: tree.match(CHAIN.seed, key.data, LONG_PROMPT_PAGES), repeats=repeats),
        timed(lambda: one == other, repeats=100),
        floor_name="memcmp of the same bytes",
        unit="us",
        rounds=rounds,
    )


async def match_list_records(quick: bool) -> AsyncIterator[Record]:
    """Match the same prompt when it comes as a list of ints, of which a key is made each time."""
    tokens = geometry.long_prompt().tolist()
    tree = chain_tree(TokenKey(tokens), NODES_OF_LIST)
    layout = f"<{len(tokens)}I"
    yield await measure(
        "tree.match_list",
        {"nodes": NODES_OF_LIST, **PROMPT},
        timed(lambda: tree.match(CHAIN.seed, TokenKey(tokens).data, LONG_PROMPT_PAGES), repeats=3),
        timed(lambda: struct.pack(layout, *tokens), repeats=3),
        floor_name="struct.pack of the list",
        unit="us",
        rounds=3 if quick else 101,
    )


async def hash_records(quick: bool) -> AsyncIterator[Record]:
    """Hash the pages of a prompt of 32,768 tokens, each with the hash of the one before it."""
    data = bytes(TokenKey(geometry.long_prompt()).data)
    yield await measure(
        "tree.hash",
        {"pages": LONG_PROMPT_PAGES, "page_size": PAGE_SIZE},
        timed(lambda: CHAIN.extend([], data, LONG_PROMPT_PAGES), repeats=2),
        timed(lambda: hashlib.sha256(data).digest(), repeats=8),
        floor_name="one sha256 of the same bytes",
        unit="us",
        rounds=3 if quick else 101,
    )


async def evict_records(quick: bool) -> AsyncIterator[Record]:
    """Evict one leaf of one page of a tree of many, beside the same of a tree of few.

    The first record compares two trees of the same size and shows how exact the second one is.
    """
    few, *_ = sizes = (10, 1_000) if quick else LEAVES
    floor = _evict(few)
    for num_leaves in sizes:
        yield await measure(
            "tree.evict",
            {"leaves": num_leaves, "page_size": PAGE_SIZE},
            _evict(num_leaves),
            floor,
            floor_name=f"the same of {few:,} leaves",
            unit="us",
            rounds=3 if quick else 101,
        )


def _evict(num_leaves: int) -> Sample:
    # A new leaf takes the place of each evicted one, outside the time.
    leaves = Leaves(num_leaves)
    leaves.fill()

    async def grow() -> None:
        leaves.grow()

    return repeated(undone(timed(leaves.evict), grow), 20)


async def leaf_nbytes_records(quick: bool) -> AsyncIterator[Record]:
    """Weigh a leaf of one page on the device, with its place below its parent and in the eviction queue."""
    num_leaves = 1_000 if quick else WEIGHED_LEAVES
    leaves = Leaves(num_leaves)
    gc.collect()
    tracemalloc.start()
    try:
        leaves.fill()
        gc.collect()
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    yield counted(
        "tree.leaf_nbytes",
        {"leaves": num_leaves, "page_size": PAGE_SIZE},
        nbytes / num_leaves,
        LEAF_BUDGET_NBYTES,
        floor_name="what it may weigh",
        unit="B",
    )


BENCHMARKS = [
    Benchmark("tree.match", match_records),
    Benchmark("tree.match_list", match_list_records),
    Benchmark("tree.hash", hash_records),
    Benchmark("tree.evict", evict_records),
    Benchmark("tree.leaf_nbytes", leaf_nbytes_records),
]
