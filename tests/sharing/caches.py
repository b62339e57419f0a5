"""One rank of a deployment as a whole cache: a tiny engine whose KV is what the model has for each page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_async import Books, CacheConfig, DeviceKV, HiCache
from hicache_async.abc import Ranks, Store
from hicache_async.core.grid import Grid as Box
from hicache_async.core.grid import grid_of
from hicache_async.testing.virtual_device import VirtualDevice
from tests.sharing.models import Model, whose
from tests.sharing.ranks import Grid, kv_of

NUM_PAGES = 16


def prompt(model: Model, number: int, num_pages: int = 3) -> list[int]:
    """Return the tokens of whole pages and one more, which no other number begins with."""
    return [number, *range(1000, 1000 + num_pages * model.tokens)]


@dataclass
class RankCache:
    """An open cache and the bytes that its engine computes and reads."""

    cache: HiCache
    kv: DeviceKV
    model: Model
    box: Box

    async def serve(self, tokens: list[int]) -> Books:
        """Serve one request: check what is cached, compute the rest, store all; returns where it came from."""
        with self.cache.match_prefix(f"request {tokens[0]}", tokens) as lease:
            await lease.prefetch()
            loading = await lease.load()
            await loading.finished()
            allocation = lease.allocate_nowait(lease.num_tokens)
            if allocation.after is not None:
                allocation.after.block()
            hashes = lease._holding.hashes(lease.num_tokens // self.model.tokens)
            cached = loading.tokens // self.model.tokens
            for place, page_hash in enumerate(hashes):
                if place >= cached:
                    self._compute(int(lease.pages[place]), page_hash)
                self._check(int(lease.pages[place]), page_hash)
            lease.commit(lease.num_tokens)
        await self.cache.admin.flush()
        return lease.books

    def _compute(self, page: int, page_hash: bytes) -> None:
        for index, layer in enumerate(self.box.layers):
            for plane, tensor in enumerate(self.kv.planes(index)):
                tensor.numpy()[page] = self._wanted(page_hash, layer, plane).reshape(-1)

    def _check(self, page: int, page_hash: bytes) -> None:
        for index, layer in enumerate(self.box.layers):
            for plane, tensor in enumerate(self.kv.planes(index)):
                wanted = self._wanted(page_hash, layer, plane)
                found = tensor.numpy()[page].reshape(wanted.shape)
                if not np.array_equal(found, wanted):
                    token, head = np.argwhere((found != wanted).any(axis=-1))[0]
                    raise AssertionError(
                        f"{whose(wanted[token, head])} is wanted, {whose(found[token, head])} found"
                    )

    def _wanted(self, page_hash: bytes, layer: int, plane: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        tokens, heads = self.box.tokens, self.box.heads or range(1)
        whole = self.model.plane(page_hash, plane)
        return whole[layer, tokens.start : tokens.stop, heads.start : heads.stop]


@asynccontextmanager
async def open_rank(
    model: Model, grid: Grid, config: CacheConfig, store: Store | str, ranks: Ranks | None = None
) -> AsyncIterator[RankCache]:
    """Open the cache of one rank; ``config`` is one of :func:`configs`."""
    kv = kv_of(model, grid, config, NUM_PAGES)
    opening = HiCache.open(config, kv=kv, device=VirtualDevice(auto=True), store=store, ranks=ranks)
    async with opening as cache:
        yield RankCache(cache, kv, model, grid_of(config, kv))
        cache.audit()


CACHE_OPTIONS: dict[str, Any] = {
    "host_bytes": 1 << 20,
    "host_reserve_bytes": 0,
    "allow_small_host": True,
    "ranks_on_host": 1,
    "write_policy": "write_through",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold_tokens": 0,
}
"""Options under which all that is committed is stored."""
