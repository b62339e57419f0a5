"""A store that is full and never hit: one call says why. Then the store is attached to the right model."""

from __future__ import annotations

import asyncio

import torch

from hicache_async import CacheConfig, DeviceKV, HiCache
from hicache_async.stores.memory import MemoryStore

PAGE = 16
PROMPT = list(range(200))


def make_kv() -> DeviceKV:
    """Return the tensors of a model of two layers: 32 pages on the device."""
    k, v = ([torch.zeros(32, PAGE, 2, 8) for _ in range(2)] for _ in "kv")
    return DeviceKV.from_layers(k, v)


def config(model_id: str) -> CacheConfig:
    """Return options that copy every page down at its first commit."""
    return CacheConfig(
        model_id=model_id,
        page_size=PAGE,
        host_reserve_bytes=0,
        write_policy="write_through",
        prefetch_threshold_tokens=0,
    )


async def serve(cache: HiCache, name: str) -> None:
    """Serve one request, without the arithmetic."""
    with cache.match_prefix(name, PROMPT) as lease:
        await lease.prefetch()
        await lease.load()
        lease.allocate_nowait(len(PROMPT)).block()
        lease.commit(len(PROMPT))
        print(f"{name}: {lease.books}")


async def main() -> None:
    """Fill a store under one name of the model, and look for it under another."""
    store = MemoryStore()
    async with HiCache.open(config("llama"), kv=make_kv(), store=store) as cache:
        await serve(cache, "first process")

    async with HiCache.open(config("llama-v2"), kv=make_kv(), store=store) as cache:
        print(await cache.admin.explain(PROMPT))

    async with HiCache.open(config("llama"), kv=make_kv()) as cache:
        before = cache.stats()
        await cache.admin.attach_store(store)
        await serve(cache, "with the right name")
        print("pinned tokens:", cache.admin.pin(PROMPT, ttl_s=60))
        print("hit rate since:", cache.stats().since(before).hit_rate)


if __name__ == "__main__":
    asyncio.run(main())
