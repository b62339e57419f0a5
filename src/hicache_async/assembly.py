"""Assembly: checks that the parts of a cache fit together, and builds its context."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from ._clock import LoopClock
from ._log import logger
from ._threads import DaemonThreads
from .abc import Clock, Device, DevicePool, Ranks, Store, SupportsPreparation
from .config import CacheConfig, HostLayout, KeyScheme, WritePolicy
from .core.codecs import check_dtype, codec_of
from .core.grid import grid_of, narrow_fields, page_cells
from .core.keys import key_names
from .core.manifest import MANIFEST_NBYTES
from .core.pool import FreeList, PagePool
from .core.room import Room
from .core.tokens import TOKEN_NBYTES
from .core.tree import PrefixTree
from .device.cpu import CpuDevice
from .errors import ConfigError
from .eviction import policy_named
from .flows.context import Context
from .kv_events import KVEvents
from .memory.budget import HostBooking, book_host_pages
from .memory.device_kv import DeviceKV
from .memory.host import HostArena
from .ranks.solo import SoloRanks
from .stores.null import NullStore
from .stores.registry import accepted_options, open_store
from .types import Tier

MIN_SLOT_NBYTES = MANIFEST_NBYTES
"""A store of fixed slots has to hold the manifest of the namespace, too."""


@dataclass(slots=True)
class Parts:
    """What a cache is opened with; what is None here is made, and closed, by the cache."""

    config: CacheConfig
    kv: DeviceKV
    device: Device | None
    store: Store | str | None
    ranks: Ranks | None
    clock: Clock | None
    threads: Executor | None
    device_pool: DevicePool | None


@dataclass(slots=True)
class Owned:
    """What the cache made itself and therefore closes.

    Attributes:
        stores: opened by URL and not closed yet; one is in use, others may still be let go.
        offers: what a store that is opened by URL is told of this cache, where it takes such options.
    """

    device: Device | None = None
    stores: list[Store] = field(default_factory=list)
    offers: Mapping[str, object] = field(default_factory=dict)
    ranks: Ranks | None = None
    threads: Executor | None = None
    host_booking: HostBooking | None = None

    def open_store(self, url: str) -> Store | None:
        """Return the store behind ``url``, to be closed by :meth:`close_store` or with the rest; None: "null:".

        Raises: ConfigError: an unknown scheme or option.
        """
        accepted = accepted_options(url)  # none that the URL gives itself, which comes first
        store = open_store(url, **{name: value for name, value in self.offers.items() if name in accepted})
        if isinstance(store, NullStore):
            return None
        self.stores.append(store)
        return store

    async def close_store(self, store: Store) -> None:
        """Close a store that was opened here; one that was given stays its owner's."""
        if any(own is store for own in self.stores):
            await _close(store)
            self.stores[:] = [own for own in self.stores if own is not store]

    async def aclose(self) -> None:
        """Close what is there, all of it whatever one of them does; never waits for what hangs."""
        try:
            for part in (*self.stores, self.device, self.ranks):
                if part is not None:
                    await _close(part)
        finally:
            if self.threads is not None:
                self.threads.shutdown(wait=False)
            if self.host_booking is not None:
                self.host_booking.give_back()


async def _close(part: Store | Device | Ranks) -> None:
    try:
        await part.aclose()
    except Exception as error:  # noqa: BLE001 - of a part made by others; the cache closes all the same
        logger.warning("store.fault", call="aclose", part=type(part).__name__, fault=repr(error))


async def assemble(parts: Parts, on_freed: Callable[[], None]) -> tuple[Context, Owned]:
    """Build the context of a cache on the running loop.

    Args:
        on_freed: called when device pages became free later than at the call that freed them.
    Raises: ConfigError: parts that do not fit together; nothing is left behind.
    """
    owned = Owned()
    try:
        ctx = await _assemble(parts, owned, on_freed)
    except BaseException:
        await owned.aclose()
        raise
    for name, advice in narrow_fields(ctx.config, ctx.kv).items():
        logger.warning("keys.narrow", field=name, advice=advice)
    logger.info(
        "cache.opened",
        device_pages=ctx.device_pool.capacity,
        host_pages=ctx.host_pool.capacity,
        host_nbytes=ctx.host_pool.capacity * ctx.kv.page_nbytes,
        write_policy=ctx.config.write_policy.value,
        store=type(ctx.store).__name__,
    )
    return ctx, owned


async def _assemble(parts: Parts, owned: Owned, on_freed: Callable[[], None]) -> Context:
    config, kv = parts.config, parts.kv
    keys = key_names(config, kv)  # before anything is taken: what does not fit together is refused here
    owned.offers = _offers(config, kv)
    loop = asyncio.get_running_loop()
    free_list = parts.device_pool or FreeList(kv.num_pages, kv.reserved_pages)
    owned.host_booking = book_host_pages(config, page_nbytes=kv.page_nbytes, device_pages=free_list.capacity)
    num_host_pages = owned.host_booking.num_pages
    threads = parts.threads
    if threads is None:
        threads = owned.threads = DaemonThreads(2, "hicache-copy")
    device = parts.device
    if device is None:
        device = owned.device = _default_device(kv, threads)
    store = parts.store
    if isinstance(store, str):
        store = owned.open_store(store)
    check_dtype(codec_of(store), kv.dtype)
    keys = keys.with_codec(codec_of(store))
    ranks = parts.ranks
    if ranks is None:
        ranks = owned.ranks = SoloRanks()
        if config.group_size > 1:
            logger.warning("ranks.none", size=config.group_size, advice="pass ranks= for ranks that agree")
    check_group(config, ranks)
    if isinstance(device, SupportsPreparation):
        await device.prepare(kv, config.io_mode)
        device.fence(kv.compute_stream)  # one that is no stream is refused here, not by a request
    buffer = await device.host_buffer(HostArena.nbytes_needed(kv, num_host_pages))
    arena = HostArena(
        kv,
        config.host_layout,
        num_host_pages,
        buffer,
        cells=page_cells(config, kv),
        stored_layout=HostLayout.HEAD_GROUPED if config.key_scheme is KeyScheme.UNIFIED else None,
    )
    pools = {
        Tier.DEVICE: PagePool("device", free_list, kv.num_pages, on_freed),
        Tier.HOST: PagePool("host", FreeList(num_host_pages), num_host_pages, on_freed),
    }
    policies = {
        Tier.DEVICE: policy_named(config.device_eviction_policy, field="device_eviction_policy"),
        Tier.HOST: policy_named(config.host_eviction_policy, field="host_eviction_policy"),
    }
    events = KVEvents()
    tree = PrefixTree(config.page_size * TOKEN_NBYTES, pools, policies=policies, observer=events)
    return Context(
        config=config,
        loop=loop,
        clock=parts.clock or LoopClock(loop),
        threads=threads,
        kv=kv,
        arena=arena,
        device=device,
        store=None if isinstance(store, NullStore) else store,
        keys=keys,
        ranks=ranks,
        device_pool=pools[Tier.DEVICE],
        host_pool=pools[Tier.HOST],
        tree=tree,
        events=events,
        room=Room(tree, pools, write_back=config.write_policy is WritePolicy.WRITE_BACK, writes=keys.writes),
    )


def _offers(config: CacheConfig, kv: DeviceKV) -> dict[str, object]:
    return {
        "existence_ttl_s": config.existence_ttl_s,
        "slot_bytes": max(_largest_object_nbytes(config, kv), MIN_SLOT_NBYTES),
        "dtype": kv.dtype,
    }


def _largest_object_nbytes(config: CacheConfig, kv: DeviceKV) -> int:
    # Of all ranks that share a grid, so that they ask for the same slots: a stage may have short cells only.
    if config.key_scheme is not KeyScheme.UNIFIED:
        return kv.page_nbytes
    grid = grid_of(config, kv)
    layer_nbytes = kv.page_nbytes // (kv.num_layers * math.prod(grid.page_cells))
    return layer_nbytes * min(grid.layer_partition, grid.total_layers)


def check_group(config: CacheConfig, ranks: Ranks) -> None:
    """Raise ConfigError unless ``config`` says where this rank of the group stands.

    A group whose members call themselves the only one would store different bytes under one name.
    """
    if ranks.size == 1 or (ranks.size, ranks.rank) == (config.group_size, config.group_rank):
        return
    raise ConfigError(
        f"ranks is rank {ranks.rank} of {ranks.size}, but the config's grid makes this rank {config.group_rank} "
        f"of {config.group_size}; set tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size"
    )


def _default_device(kv: DeviceKV, threads: Executor) -> Device:
    if kv.device.type != "cpu":
        raise ConfigError(
            f"kv is on {kv.device}, and only tensors in host memory have a default device; pass device=, "
            "which for cuda is hicache_async.cuda.CudaDevice(kv.device)"
        )
    return CpuDevice(threads)
