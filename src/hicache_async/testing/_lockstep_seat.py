"""One rank of an exam: its cache, with room and a store of its own, and what must be true at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..abc import Clock, Device, Ranks, Store
from ..cache import HiCache
from ..config import CacheConfig
from ..core.pool import FreeList
from ..memory.device_kv import DeviceKV
from ..stores.memory import MemoryStore
from ..types import Pages, State, Tier
from ._exam_checks import held_in
from ._exam_engine import PAGE_TOKENS, SpoiledPages, make_kv, page_hashes, within
from ._watched_ranks import WatchedRanks
from .golden import page_object
from .lockstep_engine import rank_hash
from .lockstep_script import Luck, Pause, UnluckyStore
from .virtual_device import VirtualDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatParts:
    """What the caches of an exam are opened with.

    Attributes:
        make_device: for each cache; None: a virtual device that moves at once.
        make_store: for each cache, with the rank and a name that no other cache has; None: one in memory.
        options: of the config, beside those of the exam.
    """

    make_device: Callable[[], Device] | None = None
    make_store: Callable[[int, str], Store] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Seat:
    """One rank's open cache."""

    cache: HiCache
    kv: DeviceKV
    ranks: WatchedRanks
    luck: Luck
    device: Device
    spoiled: tuple[SpoiledPages, SpoiledPages]

    async def check_end(self) -> None:
        """Check that nobody holds anything, no page was touched that nobody owned, and all pages come back.

        Raises: AssertionError, InvariantError: naming what is left.
        """
        cache = self.cache
        if cache.state is State.CLOSED:
            return
        await within(self._rest())
        cache.audit()
        left = held_in(cache, in_step=len(self._step_pages()))
        failure = cache._ctx.failure
        assert not left, f"rank {self.luck.rank}: nobody should hold anything, but {left}; {failure!r}"
        await self._check_all_free()

    async def _check_all_free(self) -> None:
        cache = self.cache
        await within(cache.admin.clear(Tier.DEVICE))
        await within(cache.admin.clear(Tier.HOST))
        cache.audit()
        stats, in_step = cache.stats(), len(self._step_pages())
        for name, tier, kept in (("device", stats.device, in_step), ("host", stats.host, 0)):
            assert tier.free + kept == tier.capacity, (
                f"rank {self.luck.rank}: {name} {tier}, {kept} in the step"
            )
        for spoiled in self.spoiled:
            spoiled.check()

    def _step_pages(self) -> Pages:
        return self.cache._movers.device_room.step.own_pages()

    async def _rest(self) -> None:
        # A prefetch may have ended while its vote was out: the slowest rank's vote settles that.
        cache, ctx = self.cache, self.cache._ctx
        await cache.admin.flush()
        while ctx.hops.live or ctx.prefetches or ctx.waits:  # noqa: ASYNC110 - several things end, each its way
            await asyncio.sleep(0)


@asynccontextmanager
async def seated(
    luck: Luck, ranks: Ranks, parts: SeatParts, *, clock: Clock | None, pause: Pause
) -> AsyncIterator[Seat]:
    """Open the cache of one rank; on leaving it is closed, and the ranks are left to their owner."""
    kv = make_kv(luck.device_pages)
    device = VirtualDevice(auto=True) if parts.make_device is None else parts.make_device()
    watched = WatchedRanks(ranks)
    pool = SpoiledPages(FreeList(kv.num_pages), kv)
    config = seat_config(ranks.rank, ranks.size, parts, host_bytes=luck.host_pages * kv.page_nbytes)
    inner = (
        MemoryStore()
        if parts.make_store is None
        else parts.make_store(ranks.rank, f"{luck.script.size}-{luck.script.seed}")
    )
    store = UnluckyStore(inner, luck, pause)
    opening = HiCache.open(
        config, kv=kv, device=device, store=store, ranks=watched, clock=clock, device_pool=pool
    )
    try:
        async with opening as cache:
            await _fill(inner, cache, luck)
            host_pool = cache._ctx.host_pool
            host = host_pool._free_list = SpoiledPages(host_pool._free_list, cache._ctx.arena)
            yield Seat(cache, kv, watched, luck, device, (pool, host))
    finally:
        await device.aclose()
        await inner.aclose()


def seat_config(rank: int, size: int, parts: SeatParts, **options: object) -> CacheConfig:
    """Return the options of one rank's cache."""
    defaults: dict[str, object] = {
        "page_size": PAGE_TOKENS,
        "host_reserve_bytes": 0,
        "allow_small_host": True,
        "write_policy": "write_through",
        "prefetch_threshold_tokens": 0,
        "prefetch_capacity_fraction": 1.0,
        "store_batch_pages": 2,
        "close_timeout_s": 2.0,
        "ranks_on_host": 1,
        "tp_rank": rank,
        "tp_size": size,
    }
    return CacheConfig.from_mapping({**defaults, **parts.options, **options})


async def _fill(store: Store, cache: HiCache, luck: Luck) -> None:
    # As an earlier run of this rank has left it.
    ctx, rng = cache._ctx, luck.rng
    for request in luck.script.requests:
        hashes = [each for each in page_hashes(request.letters) if rng.random() >= luck.missing]
        names = [rank_hash(each, luck.rank) for each in hashes]
        objects = [memoryview(page_object(ctx.kv, each, ctx.arena.layout)) for each in names]
        await store.write(ctx.keys.keys(hashes), objects)
