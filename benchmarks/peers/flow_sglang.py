# mypy: disable-error-code="import-not-found"
"""SGLang's side of the flows: UnifiedRadixCache, its controller with real threads, and HiCacheFile."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from .. import geometry
from ..geometry import PAGE_SIZE, PROMPT_TOKENS, prompt
from .samples import NUM_SAMPLES, NUM_WARMUPS, report
from .sglang_shims import run_on_cpu

# What follows can be imported behind the shims only.
# isort: split
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

DEVICE_TOKENS = 2 * PROMPT_TOKENS
POLL_S = 0.0002
RANKS = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")


def server_options(directory: str) -> Any:
    """Install the server options of a cache in three tiers on ``directory``, and a group of one rank."""
    storage = {"prefetch_threshold": PAGE_SIZE, "file_storage_path": directory}
    overridden = get_context().override_server_args(
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_size=0,
        hicache_mem_layout="layer_first",
        hicache_io_backend="direct",
        hicache_write_policy="write_through",
        page_size=PAGE_SIZE,
        device="cpu",
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_host_memory_fraction=None,
        hicache_storage_backend_extra_config=json.dumps(storage),
        served_model_name="bench",
        tp_size=1,
        pp_size=1,
    )
    ranks = {f"{axis}_rank": 0 for axis in RANKS} | {f"{axis}_size": 1 for axis in RANKS}
    get_parallel().clear_stamp()
    get_parallel().override_permanently(**ranks)
    return overridden.install()


class Engine:
    """A cache with its pools, as the scheduler holds them; the tree is the compiled one."""

    def __init__(self, directory: str) -> None:
        options = server_options(directory)
        dtype = getattr(torch, geometry.DTYPE)
        shape = (geometry.KV_HEADS, geometry.HEAD_DIM, geometry.NUM_LAYERS)
        self.kv = MHATokenToKVPool(DEVICE_TOKENS, PAGE_SIZE, dtype, *shape, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(DEVICE_TOKENS, PAGE_SIZE, dtype, "cpu", self.kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(options, params)

    def store(self, tokens: array[int]) -> None:
        """Insert a prompt and see it stored."""
        cache = self.cache
        slots = self.allocator.alloc(len(tokens))
        for plane in (*self.kv.k_buffer, *self.kv.v_buffer):
            plane[slots] = torch.randn((len(slots), *plane.shape[1:])).to(plane.dtype)
        cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        cache.flush_pending_backups()
        cache.check_hicache_events()
        while cache.ongoing_backup or cache.ongoing_write_through:
            cache.check_hicache_events()
            time.sleep(POLL_S)

    def forget(self) -> None:
        """Empty device and host."""
        self.cache.reset()
        self.allocator.clear()

    def prefetch(self, tokens: array[int], request_id: str) -> None:
        """Match a prompt and bring all of it from the store to the host, polling as the scheduler does."""
        cache, request = self.cache, CacheRequestHandle(request_id, 0)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        cache.prefetch_from_storage(request, match.last_host_node, tokens)
        while not cache.check_prefetch_progress(request):
            cache.check_hicache_events()
            time.sleep(POLL_S)
        loaded = cache.pop_prefetch_loaded_tokens(request)
        assert loaded == len(tokens), loaded


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Make an engine on a temporary directory and stop its threads afterwards."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory:
        made = Engine(directory)
        try:
            yield made
        finally:
            made.cache.detach_storage_backend()


def prefetch8192() -> list[float]:
    """Prefetch two prompts in turn, after device and host were emptied outside the time."""
    prompts = [prompt(number) for number in range(2)]
    seconds = []
    with engine() as made:
        for tokens in prompts:
            made.forget()
            made.store(tokens)
        for number in range(NUM_WARMUPS + NUM_SAMPLES):
            made.forget()
            start = time.perf_counter()
            made.prefetch(prompts[number % 2], f"request-{number}")
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    run_on_cpu()
    get_hash_str(array("q", [1]), None, 64)  # builds its native page hash on first use
    report({"flow.prefetch8192": prefetch8192})
