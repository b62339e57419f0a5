"""Two ranks of one engine: each has room of its own, and both compute from what both of them have."""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist

from hicache_async import CacheConfig, DeviceKV, HiCache
from hicache_async.ranks.hub import HubRanks

LAYERS, PAGE_SIZE, HEADS, HEAD_DIM = 2, 16, 2, 64
DEVICE_PAGES = (64, 15)  # rank 1 has less room, so it evicts what rank 0 still has
PROMPTS = {"first": range(200), "other": range(1000, 1100), "again": range(200)}


async def serve(cache: HiCache, request_id: str, prompt: list[int]) -> int:
    """Serve one request on this rank; returns how many of its tokens every rank had."""
    with cache.match_prefix(request_id, prompt) as lease:
        loading = await lease.load()  # the only length to compute from: the same on all ranks
        await loading.finished()
        lease.allocate_nowait(len(prompt)).block()
        lease.commit(len(prompt))
        return loading.tokens


async def run(rank: int, port: int) -> list[int]:
    """Do on one rank what the engine's scheduler tells all of them, in the same order."""
    rendezvous = dist.TCPStore("127.0.0.1", port)
    config = CacheConfig(page_size=PAGE_SIZE, host_reserve_bytes=0, tp_rank=rank, tp_size=2)
    shape = (DEVICE_PAGES[rank], PAGE_SIZE, HEADS, HEAD_DIM)
    kv = DeviceKV.from_layers(*([torch.zeros(shape) for _ in range(LAYERS)] for _ in "kv"))
    ranks = await HubRanks.join(config, rendezvous)
    try:
        async with HiCache.open(config, kv=kv, ranks=ranks) as cache:
            return [await serve(cache, name, list(prompt)) for name, prompt in PROMPTS.items()]
    finally:
        await ranks.aclose()


def main(rank: int, port: int) -> list[int]:
    return asyncio.run(run(rank, port))


if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another_process:
        rank_1 = another_process.submit(main, 1, server.port)
        for name, *tokens in zip(PROMPTS, main(0, server.port), rank_1.result(), strict=True):
            print(f"{name}: computed from token {tokens[0]} on rank 0, from token {tokens[1]} on rank 1")
