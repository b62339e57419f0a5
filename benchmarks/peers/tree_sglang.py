# mypy: disable-error-code="import-not-found"
"""SGLang's side of the tree: UnifiedRadixCache on its compiled core, and its allocator of paged slots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import torch

from ..geometry import LONG_PROMPT_TOKENS, PAGE_SIZE, long_prompt, page
from . import sglang_shims  # noqa: F401 - what it is imported for happens when it is
from .tree_sides import report_tree

# What follows can be imported behind the shims only.
# isort: split
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class SGLang:
    """Tokens come as array('q'), of which each match makes a key."""

    def __init__(self) -> None:
        self._tokens = long_prompt()

    def matching(self, num_nodes: int) -> Callable[[], object]:
        """Return what makes a key and matches it."""
        cache, tokens = _chain(num_nodes), self._tokens
        return lambda: cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def pinning(self, num_nodes: int) -> Callable[[], object]:
        """Return what locks and unlocks the last node."""
        cache = _chain(num_nodes)
        end = cache.match_prefix(MatchPrefixParams(key=RadixKey(self._tokens))).last_device_node
        return lambda: cache.unlock(cache.lock(end))

    def leaves(self, num_leaves: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what evicts and inserts leaves of a full device."""
        cache, allocator = _empty_cache(num_leaves * PAGE_SIZE)
        numbers = count()

        def evict() -> None:
            assert cache.evict(EvictParams(num_tokens=PAGE_SIZE)).num_tokens_evicted == PAGE_SIZE

        def grow() -> None:
            key = RadixKey(page(next(numbers)))
            cache.insert(InsertParams(key=key, value=allocator.alloc(PAGE_SIZE)))

        for _ in range(num_leaves):
            grow()
        return evict, grow


def _empty_cache(num_slots: int) -> tuple[UnifiedRadixCache, PagedTokenToKVPoolAllocator]:
    allocator = PagedTokenToKVPoolAllocator(num_slots, PAGE_SIZE, torch.float16, "cpu", None, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE_SIZE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="rust",
    )
    return UnifiedRadixCache(params), allocator


def _chain(num_nodes: int) -> UnifiedRadixCache:
    # The long prompt, inserted turn by turn.
    cache, allocator = _empty_cache(LONG_PROMPT_TOKENS)
    tokens, slots = long_prompt(), allocator.alloc(LONG_PROMPT_TOKENS)
    turn = LONG_PROMPT_TOKENS // num_nodes
    for start in range(0, LONG_PROMPT_TOKENS, turn):
        stop = start + turn
        key = RadixKey(tokens[:stop])
        cache.insert(InsertParams(key=key, value=slots[:stop], prev_prefix_len=start, inserted_len=start))
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
    assert found.device_prefix_len == LONG_PROMPT_TOKENS, found
    return cache


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    report_tree(SGLang())
