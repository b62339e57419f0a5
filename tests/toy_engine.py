"""A toy engine for tests of a whole cache: small CPU tensors, golden pages instead of a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import torch

from hicache_async import Books, CacheConfig, DeviceKV, HiCache, PrefixLease, Store
from hicache_async.core.hashing import HashChain, chain_seed
from hicache_async.core.tokens import TOKEN_NBYTES, TokenKey
from hicache_async.testing.golden import check_page, fill_page
from hicache_async.types import Pages

PAGE_SIZE = 4
NUM_LAYERS = 2


def make_kv(num_pages: int = 16) -> DeviceKV:
    """Return the tensors of an engine: 2 layers, 2 heads of 8 floats."""
    k, v = ([torch.zeros(num_pages, PAGE_SIZE, 2, 8) for _ in range(NUM_LAYERS)] for _ in "kv")
    return DeviceKV.from_layers(k, v)


def make_config(**options: Any) -> CacheConfig:
    """Return options that suit a toy: every page goes to all tiers at once, nothing is too small."""
    toy = {
        "page_size": PAGE_SIZE,
        "host_reserve_bytes": 0,
        "write_policy": "write_through",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold_tokens": 0,
    }
    return CacheConfig(**(toy | options))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def open_cache(
    num_pages: int = 16, *, kv: DeviceKV | None = None, store: Store | str | None = None, **options: Any
) -> AsyncIterator[HiCache]:
    """Open a cache over a toy's tensors; at the end its books must balance."""
    config = make_config(**options)
    async with HiCache.open(config, kv=make_kv(num_pages) if kv is None else kv, store=store) as cache:
        yield cache
        await cache.admin.flush()
        cache.audit()


def prompt(number: int, num_tokens: int = 6 * PAGE_SIZE + 1) -> list[int]:
    """Return tokens that no other prompt begins with."""
    return [number * 1000 + i for i in range(num_tokens)]


def page_hashes(tokens: list[int], salt: bytes = b"", adapter: str | None = None) -> list[bytes]:
    """Return the hash of each whole page of a prompt."""
    chain = HashChain(chain_seed(salt, adapter), PAGE_SIZE * TOKEN_NBYTES)
    return TokenKey(tokens).page_hashes(chain, len(tokens) // PAGE_SIZE)


def fill(cache: HiCache, pages: Pages, hashes: list[bytes]) -> None:
    """Write golden bytes into device pages, as a forward would."""
    for page, page_hash in zip(pages.tolist(), hashes, strict=True):
        fill_page(cache._ctx.kv, page, page_hash)


def check(cache: HiCache, pages: Pages, hashes: list[bytes]) -> None:
    """Read device pages, as attention would, and find nobody else's bytes in them."""
    for page, page_hash in zip(pages.tolist(), hashes, strict=True):
        check_page(cache._ctx.kv, page, page_hash)


async def compute(cache: HiCache, lease: PrefixLease, tokens: list[int], hashes: list[bytes]) -> None:
    """Load what is cached, check it, and compute and commit the rest."""
    loading = await lease.load()
    await loading.finished()
    start = len(loading.pages)
    check(cache, loading.pages, hashes[:start])
    lease.allocate_nowait(len(tokens)).block()
    fill(cache, lease.pages[start : len(hashes)], hashes[start:])
    assert lease.commit(len(tokens)) == len(tokens) // PAGE_SIZE * PAGE_SIZE


async def serve(
    cache: HiCache,
    name: str,
    tokens: list[int],
    *,
    salt: bytes = b"",
    adapter: str | None = None,
    whole: bool = False,
) -> Books:
    """Serve one request from its first look to its release; returns where its prompt came from."""
    with cache.match_prefix(name, tokens, salt=salt, adapter=adapter, whole=whole) as lease:
        await lease.prefetch()
        await compute(cache, lease, tokens, page_hashes(tokens, salt, adapter))
        return lease.books


async def push_out(cache: HiCache, num_prompts: int, first_number: int) -> None:
    """Let others use the cache, each twice, so that every write policy keeps them."""
    for number in range(first_number, first_number + num_prompts):
        for turn in range(2):
            await serve(cache, f"other {number} {turn}", prompt(number))
        await cache.admin.flush()


class Leftovers:
    """What an opened cache left running: tasks of this loop and threads of this library."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())

    def check(self) -> None:
        """Fail if a task or a thread that was started since is still there."""
        assert not [task.get_name() for task in asyncio.all_tasks() - self._tasks]
        for thread in set(threading.enumerate()) - self._threads:
            if thread.name.startswith("hicache"):
                thread.join(30)  # it was told to end
                assert not thread.is_alive(), f"{thread.name} lives on"
