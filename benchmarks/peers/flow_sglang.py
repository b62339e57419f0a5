# mypy: disable-error-code="import-not-found"
"""SGLang's side of the flows: UnifiedRadixCache, its controller with real threads, and HiCacheFile."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from .. import geometry
from ..geometry import PAGE_SIZE, PROMPT_TOKENS, prompt
from .flow_sides import (
    HANG_S,
    NUM_DETACHES,
    NUM_HUNG,
    NUM_REQUESTS,
    SETTLE_S,
    STORE_DELAY_S,
    remove_objects,
    requests,
)
from .samples import NUM_SAMPLES, NUM_WARMUPS, Series, report, steady
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
        hicache_mem_layout="page_first_direct",
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
        self.directory = directory
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

    @property
    def backend(self) -> Any:
        """What its controller calls to read and write files."""
        return self.cache.cache_controller.storage_backend

    @property
    def free_host_tokens(self) -> int:
        """Token slots of the host that nobody holds."""
        return int(self.cache.cache_controller.mem_pool_host.available_size())

    def compute(self, tokens: array[int]) -> None:
        """Insert a prompt and see it copied to the host; the write to the store begins at the next poll."""
        slots = self.allocator.alloc(len(tokens))
        for plane in (*self.kv.k_buffer, *self.kv.v_buffer):
            plane[slots] = torch.randn((len(slots), *plane.shape[1:])).to(plane.dtype)
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        self.cache.flush_pending_backups()

    def back_up(self) -> None:
        """Write what is on the host to the store, and poll until it is there."""
        cache = self.cache
        cache.check_hicache_events()
        while cache.ongoing_backup or cache.ongoing_write_through:
            time.sleep(POLL_S)
            cache.check_hicache_events()

    def forget(self) -> None:
        """Empty device and host."""
        self.cache.reset()
        self.allocator.clear()

    def start_prefetch(self, tokens: array[int], request_id: str) -> CacheRequestHandle:
        """Match a prompt and ask for all of it from the store."""
        cache, request = self.cache, CacheRequestHandle(request_id, 0)
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        cache.prefetch_from_storage(request, match.last_host_node, tokens)
        return request

    def prefetch(self, prompts: Sequence[array[int]], request_ids: Iterator[int]) -> None:
        """Bring prompts from the store to the host at once, polling as the scheduler does."""
        cache = self.cache
        handles = [self.start_prefetch(tokens, f"request-{next(request_ids)}") for tokens in prompts]
        waiting = handles
        while waiting := [handle for handle in waiting if not cache.check_prefetch_progress(handle)]:
            cache.check_hicache_events()
            time.sleep(POLL_S)
        loaded = [cache.pop_prefetch_loaded_tokens(handle) for handle in handles]
        assert loaded == [len(tokens) for tokens in prompts], loaded


@contextlib.contextmanager
def engine(prompts: Sequence[array[int]] = ()) -> Iterator[Engine]:
    """Make an engine on a directory that has ``prompts``, and stop its threads afterwards."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory:
        made = Engine(directory)
        try:
            for tokens in prompts:
                made.compute(tokens)
                made.back_up()
            made.forget()
            yield made
        finally:
            made.cache.detach_storage_backend()


def prefetch8192() -> Series:
    """Prefetch two prompts in turn, after device and host were emptied outside the time."""
    prompts = [prompt(number) for number in range(2)]
    seconds, request_ids = [], count()
    with engine(prompts) as made:
        for number in range(NUM_WARMUPS + NUM_SAMPLES):
            made.forget()
            start = time.perf_counter()
            made.prefetch([prompts[number % 2]], request_ids)
            seconds.append(time.perf_counter() - start)
    return steady(seconds)


def backup8192() -> Series:
    """Write a prompt that is on the host to the store, and wait until the store has it, too."""
    seconds = []
    with engine() as made:
        for number in range(NUM_WARMUPS + NUM_SAMPLES):
            made.compute(prompt(number))
            start = time.perf_counter()
            made.back_up()
            seconds.append(time.perf_counter() - start)
            remove_objects(made.directory, PROMPT_TOKENS)
            made.forget()
    return steady(seconds)


def concurrent15(delay_s: float) -> Series:
    """Prefetch all requests at once, after device and host were emptied outside the time."""
    prompts = requests(NUM_REQUESTS)
    seconds, request_ids = [], count()
    with engine(prompts) as made:
        if delay_s:
            made.backend.batch_exists = _later(made.backend.batch_exists, delay_s)
            made.backend.batch_get = _later(made.backend.batch_get, delay_s)
        for _ in range(NUM_WARMUPS + NUM_SAMPLES):
            made.forget()
            start = time.perf_counter()
            made.prefetch(prompts, request_ids)
            seconds.append(time.perf_counter() - start)
    return steady(seconds)


def _later(call: Callable[..., Any], delay_s: float) -> Callable[..., Any]:
    def wait_and_call(*args: Any) -> Any:
        time.sleep(delay_s)
        return call(*args)

    return wait_and_call


def detach_hung() -> Series:
    """Abort the prefetches of a store whose reads hang and detach it; then count the token slots that are gone.

    Its scheduler allows no detach before the requests are gone, so the aborts are in the time.
    """
    prompts = requests(NUM_HUNG)
    seconds, leaked = [], []
    for _ in range(NUM_DETACHES):
        with engine(prompts) as made:
            num_free = made.free_host_tokens
            handles = _hang(made, prompts)
            start = time.perf_counter()
            for handle in handles:
                made.cache.release_aborted_request(handle)
            detached, message = made.cache.detach_storage_backend()
            seconds.append(time.perf_counter() - start)
            assert detached, message
            leaked.append(float(num_free - _free_in_the_end(made)))
    return {"seconds": seconds, "leaked": leaked}


def _hang(made: Engine, prompts: Sequence[array[int]]) -> list[CacheRequestHandle]:
    """Return requests whose slots are all taken, and whose reads hang, each for ``HANG_S``."""
    hangs = threading.Event()
    read = _later(made.backend.batch_get, HANG_S)

    def hang(*args: Any) -> Any:
        hangs.set()
        return read(*args)

    made.backend.batch_get = hang
    goal = made.free_host_tokens - sum(map(len, prompts))
    handles = [made.start_prefetch(tokens, f"request-{number}") for number, tokens in enumerate(prompts)]
    while not hangs.is_set() or made.free_host_tokens > goal:
        made.cache.check_hicache_events()
        time.sleep(POLL_S)
    return handles


def _free_in_the_end(made: Engine) -> int:
    """Return the token slots that are free after it was polled a little longer; its detach has waited for the hang."""
    end = time.perf_counter() + SETTLE_S
    while time.perf_counter() < end:
        made.cache.check_hicache_events()
        time.sleep(POLL_S)
    return made.free_host_tokens


RECORDS: dict[str, Callable[[], Series]] = {
    "flow.prefetch8192": prefetch8192,
    "flow.backup8192": backup8192,
    "flow.concurrent15": partial(concurrent15, 0.0),
    "flow.concurrent15_5ms": partial(concurrent15, STORE_DELAY_S),
    "flow.detach_hung": detach_hung,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    run_on_cpu()
    get_hash_str(array("q", [1]), None, 64)  # builds its native page hash on first use
    report(RECORDS)
