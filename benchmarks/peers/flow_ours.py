"""Our side of the flows: a HiCache with a FileStore."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import structlog
import torch

from hicache_async import DeviceKV, HiCache, PrefetchPolicy, PrefetchResult, Stop
from hicache_async.abc import Store
from hicache_async.stores import FileStore
from hicache_async.testing.faults import HangingStore, StoreWrapper
from hicache_async.types import StopToken, Tier, Tokens

from ..geometry import PAGE_SIZE, PROMPT_TOKENS, prompt
from ..harness import timed_async
from ..prompts import compute, config, device_kv, prefetch, store_prompts
from .flow_sides import (
    HANG_S,
    NUM_DETACHES,
    NUM_HUNG,
    NUM_REQUESTS,
    REQUEST_TOKENS,
    SETTLE_S,
    STORE_DELAY_S,
    remove_objects,
    requests,
)
from .samples import NUM_SAMPLES, NUM_WARMUPS, Series, report, steady

NUM_TURNS = 20
"""Turns of the loop while it settles: on a busy machine the time alone may pass in one."""


class DelayedStore(StoreWrapper):
    """Add ``STORE_DELAY_S`` to every call."""

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Wait, then call."""
        await asyncio.sleep(STORE_DELAY_S)
        return await call()


@contextlib.asynccontextmanager
async def stored(prompts: Sequence[Tokens]) -> AsyncIterator[tuple[DeviceKV, FileStore]]:
    """Make a store that has ``prompts`` in files, and give it with the tensors they were computed in."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory:
        kv = device_kv()
        await store_prompts(Path(directory), kv, prompts)
        store = FileStore(directory, existence_ttl_s=0)
        yield kv, store
        await store.aclose()


async def prefetch8192() -> Series:
    """Prefetch two prompts in turn; each finds nothing of its own in the host and every page in the store."""
    prompts = [prompt(number) for number in range(2)]
    turns = cycle(prompts)
    async with stored(prompts) as (kv, store), HiCache.open(config(), kv=kv, store=store) as cache:
        sample = timed_async(lambda: prefetch(cache, next(turns)))
        return steady([await sample() for _ in range(NUM_WARMUPS + NUM_SAMPLES)])


async def backup8192() -> Series:
    """Attach a store to a cache that has a prompt on the host, and wait until the store has it, too."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory:
        store = FileStore(directory)
        async with HiCache.open(config(), kv=device_kv()) as cache:
            for number in range(NUM_WARMUPS + NUM_SAMPLES):
                await compute(cache, prompt(number))
                await cache.admin.flush(Tier.HOST)
                start = time.perf_counter()
                await cache.admin.attach_store(store)
                await cache.admin.flush()
                seconds.append(time.perf_counter() - start)
                remove_objects(directory, PROMPT_TOKENS)
                await cache.admin.detach_store()
                await cache.admin.clear()
        await store.aclose()
    return steady(seconds)


async def concurrent15(wrap: Callable[[Store], Store]) -> Series:
    """Prefetch all requests at once, after the host was emptied outside the time."""
    prompts, seconds = requests(NUM_REQUESTS), []
    host_pages = NUM_REQUESTS * REQUEST_TOKENS // PAGE_SIZE
    async with (
        stored(prompts) as (kv, store),
        HiCache.open(config(host_pages), kv=kv, store=wrap(store)) as cache,
    ):
        for _ in range(NUM_WARMUPS + NUM_SAMPLES):
            start = time.perf_counter()
            await asyncio.gather(*(prefetch(cache, tokens) for tokens in prompts))
            seconds.append(time.perf_counter() - start)
            await cache.admin.clear(Tier.HOST)
    return steady(seconds)


async def detach_hung() -> Series:
    """Detach by force a store whose reads hang; when the hang has ended count the tokens whose pages are gone."""
    seconds, leaked = [], []
    async with stored(requests(NUM_HUNG)) as (kv, store):
        for _ in range(NUM_DETACHES):
            hanging = HangingStore(store, "read")
            async with HiCache.open(config(), kv=kv, store=hanging) as cache:
                waiting = await _hang(cache, hanging)
                start = time.perf_counter()
                await cache.admin.detach_store(force=True)
                seconds.append(time.perf_counter() - start)
                results = await asyncio.gather(*waiting)
                assert all(result.stop is Stop.DETACHED for result in results), results
                await asyncio.sleep(HANG_S)
                for _ in range(NUM_TURNS):
                    await asyncio.sleep(SETTLE_S / NUM_TURNS)
                cache.audit()
                host = cache.stats().host
                leaked.append(float(host.capacity - host.free) * PAGE_SIZE)
    return {"seconds": seconds, "leaked": leaked}


async def _hang(cache: HiCache, store: HangingStore) -> list[asyncio.Task[PrefetchResult]]:
    """Return requests whose pages are all taken, and whose reads hang from now on for ``HANG_S``."""

    async def request(tokens: Tokens) -> PrefetchResult:
        with cache.match_prefix("hung", tokens, whole=True) as lease:
            return await lease.prefetch(PrefetchPolicy.wait_complete())

    waiting = [asyncio.create_task(request(tokens)) for tokens in requests(NUM_HUNG)]
    await store.hung(NUM_HUNG)
    asyncio.get_running_loop().call_later(HANG_S, store.release)
    assert cache.stats().host.in_hops == NUM_HUNG * REQUEST_TOKENS // PAGE_SIZE
    return waiting


RECORDS: dict[str, Callable[[], Coroutine[Any, Any, Series]]] = {
    "flow.prefetch8192": prefetch8192,
    "flow.backup8192": backup8192,
    "flow.concurrent15": partial(concurrent15, lambda store: store),
    "flow.concurrent15_5ms": partial(concurrent15, DelayedStore),
    "flow.detach_hung": detach_hung,
}


def _run(measure: Callable[[], Coroutine[Any, Any, Series]]) -> Series:
    return asyncio.run(measure())


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    report({name: partial(_run, measure) for name, measure in RECORDS.items()})
