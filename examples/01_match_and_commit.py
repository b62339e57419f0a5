"""The life of a request, without a model: match, load, allocate, compute, commit. Then it comes again."""

import asyncio

import torch

from hicache_async import Books, CacheConfig, DeviceKV, HiCache

LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 2, 32, 16, 2, 64
# The engine owns the K/V tensors; the cache keeps the books of their pages.
k, v = ([torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM) for _ in range(LAYERS)] for _ in "kv")


async def serve(cache: HiCache, request_id: str, prompt: list[int]) -> Books:
    """Serve one request and say where the K/V of its prompt came from."""
    with cache.match_prefix(request_id, prompt) as lease:  # leaving the block gives all pages back
        await lease.prefetch()  # store to host, if there is a store
        loading = await lease.load()  # host to device
        await loading.finished()
        lease.allocate_nowait(len(prompt)).block()  # pages for the rest, once nothing reads them any more
        for page in lease.pages[loading.tokens // PAGE_SIZE :]:  # here your model computes it
            for layer in range(LAYERS):
                k[layer][page], v[layer][page] = 1.0, 2.0
        lease.commit(len(prompt))  # from now on others find it
        return lease.books


async def main() -> None:
    prompt = list(range(100))
    config = CacheConfig(page_size=PAGE_SIZE, host_reserve_bytes=0)
    async with HiCache.open(config, kv=DeviceKV.from_layers(k, v)) as cache:
        for request_id in ("first", "again"):
            books = await serve(cache, request_id, prompt)
            print(f"{request_id}: {books.device} of {books.prompt} tokens cached, {books.computed} computed")


asyncio.run(main())
