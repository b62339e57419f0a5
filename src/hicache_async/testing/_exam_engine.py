"""A tiny engine for the exams: its pages say whose they are, and what is freed is spoiled and watched.

A prompt is a string: each letter is one page of four tokens, and one token follows that is no whole page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ..abc import Device, Ranks, Store
from ..cache import HiCache
from ..config import CacheConfig, HostLayout, PrefetchPolicy
from ..core.grid import PageCells, page_cells
from ..core.hashing import HashChain
from ..core.tokens import token_bytes
from ..flows.context import Context
from ..lease import Loading, PrefixLease
from ..memory.device_kv import DeviceKV
from ..types import State, StopToken
from ._exam_pages import SpoiledPages, check
from ._exam_store import ScriptedStore
from .golden import check_object, fill_page, page_object
from .manual import ManualClock
from .virtual_device import VirtualDevice

__all__ = ["PAGE_TOKENS", "ExamEngine", "Parts", "SpoiledPages", "make_kv", "page_hashes", "prompt", "within"]

PAGE_TOKENS = 4
NUM_LAYERS = 2
IDLE_TURNS = 3
"""Turns of the loop without work that show that none follows: what has ended tells so by callbacks."""

CLOSE_TIMEOUT_S = 0.05
POLL_S = 0.0005
PATIENCE_S = 20.0
"""How long something may take that should end by itself before it counts as hung; of a busy machine."""

_SHAPE = (PAGE_TOKENS, 1, 4)


def page_tokens(letter: str) -> list[int]:
    """Return the token ids of one page."""
    return [ord(letter) * PAGE_TOKENS + place for place in range(PAGE_TOKENS)]


def prompt(letters: str) -> list[int]:
    """Return the tokens of a prompt: its pages, and one token more."""
    return [token for letter in letters for token in page_tokens(letter)] + [0]


def page_hashes(letters: str) -> list[bytes]:
    """Return the chained hash of each page of a prompt."""
    hashes: list[bytes] = []
    data = token_bytes(prompt(letters))
    HashChain(b"", PAGE_TOKENS * 4).extend(hashes, data, len(letters))
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the exams open caches with.

    Attributes:
        make_device, make_ranks: called for each cache; ranks None: this process alone.
        options: of the config, beside those of the exam.
        patience_s: how long anything may take that should end by itself.
    """

    make_device: Callable[[], Device]
    make_ranks: Callable[[], Ranks] | None = None
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    patience_s: float = PATIENCE_S


@dataclass(slots=True, eq=False)
class ExamEngine:
    """One open cache, and the engine half of what an exam needs."""

    parts: Parts
    config: CacheConfig
    cache: HiCache
    kv: DeviceKV
    device: Device
    store: ScriptedStore
    clock: ManualClock
    spoiled: tuple[SpoiledPages, SpoiledPages]
    num_requests: int = 0
    more_devices: list[Device] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def open(cls, parts: Parts, store: ScriptedStore) -> AsyncIterator[ExamEngine]:
        """Open a cache over fresh tensors; on leaving it is closed, with its device, and not the store."""
        kv = make_kv(12)
        device, clock = parts.make_device(), ManualClock()
        if isinstance(device, VirtualDevice):
            device.auto = True
        devices: list[Device] = []
        ranks = None if parts.make_ranks is None else parts.make_ranks()
        defaults: dict[str, object] = {
            "page_size": PAGE_TOKENS,
            "host_bytes": 16 * kv.page_nbytes,
            "host_reserve_bytes": 0,
            "allow_small_host": True,
            "write_policy": "write_through",
            "prefetch_policy": "wait_complete",
            "prefetch_threshold_tokens": 0,
            "prefetch_capacity_fraction": 1.0,
            "store_batch_pages": 2,
            "max_loads_in_flight": 1,  # with one slot of each kind a slot that is lost is missed at once
            "max_prefetches_in_flight": 1,
            "close_timeout_s": CLOSE_TIMEOUT_S,
        }
        config = CacheConfig.from_mapping({**defaults, **parts.options})
        try:
            opening = HiCache.open(config, kv=kv, device=device, store=store, ranks=ranks, clock=clock)
            async with opening as cache:
                engine = cls(parts, config, cache, kv, device, store, clock, _spoil(cache))
                devices = engine.more_devices
                yield engine
        finally:
            for each in (device, *devices):
                await each.aclose()
            if ranks is not None:
                await ranks.aclose()

    @property
    def ctx(self) -> Context:
        """The parts behind the cache."""
        return self.cache._ctx

    @property
    def plain(self) -> Store:
        """The store that does what it is asked."""
        return self.store.inner

    def another_device(self) -> Device:
        """Return one more device, which is closed with this engine."""
        self.more_devices.append(self.parts.make_device())
        return self.more_devices[-1]

    def hold_device(self) -> None:
        """Let nothing move from now on, where the device waits to be told."""
        if isinstance(self.device, VirtualDevice):
            self.device.auto = False

    def let_go(self) -> None:
        """Let everything move, now and from now on: what the device holds, and calls at the store's door."""
        self.store.open()
        if isinstance(self.device, VirtualDevice):
            self.device.auto = True
            self.device.advance_all()

    # One request

    def lease(self, letters: str) -> PrefixLease:
        """Start a request."""
        self.num_requests += 1
        return self.cache.match_prefix(f"request {self.num_requests}", prompt(letters))

    async def serve(self, letters: str, policy: PrefetchPolicy | None = None) -> int:
        """Serve one request from its first token to its release; returns how many tokens were cached."""
        with self.lease(letters) as lease:
            await lease.prefetch(policy)
            loading = await lease.load()
            await self.forward(lease, loading)
            committed = lease.commit(lease.num_tokens)
            assert committed == len(letters) * PAGE_TOKENS or self.cache.state is not State.OPEN
            books = lease.books
            assert books.device + books.host + books.store + books.computed == books.prompt, f"{books}"
            assert books.prompt - books.computed == loading.tokens, f"{books}, {loading.tokens} loaded"
        return loading.tokens

    async def forward(self, lease: PrefixLease, loading: Loading) -> None:
        """Read what is cached, compute the rest, and read all of it again."""
        await loading.finished()
        self.check(lease, loading.tokens)
        allocation = await lease.allocate(lease.num_tokens)
        if allocation.after is not None:
            await self.device.wait(allocation.after)
        self.compute(lease, loading.tokens)
        self.check(lease, lease.num_tokens)

    def compute(self, lease: PrefixLease, start: int = 0) -> None:
        """Write the bytes of all whole pages from token ``start`` on."""
        num_pages = lease.num_tokens // PAGE_TOKENS
        hashes = lease._holding.hashes(num_pages)
        for place in range(start // PAGE_TOKENS, num_pages):
            fill_page(self.kv, int(lease.pages[place]), hashes[place])

    def check(self, lease: PrefixLease, num_tokens: int) -> None:
        """Read the whole pages of the first ``num_tokens`` of a request, as a forward would."""
        num_pages = num_tokens // PAGE_TOKENS
        hashes = lease._holding.hashes(num_pages)
        for place in range(num_pages):
            check(self.kv, int(lease.pages[place]), hashes[place])

    # The store, as another process sees it

    async def put(self, letters: str) -> list[str]:
        """Store a prompt; returns its keys."""
        hashes = page_hashes(letters)
        keys = self.ctx.keys.keys(hashes)
        spans = self.ctx.keys.spans(self.kv.page_nbytes)
        pages = [memoryview(page_object(self.kv, each, *self._stored_order())) for each in hashes]
        objects = [page[span] for page in pages for span in spans]
        count = await self.plain.write(keys, objects)
        assert count == len(objects), f"{self.plain!r} stored {count} of {len(objects)} pages"
        return keys

    async def check_stored(self, letters: str) -> int:
        """Read whatever of a prompt is stored: right or not there; returns how many pages there are."""
        hashes = page_hashes(letters)
        found = 0
        spans = self.ctx.keys.spans(self.kv.page_nbytes)
        for page_hash in hashes:
            data = bytearray(self.kv.page_nbytes)
            chunks = [memoryview(data)[span] for span in spans]
            if await self.plain.read(self.ctx.keys.keys([page_hash]), chunks, StopToken()) == len(chunks):
                check_object(self.kv, bytes(data), page_hash, *self._stored_order())
                found += 1
        return found

    def _stored_order(self) -> tuple[HostLayout, PageCells]:
        return self.ctx.arena.stored_layout, page_cells(self.config, self.kv)

    # Coming to rest

    async def rest(self) -> None:
        """Return when the cache does nothing any more.

        Raises: AssertionError: it does not come to rest; names what still runs.
        """
        loop = asyncio.get_running_loop()
        end_s, num_idle_turns = loop.time() + self.parts.patience_s, 0
        while num_idle_turns < IDLE_TURNS:
            self.let_go()
            running = self._running()
            num_idle_turns = 0 if running else num_idle_turns + 1
            if loop.time() > end_s:
                raise AssertionError(f"does not come to rest: {', '.join(running)}")
            is_manual = num_idle_turns > 0 or isinstance(self.device, VirtualDevice)
            await asyncio.sleep(0 if is_manual else POLL_S)

    def _running(self) -> list[str]:
        names = [task.get_name() for task in asyncio.all_tasks()]
        tasks = [name for name in names if name.startswith("hicache:") and name != "hicache:backups"]
        if self.cache.state is State.CLOSED:  # what it abandoned keeps its pages
            return tasks
        hops = [hop.name for hop in self.ctx.hops.live]
        backups = self.cache._movers.backups
        return tasks + hops + ([] if backups.is_idle.is_set() else ["backups"])


def make_kv(num_pages: int) -> DeviceKV:
    """Return the tensors of a tiny model."""
    shape = (num_pages, *_SHAPE)
    return DeviceKV.from_layers(*([torch.zeros(shape) for _ in range(NUM_LAYERS)] for _ in "kv"))


def _spoil(cache: HiCache) -> tuple[SpoiledPages, SpoiledPages]:
    # Of a cache that has just been opened, so that every page is free.
    ctx = cache._ctx
    device, host = (
        SpoiledPages(pool._free_list, paged)
        for pool, paged in ((ctx.device_pool, ctx.kv), (ctx.host_pool, ctx.arena))
    )
    ctx.device_pool._free_list, ctx.host_pool._free_list = device, host
    return device, host


async def within(work: Awaitable[object], limit_s: float = PATIENCE_S) -> None:
    """Await ``work``, which ends soon or never; raises AssertionError if it does not end."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait((task,), timeout=limit_s)
    if not done:
        task.cancel()
        raise AssertionError(f"does not end within {limit_s} s")
    await task
