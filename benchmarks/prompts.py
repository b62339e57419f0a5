"""Prompts in a store, and a cache that has nothing else: what flows are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hicache_async import CacheConfig, DeviceKV, HiCache, PrefetchPolicy, WritePolicy
from hicache_async.types import Tokens

from . import geometry


def device_kv() -> DeviceKV:
    """Return tensors for one prompt, filled with numbers."""
    shape = (geometry.PROMPT_PAGES, geometry.PAGE_SIZE, geometry.KV_HEADS, geometry.HEAD_DIM)
    generator = torch.Generator().manual_seed(1)

    def plane() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, geometry.DTYPE))

    layers = range(geometry.NUM_LAYERS)
    return DeviceKV.from_layers([plane() for _ in layers], [plane() for _ in layers])


def config(host_pages: int = geometry.PROMPT_PAGES) -> CacheConfig:
    """Return options under which the host has ``host_pages``, and prefetches may use all of them."""
    return CacheConfig(
        page_size=geometry.PAGE_SIZE,
        host_bytes=host_pages * geometry.PAGE_NBYTES,
        host_reserve_bytes=0,
        allow_small_host=True,
        write_policy=WritePolicy.WRITE_THROUGH,
        prefetch_capacity_fraction=1.0,
    )


async def compute(cache: HiCache, tokens: Tokens) -> None:
    """Commit a prompt as if a forward had computed it, whatever its pages hold."""
    with cache.match_prefix("compute", tokens) as lease:
        await lease.load()
        lease.allocate_nowait(len(tokens)).block()
        lease.commit(len(tokens))


async def store_prompts(directory: Path, kv: DeviceKV, prompts: Sequence[Tokens]) -> None:
    """Compute each prompt in a cache of its own and see it stored in ``directory``."""
    for tokens in prompts:
        async with HiCache.open(config(), kv=kv, store=f"file://{directory}") as cache:
            await compute(cache, tokens)
            await cache.admin.flush()


async def prefetch(cache: HiCache, tokens: Tokens) -> None:
    """Match a prompt, bring all of it from the store to the host, and let go of it."""
    with cache.match_prefix("prefetch", tokens, whole=True) as lease:
        result = await lease.prefetch(PrefetchPolicy.wait_complete())
    assert result.fetched_tokens == len(tokens), result
