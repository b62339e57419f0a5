"""Small caches for tests: on a virtual device, with spoiled free pages, closed with a proof that nothing is left.

The fixtures of the pytest plugin are made of these; without pytest::

    kv = small_kv()
    caches = SmallCaches(kv, small_config(kv), store=HeldStore(MemoryStore(), held=()))
    cache = await caches()
    ...
    await caches.finish()  # raises LeakError
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from types import EllipsisType, FrameType
from typing import Any

import torch

from ..abc import Clock, Device, DevicePool, Store
from ..cache import HiCache
from ..config import CacheConfig, WritePolicy
from ..core.pool import FreeList
from ..errors import InvariantError
from ..lease import PrefixLease
from ..memory.device_kv import DeviceKV
from ..stores.file import FileStore
from ..types import State
from ._exam_engine import SpoiledPages
from .faults import HangingStore, HeldStore, StoreWrapper
from .leaks import Leak, LeakChecks, LeakError, LeakWatch
from .virtual_device import VirtualDevice

_NUM_CALLERS = 3
"""How many callers of ``match_prefix`` a forgotten lease names."""


def small_kv(num_pages: int = 16, page_size: int = 4, *, num_layers: int = 2) -> DeviceKV:
    """Return the tensors of a tiny model: 2 heads of 8, float32."""
    shape = (num_pages, page_size, 2, 8)
    return DeviceKV.from_layers(*([torch.zeros(shape) for _ in range(num_layers)] for _ in "kv"))


def empty_kv_like(kv: DeviceKV) -> DeviceKV:
    """Return tensors of the shapes and the dtype of ``kv``, all zeros."""
    dtype: torch.dtype = getattr(torch, kv.dtype)
    sides = (
        [torch.zeros(kv.num_pages, kv.page_size, kv.kv_heads, dim, dtype=dtype) for _ in range(kv.num_layers)]
        for dim in kv.head_dims
    )
    return DeviceKV.from_layers(*sides, reserved_pages=kv.reserved_pages)


def small_config(kv: DeviceKV, **changes: Any) -> CacheConfig:
    """Return options for ``kv`` under which everything happens at once.

    What is committed is copied down at the first commit, nothing is too short for a prefetch, and the host
    has twice the pages of the device.

    Args:
        changes: options of :class:`CacheConfig` to be otherwise.
    """
    options: dict[str, Any] = {
        "page_size": kv.page_size,
        "host_bytes": 2 * kv.num_pages * kv.page_nbytes,
        "host_reserve_bytes": 0,
        "write_policy": WritePolicy.WRITE_THROUGH,
        "prefetch_threshold_tokens": 0,
        "prefetch_capacity_fraction": 1.0,
        "close_timeout_s": 2.0,
    }
    return CacheConfig(**options | changes)


class WatchedCache(HiCache):
    """A cache that knows where each of its leases was made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._makers: dict[PrefixLease, str] = {}

    def match_prefix(self, *args: Any, **options: Any) -> PrefixLease:
        """As :meth:`HiCache.match_prefix`."""
        lease = super().match_prefix(*args, **options)
        self._makers[lease] = " < ".join(_callers(sys._getframe(1)))
        return lease

    def _forget(self, lease: PrefixLease) -> None:
        super()._forget(lease)
        del self._makers[lease]

    def release_forgotten(self) -> list[Leak]:
        """Release every lease that is live, and say of each whose it was."""
        forgotten = [lease for lease in self._leases if not self._leases[lease].released]
        leaks = [
            Leak("lease", f"{lease!r} was not released; made at {self._makers[lease]}") for lease in forgotten
        ]
        for lease in forgotten:
            lease.release()
        return leaks

    def audited(self) -> list[Leak]:
        """Return what an audit finds."""
        try:
            self.audit()
        except InvariantError as error:
            return [Leak("pages", str(error))]
        return []

    def failures(self) -> list[Leak]:
        """Return the bug that turned the cache to FAILED, if one has."""
        return (
            []
            if self._ctx.failure is None
            else [Leak("failure", f"the cache has failed: {self._ctx.failure!r}")]
        )

    def hung(self) -> list[Leak]:
        """Return the moves that run, although the cache is closed."""
        if self.state is not State.CLOSED:
            return []
        hops = sorted(hop.name for hop in self._ctx.hops.live)
        return [Leak("move", f"{name} is not over, and keeps its pages for ever") for name in hops]

    def spoil_host_pages(self) -> SpoiledPages:
        """Spoil the free pages of the host from now on; all of them are free."""
        pool = self._ctx.host_pool
        spoiled = pool._free_list = SpoiledPages(pool._free_list, self._ctx.arena)
        return spoiled


@dataclasses.dataclass(slots=True, eq=False)
class _Opened:
    cache: WatchedCache
    device: Device
    stores: tuple[Store, ...]
    spoiled: tuple[SpoiledPages, ...]

    def let_go(self) -> None:
        """Let in what the stores hold, and move what the device has not moved."""
        for store in self.stores:
            if isinstance(store, HeldStore):
                store.open()
            if isinstance(store, HangingStore):
                store.release()
        if isinstance(self.device, VirtualDevice):
            self.device.let_go()

    def touched(self) -> Iterator[Leak]:
        """Yield the pages that were written while nobody owned them."""
        for spoiled in self.spoiled:
            try:
                spoiled.check()
            except AssertionError as error:
                yield Leak("freed page", str(error))


class SmallCaches:
    """Open small caches on one running loop, and close all of them with a proof that nothing is left.

    Args:
        kv: the tensors of the first cache; later ones get tensors like these.
        config: of each cache that is not told otherwise.
        store: which all caches share; None: no third tier.
        device: of the first cache; later ones, and None: a virtual device that moves at once.
        clock: of all caches; None: the loop's own time.
        device_pool: the first cache's book of free device pages; None: a :class:`FreeList`.
        checks: what :meth:`finish` looks for.
        directories: below which it looks for temporary files, beside those of the stores.

    **Ownership**: the caches are closed by :meth:`finish`; what was given stays the caller's.
    """

    def __init__(
        self,
        kv: DeviceKV,
        config: CacheConfig,
        *,
        store: Store | None = None,
        device: Device | None = None,
        clock: Clock | None = None,
        device_pool: DevicePool | None = None,
        checks: LeakChecks | None = None,
        directories: Iterable[str] = (),
    ) -> None:
        self._kv = kv
        self._config = config
        self._store = store
        self._device = device
        self._clock = clock
        self._device_pool = device_pool
        self._checks = checks or LeakChecks()
        self._watch = LeakWatch(self._checks, directories)
        self._opened: list[_Opened] = []

    @property
    def first(self) -> HiCache:
        """The cache that was opened first."""
        return self._opened[0].cache

    async def __call__(
        self,
        config: CacheConfig | None = None,
        *,
        kv: DeviceKV | None = None,
        device: Device | None = None,
        store: Store | str | EllipsisType | None = ...,
        **changes: Any,
    ) -> HiCache:
        """Open a cache.

        Args:
            config: None: that of all.
            kv, device: None: those given at first to the first cache, then new ones.
            store: ``...``: the one that all share; None: no third tier.
            changes: options of the config to be otherwise.
        Ownership: may be closed at any time; :meth:`finish` closes it else.
        """
        is_first = not self._opened and kv is None
        if kv is None:
            kv = self._kv if is_first else empty_kv_like(self._kv)
        if device is None:
            device = (self._device if is_first else None) or VirtualDevice(auto=True)
        if isinstance(store, EllipsisType):
            store = self._store
        free_list = (self._device_pool if is_first else None) or FreeList(kv.num_pages, kv.reserved_pages)
        pool = SpoiledPages(free_list, kv)
        opening = WatchedCache.open(
            dataclasses.replace(config or self._config, **changes),
            kv=kv,
            device=device,
            store=store,
            clock=self._clock,
            device_pool=pool,
        )
        cache = await opening.__aenter__()
        assert isinstance(cache, WatchedCache)
        self._remember(_Opened(cache, device, _layers_of(cache), (pool, cache.spoil_host_pages())))
        return cache

    def _remember(self, opened: _Opened) -> None:
        self._opened.append(opened)
        self._watch.add_check(opened.cache.hung)
        for store in opened.stores:
            if isinstance(store, FileStore):
                self._watch.add_directory(store.root)

    async def finish(self) -> None:
        """Let held things go, audit, close, and look for whatever is left.

        Raises: LeakError: names all that was left, the request of each lease and where it was made.
        Cancellation: caches that were not closed yet stay open, and no check is made.
        """
        leaks: list[Leak] = []
        for opened in self._opened:
            leaks += await self._close(opened)
        leaks += await self._watch.settled()
        if leaks:
            raise LeakError(leaks)

    async def _close(self, opened: _Opened) -> list[Leak]:
        cache = opened.cache
        opened.let_go()
        forgotten = cache.release_forgotten()
        leaks = forgotten if self._checks.leases else []
        leaks += cache.audited()
        await cache.close()
        leaks += cache.failures() if self._checks.failures else []
        return leaks + list(opened.touched())


def _layers_of(cache: WatchedCache) -> tuple[Store, ...]:
    """Return the store of a cache and what it wraps, outermost first."""
    stores: list[Store] = []
    store = cache._ctx.store
    while store is not None:
        stores.append(store)
        store = store.inner if isinstance(store, StoreWrapper) else None
    return tuple(stores)


def _callers(frame: FrameType | None) -> Iterator[str]:
    """Yield where a call came from, nearest first, up to the loop."""
    for _ in range(_NUM_CALLERS):
        if frame is None or frame.f_globals.get("__name__", "").startswith("asyncio."):
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        frame = frame.f_back
