"""A cache-aware router: it hears what two engines hold, and sends a prompt to the one that has most of it."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import torch

from hicache_async import CacheConfig, DeviceKV, HiCache, KVEvent, Removed, Stored

LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 2, 32, 16, 2, 64


class Mirror:
    """What one engine holds, known by its events alone; for prompts without salt and adapter."""

    def __init__(self) -> None:
        self.hashes: dict[tuple[bytes | None, bytes], bytes] = {}  # by the page before and the page's tokens
        self.held: dict[bytes, set[str]] = {}  # the tiers that have a page, by its hash

    async def follow(self, cache: HiCache) -> None:
        """Listen for as long as the cache is open."""
        async for event in cache.events(snapshot=True):
            self.apply(event)

    def apply(self, event: KVEvent) -> None:
        """Take one event over."""
        if isinstance(event, Stored):
            before = event.parent_hash
            for page_hash, page in zip(event.hashes, event.token_ids.reshape(-1, PAGE_SIZE), strict=True):
                self.hashes[before, page.tobytes()] = page_hash
                self.held.setdefault(page_hash, set()).add(event.tier)
                before = page_hash
        elif isinstance(event, Removed):
            for page_hash in event.hashes:
                self.held[page_hash].discard(event.tier)
        else:  # Cleared, or a Gap, after which all that is held is told again
            self.hashes.clear()
            self.held.clear()

    def cached_tokens(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the engine has, on its device or on its host."""
        page_hash, count = None, 0
        for page in np.array(prompt[: len(prompt) // PAGE_SIZE * PAGE_SIZE], "<u4").reshape(-1, PAGE_SIZE):
            page_hash = self.hashes.get((page_hash, page.tobytes()))
            if page_hash is None or not self.held.get(page_hash):
                break
            count += PAGE_SIZE
        return count


async def serve(cache: HiCache, request_id: str, prompt: list[int]) -> None:
    """Serve one request, as in 01_match_and_commit.py; nothing is computed here."""
    with cache.match_prefix(request_id, prompt) as lease:
        await lease.load()
        lease.allocate_nowait(len(prompt)).block()
        lease.commit(len(prompt))


async def main() -> None:
    prompts = {"blue": list(range(100)), "green": list(range(1000, 1200))}
    config = CacheConfig(page_size=PAGE_SIZE, host_reserve_bytes=0)
    mirrors: dict[str, Mirror] = {}
    async with asyncio.TaskGroup() as following, AsyncExitStack() as stack:
        for engine, prompt in prompts.items():
            k, v = ([torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM) for _ in range(LAYERS)] for _ in "kv")
            cache = await stack.enter_async_context(HiCache.open(config, kv=DeviceKV.from_layers(k, v)))
            mirrors[engine] = Mirror()
            following.create_task(mirrors[engine].follow(cache))  # ends when the cache is closed
            await serve(cache, "first", prompt)
        await asyncio.sleep(0)  # lets the mirrors hear of it
        for prompt in prompts.values():
            cached = {engine: mirror.cached_tokens(prompt) for engine, mirror in mirrors.items()}
            best = max(cached, key=lambda engine: cached[engine])
            print(f"to {best}, which has {cached[best]} of {len(prompt)} tokens; the engines: {cached}")


asyncio.run(main())
