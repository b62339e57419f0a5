"""A real model, small: two random layers whose attention reads K/V pages by their ids.

It is the model of the demo and the demo's K/V pages, driven one request at a time so that a test can
look at every page and every logit. A chunk of a prompt is one page, cached or not, so that a cached
run and a recomputed one see the same shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from paged_engine import PagedKV
from torch import Tensor

from hicache_async import Books, CacheConfig, HiCache, StopToken, Tier
from hicache_async.abc import PagedBytes
from hicache_async.config import IO_MODES, HostLayout
from hicache_async.core.hashing import HashChain
from hicache_async.core.tokens import TokenKey
from hicache_async.stores import FileStore
from tests.flows.stores import page_keys
from tests.tiny_llama import MODEL

torch.set_num_threads(1)  # a team of threads takes longer to meet than these matrices to multiply

PAGE_SIZE = 4
DEVICE_PAGES = 12
HOST_PAGES = 25


def prompt(seed: int, num_tokens: int = 6 * PAGE_SIZE + 3) -> list[int]:
    """Return random tokens."""
    return torch.randint(97, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def page_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Return the hash of each whole page."""
    return TokenKey(list(tokens)).page_hashes(HashChain(b"", 4 * PAGE_SIZE), len(tokens) // PAGE_SIZE)


def forward(
    kv: PagedKV,
    pages: Tensor,
    tokens: list[int],
    start: int,
    num_decoded: int,
    ready: Callable[[int], None] = lambda layer: None,
) -> list[Tensor]:
    """Compute tokens from ``start`` on, decode greedily, and return the logits of every chunk and token."""
    logits: list[Tensor] = []
    stop, end = start, len(tokens) + num_decoded
    while stop < end:
        first, stop = stop, min(stop // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE, max(len(tokens), stop + 1))
        if first >= len(tokens):
            tokens = [*tokens, int(logits[-1].argmax())]
            stop = first + 1
        context = kv.context(pages, first, stop, ready)
        logits.append(MODEL.forward(torch.tensor(tokens[first:stop]), first, context))
    return logits


class Recomputed:
    """What recomputing gives, for as many prompts as were asked for: logits, and the bytes of each page."""

    def __init__(self) -> None:
        self._logits: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        self._pages: dict[bytes, list[list[NDArray[np.uint8]]]] = {}

    def logits(self, tokens: list[int], num_decoded: int) -> list[Tensor]:
        """Return the logits of a run with nothing cached."""
        known = self._logits.get((tuple(tokens), num_decoded))
        if known is None:
            num_pages = -(-(len(tokens) + num_decoded) // PAGE_SIZE)
            kv = PagedKV(MODEL.config, num_pages, PAGE_SIZE)
            known = forward(kv, torch.arange(num_pages), tokens, 0, num_decoded)
            self._logits[tuple(tokens), num_decoded] = known
            for page, page_hash in enumerate(page_hashes(tokens)):
                self._pages[page_hash] = _planes_of(kv.device_kv(), page)
        return known

    def check_page(self, paged: PagedBytes, page: int, page_hash: bytes) -> None:
        """Compare a page of the device or the host with a recomputed one."""
        for layer, (found, wanted) in enumerate(
            zip(_planes_of(paged, page), self._pages[page_hash], strict=True)
        ):
            for plane in range(2):
                where = f"{type(paged).__name__} page {page}, layer {layer}, plane {plane}"
                assert np.array_equal(found[plane], wanted[plane]), f"{where} is not what recomputing gives"

    def check_object(self, payload: bytes, page_hash: bytes, layout: HostLayout) -> None:
        """Compare a stored page with a recomputed one."""
        planes = self._pages[page_hash]
        if layout is HostLayout.PAGE_FIRST_DIRECT:  # K of all layers, then V
            planes = [list(each) for each in zip(*planes, strict=True)]
        assert payload == b"".join(plane.tobytes() for layer in planes for plane in layer)


def _planes_of(paged: PagedBytes, page: int) -> list[list[NDArray[np.uint8]]]:
    return [
        [plane[page].numpy().copy() for plane in paged.planes(layer)] for layer in range(paged.num_layers)
    ]


@dataclass(frozen=True)
class Answer:
    """Where the prompt came from, and the logits that were computed for it."""

    books: Books
    logits: list[Tensor]


class TinyEngine:
    """One cache over the pages of the model, and one request at a time."""

    def __init__(self, cache: HiCache, kv: PagedKV, recomputed: Recomputed) -> None:
        self.cache = cache
        self.kv = kv
        self.recomputed = recomputed
        self._number = 0

    async def answer(self, tokens: list[int], num_decoded: int = 4) -> Answer:
        """Answer a prompt, check its pages and logits against recomputing, and say where it came from."""
        self._number += 1
        total_tokens = len(tokens) + num_decoded
        expected = self.recomputed.logits(tokens, num_decoded)
        with self.cache.match_prefix(f"request {self._number}", tokens) as lease:
            await lease.prefetch()
            loading = await lease.load(total_tokens)
            allocation = lease.allocate_nowait(total_tokens)
            pages = torch.as_tensor(lease.pages)
            await asyncio.to_thread(allocation.block)
            logits = await asyncio.to_thread(
                forward, self.kv, pages, tokens, loading.tokens, num_decoded, loading.block
            )
            for page, page_hash in zip(pages.tolist(), page_hashes(tokens), strict=False):
                self.recomputed.check_page(self.kv.device_kv(), page, page_hash)
            assert lease.commit(len(tokens)) == len(tokens) // PAGE_SIZE * PAGE_SIZE
            books = lease.books
        expected = expected[loading.tokens // PAGE_SIZE :]
        assert len(logits) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(logits, expected, strict=True))
        return Answer(books, logits)

    async def push_out(self, seeds: Sequence[int]) -> None:
        """Let others use the cache, each twice, so that every write policy keeps them."""
        for seed in seeds:
            for _ in range(2):
                await self.answer(prompt(seed), num_decoded=0)
            await self.cache.admin.flush()

    def check_local(self) -> Counter[Tier]:
        """Compare every cached page of device and host with a recomputed one; returns how many there are."""
        ctx = self.cache._ctx
        found: Counter[Tier] = Counter()
        for root in ctx.tree.roots.values():
            for node in root.subtree():
                for tier, paged in ((Tier.DEVICE, ctx.kv), (Tier.HOST, ctx.arena)):
                    pages = node.copy_in(tier).pages
                    for page, page_hash in zip(
                        () if pages is None else pages.tolist(), node.hashes, strict=False
                    ):
                        self.recomputed.check_page(paged, page, page_hash)
                        found[tier] += 1
        return found

    async def check_stored(self, directory: Path) -> int:
        """Compare every stored page with a recomputed one; returns how many there are."""
        store = FileStore(directory)
        keys = await page_keys(store)
        for key in keys:
            payload = bytearray(self.cache._ctx.kv.page_nbytes)
            assert await store.read([key], [memoryview(payload)], StopToken()) == 1
            page_hash = bytes.fromhex(key.partition("_")[0])
            self.recomputed.check_object(bytes(payload), page_hash, self.cache._ctx.arena.layout)
        await store.aclose()
        return len(keys)


@contextlib.asynccontextmanager
async def open_engine(
    directory: Path,
    recomputed: Recomputed,
    *,
    layout: HostLayout = HostLayout.PAGE_FIRST,
    write_policy: str = "write_through",
) -> AsyncIterator[TinyEngine]:
    """Open a cache on ``directory`` over fresh tensors, as a new process would; audit it at the end."""
    kv = PagedKV(MODEL.config, DEVICE_PAGES, PAGE_SIZE)
    pages = kv.device_kv()
    config = CacheConfig(
        model_id="tiny",
        page_size=PAGE_SIZE,
        host_bytes=HOST_PAGES * pages.page_nbytes,
        host_reserve_bytes=0,
        host_layout=layout,
        io_mode=IO_MODES[layout][0],
        write_policy=write_policy,  # type: ignore[arg-type]
        prefetch_policy="wait_complete",  # type: ignore[arg-type]
        prefetch_threshold_tokens=0,
    )
    async with HiCache.open(config, kv=pages, store=f"file://{directory}") as cache:
        yield TinyEngine(cache, kv, recomputed)
        await cache.admin.flush()
        cache.audit()
