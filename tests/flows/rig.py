"""What the tests of the flows share: a tiny engine around a cache, whose every page accuses itself.

A prompt is a string: each letter is one page of four tokens, and one token follows that is no whole page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from hicache_async import (
    Books,
    CacheConfig,
    DeviceKV,
    HiCache,
    Loading,
    PrefetchPolicy,
    PrefetchResult,
    PrefixLease,
)
from hicache_async.abc import Device, Store
from hicache_async.config import HostLayout
from hicache_async.core.grid import PageCells, page_cells
from hicache_async.core.hashing import HashChain
from hicache_async.core.pool import FreeList
from hicache_async.core.tokens import token_bytes
from hicache_async.flows.context import Context
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.testing.golden import check_object, check_page, fill_page, page_object
from hicache_async.testing.manual import ManualClock
from hicache_async.testing.virtual_device import VirtualDevice
from hicache_async.types import Pages, State, Stop, StopToken, Tokens

PAGE_TOKENS = 4
NUM_LAYERS = 2
PAGE_NBYTES = PAGE_TOKENS * 2 * 8 * 4 * 2 * NUM_LAYERS
"""Bytes of one page: tokens, heads, head_dim, float32, K and V, layers."""
T = TypeVar("T")


def page_tokens(letter: str) -> list[int]:
    """Return the token ids of one page."""
    return [ord(letter) * PAGE_TOKENS + i for i in range(PAGE_TOKENS)]


def tokens(letters: str) -> list[int]:
    """Return the whole pages of a prompt and one token more."""
    return [token for letter in letters for token in page_tokens(letter)] + [0]


def page_hashes(letters: str) -> list[bytes]:
    """Return the chained hash of each page of a prompt."""
    hashes: list[bytes] = []
    HashChain(b"", PAGE_TOKENS * 4).extend(hashes, token_bytes(tokens(letters)), len(letters))
    return hashes


def make_kv(num_pages: int, *, compute_stream: object | None = None) -> DeviceKV:
    """Return the tensors of a random model of two layers."""
    shape = (num_pages, PAGE_TOKENS, 2, 8)
    sides = ([torch.zeros(shape) for _ in range(NUM_LAYERS)] for _ in "kv")
    return DeviceKV.from_layers(*sides, compute_stream=compute_stream)


class PoisoningFreeList(FreeList):
    """Spoil the bytes of pages that came back, so that a late reader is seen."""

    def __init__(self, paged: DeviceKV, num_pages: int) -> None:
        super().__init__(num_pages)
        self._paged = paged

    def give_back(self, pages: Pages) -> None:
        VirtualDevice.poison(self._paged, pages)
        super().give_back(pages)


async def turns(count: int = 60) -> None:
    """Let everything run that can run without a thread, a clock or the test itself."""
    for _ in range(count):
        await asyncio.sleep(0)


async def driven(work: Awaitable[T], clock: ManualClock, step_s: float = 6.0) -> T:
    """Return what ``work`` returns, moving time on whenever nothing else happens."""
    task = asyncio.ensure_future(work)
    for _ in range(100):
        await turns()
        if task.done():
            return task.result()
        clock.advance(step_s)
    task.cancel()
    raise AssertionError("nothing moves any more, whatever the time")


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    books: Books
    result: PrefetchResult | None
    tokens: int


@dataclass(slots=True, eq=False)
class Rig:
    """One open cache, and the engine half of what a test needs."""

    cache: HiCache
    kv: DeviceKV
    device: Device
    store: Store | None
    clock: ManualClock
    served: int = field(default=0)

    @property
    def ctx(self) -> Context:
        """The parts behind the cache."""
        return self.cache._ctx

    @property
    def virtual(self) -> VirtualDevice:
        """The device, where it is a virtual one."""
        assert isinstance(self.device, VirtualDevice)
        return self.device

    @property
    def counters(self) -> dict[str, int]:
        """What the cache has counted."""
        return self.cache.stats().counters

    def lease(self, letters: str | Tokens, name: str | None = None, **options: bool) -> PrefixLease:
        """Start a request."""
        self.served += 1
        prompt = tokens(letters) if isinstance(letters, str) else letters
        return self.cache.match_prefix(name or f"request {self.served}", prompt, **options)

    def compute(self, lease: PrefixLease, num_tokens: int | None = None, *, start: int = 0) -> None:
        """Write the golden bytes of the pages from token ``start`` on, as a forward would."""
        holding = lease._holding
        end_page = (lease.num_tokens if num_tokens is None else num_tokens) // PAGE_TOKENS
        hashes = holding.hashes(end_page)
        for page in range(start // PAGE_TOKENS, end_page):
            fill_page(self.kv, int(lease.pages[page]), hashes[page])

    def check(self, lease: PrefixLease, num_tokens: int) -> None:
        """Read the first ``num_tokens`` of a request on the device, as a forward would."""
        hashes = lease._holding.hashes(num_tokens // PAGE_TOKENS)
        for page in range(num_tokens // PAGE_TOKENS):
            check_page(self.kv, int(lease.pages[page]), hashes[page])

    async def run(
        self, lease: PrefixLease, *, prefetch: bool = True, policy: PrefetchPolicy | None = None
    ) -> Served:
        """Do all that an engine does for one request, except to release it."""
        result = await lease.prefetch(policy) if prefetch else None
        loading = await lease.load()
        await self.forward(lease, loading)
        committed = lease.commit(lease.num_tokens)
        if self.cache.state is State.OPEN:
            assert committed == lease.num_tokens // PAGE_TOKENS * PAGE_TOKENS
        return self.report(lease, loading, result)

    async def forward(self, lease: PrefixLease, loading: Loading) -> None:
        """Read what is cached, compute the rest, and read it all again."""
        await loading.finished()
        self.check(lease, loading.tokens)
        allocation = await lease.allocate(lease.num_tokens)
        if allocation.after is not None:
            allocation.after.block()
        self.compute(lease, start=loading.tokens)
        self.check(lease, lease.num_tokens)

    @staticmethod
    def report(lease: PrefixLease, loading: Loading, result: PrefetchResult | None) -> Served:
        """Check a request's books and return them."""
        books = lease.books
        assert books.device + books.host + books.store + books.computed == books.prompt
        assert books.prompt - books.computed == loading.tokens
        return Served(books, result, loading.tokens)

    async def serve(self, letters: str | Tokens, *, prefetch: bool = True) -> Served:
        """Serve one request from its first token to its release."""
        with self.lease(letters) as lease:
            served = await self.run(lease, prefetch=prefetch)
        return served

    async def push_out(self, num_prompts: int, first: str = "A") -> None:
        """Serve prompts of two pages, each twice, which is enough for every policy that copies at commit."""
        for number in range(num_prompts):
            for _ in range(2):
                await self.serve(chr(ord(first) + number) + "z", prefetch=False)
            await self.cache.admin.flush()

    # Looking, without touching

    def where(self, letters: str) -> str:
        """Say for each page which tiers hold it, b both, d device, h host; ends at the first that none does."""
        found = ""
        node = self.ctx.tree.roots.get(b"")
        while node is not None and len(found) < len(letters):
            child = (node.children or {}).get(token_bytes(page_tokens(letters[len(found)])))
            if child is None:
                break
            for page in range(child.num_pages):
                place = slice(page * PAGE_TOKENS * 4, (page + 1) * PAGE_TOKENS * 4)
                if len(found) == len(letters) or child.segment[place] != token_bytes(
                    page_tokens(letters[len(found)])
                ):
                    return found
                found += {"device": "d", "host": "h", "both": "b"}[child.residency.value]
            node = child
        return found

    def check_local(self, letters: str) -> None:
        """Compare every page of a prompt that this process holds with its golden bytes, tier by tier."""
        hashes = dict.fromkeys(page_hashes(letters))
        for root in self.ctx.tree.roots.values():
            for node in root.subtree():
                for paged, copy in ((self.kv, node.device), (self.ctx.arena, node.host)):
                    for page_hash, page in zip(
                        node.hashes, () if copy.pages is None else copy.pages, strict=False
                    ):
                        if page_hash in hashes:
                            check_page(paged, int(page), page_hash)

    async def check_stored(self, letters: str, store: Store | None = None) -> int:
        """Compare the stored pages of a prompt with their golden bytes; returns how many there are from page 0."""
        inner = plain(store or self.store)
        hashes = page_hashes(letters)
        num_chunks = self.ctx.keys.num_chunks
        count = await inner.count_prefix(self.ctx.keys.keys(hashes)) // num_chunks
        for page_hash in hashes[:count]:
            data = bytearray(self.kv.page_nbytes)
            chunks = [memoryview(data)[span] for span in self.ctx.keys.spans(self.kv.page_nbytes)]
            assert await inner.read(self.ctx.keys.keys([page_hash]), chunks, StopToken()) == num_chunks
            check_object(self.kv, bytes(data), page_hash, *self._stored_order())
        return count

    async def put_in_store(self, letters: str, pages: Sequence[int] | None = None) -> None:
        """Put the golden objects of a prompt, or of some of its pages, where another process might have."""
        hashes = page_hashes(letters)
        wanted = range(len(letters)) if pages is None else pages
        keys = self.ctx.keys.keys([hashes[page] for page in wanted])
        objects = [
            memoryview(page_object(self.kv, hashes[page], *self._stored_order()))[span]
            for page in wanted
            for span in self.ctx.keys.spans(self.kv.page_nbytes)
        ]
        assert await plain(self.store).write(keys, objects) == len(keys)

    def _stored_order(self) -> tuple[HostLayout, PageCells]:
        return self.ctx.arena.stored_layout, page_cells(self.ctx.config, self.kv)

    def unfulfilled(self) -> dict[Stop, int]:
        """Return the tokens that prefetches asked for and did not bring, by reason, where there are any."""
        return {stop: count for stop, count in self.cache.stats().unfulfilled_tokens.items() if count}

    async def check_everywhere(self, letters: str) -> None:
        """Check the pages of a prompt in all three tiers."""
        self.check_local(letters)
        await self.check_stored(letters)


def plain(store: Store | None) -> MemoryStore:
    """Return the store behind all the faults."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    assert isinstance(store, MemoryStore)
    return store


async def prefetched(rig: Rig, letters: str, policy: PrefetchPolicy | None = None) -> tuple[int, int, Stop]:
    """Prefetch a prompt and release it; checks that the tokens asked for add up, and returns the result."""
    before = sum(rig.unfulfilled().values())
    with rig.lease(letters) as lease:
        missing = len(letters) * PAGE_TOKENS - lease.local_tokens
        result = await lease.prefetch(policy)
        rig.cache.audit()
    assert sum(rig.unfulfilled().values()) - before == missing - result.fetched_tokens
    return result.hit_tokens, result.fetched_tokens, result.stop


class Opener:
    """Open caches for a test, and audit every one of them before it is closed."""

    def __init__(self) -> None:
        self.rigs: list[Rig] = []

    async def __call__(
        self,
        *,
        device_pages: int = 16,
        host_pages: int = 32,
        store: Store | str | None = None,
        device: Device | None = None,
        threads: Executor | None = None,
        kv: DeviceKV | None = None,
        **options: object,
    ) -> Rig:
        """Open one cache; a virtual device that moves at once, and a clock that stands still, unless told."""
        kv = kv or make_kv(device_pages)
        device = device or VirtualDevice(auto=True)
        clock = ManualClock()
        defaults: dict[str, object] = {
            "page_size": PAGE_TOKENS,
            "host_bytes": host_pages * kv.page_nbytes,
            "host_reserve_bytes": 0,
            "allow_small_host": True,
            "write_policy": "write_through",
            "prefetch_threshold_tokens": 0,
            "prefetch_capacity_fraction": 1.0,
            "close_timeout_s": 2.0,
        }
        config = CacheConfig.from_mapping({**defaults, **options})
        opening = HiCache.open(
            config,
            kv=kv,
            device=device,
            store=store,
            clock=clock,
            threads=threads,
            device_pool=PoisoningFreeList(kv, kv.num_pages),
        )
        cache = await opening.__aenter__()
        rig = Rig(cache, kv, device, None if isinstance(store, str) else store, clock)
        self.rigs.append(rig)
        return rig

    async def restart(self, rig: Rig, **options: object) -> Rig:
        """Close a cache and open another one on its store, as a new process would."""
        rig.cache.audit()
        await rig.cache.close()
        return await self(store=rig.store, **options)  # type: ignore[arg-type]

    async def finish(self) -> None:
        """Let everything that a test held come to its end, audit, and close."""
        for rig in self.rigs:
            if isinstance(rig.device, VirtualDevice):
                rig.device.auto = True
                rig.device.advance_all()
            await turns()
            rig.cache.audit()
            await rig.cache.close()


async def on_host(open_cache: Opener, *prompts: str, **options: object) -> Rig:
    """Open a cache whose host, and nothing else, holds ``prompts``; its device moves when told."""
    rig = await open_cache(store=MemoryStore(), **options)  # type: ignore[arg-type]
    for letters in prompts:
        await rig.put_in_store(letters)
        with rig.lease(letters) as lease:
            await lease.prefetch()
        assert rig.where(letters) == "h" * len(letters)
    if isinstance(rig.device, VirtualDevice):
        rig.virtual.auto = False
    return rig
