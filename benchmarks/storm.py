"""How soon everything of a request is quiet after its cancel, in the middle of many others, on real files."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Set
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hicache_async import (
    CacheConfig,
    CpuDevice,
    DeviceKV,
    HiCache,
    Loading,
    PrefetchPolicy,
    StopToken,
    Tier,
    WritePolicy,
)
from hicache_async.stores import FileStore
from hicache_async.testing.leaks import live_tasks, temp_files, thread_jobs

from .harness import Benchmark, Record, counted

PAGE_SIZE = 16
PAGE_NBYTES = PAGE_SIZE * 2 * 8 * 64 * 2 * 2
"""Bytes of one page: tokens, layers, heads, head_dim, K and V, float16."""

PROMPT_PAGES = 32
NUM_PROMPTS = 128
"""More than the host holds, so that prefetches have to read."""

NUM_REQUESTS = 32
"""How many requests run at once."""


def make_kv(num_pages: int) -> DeviceKV:
    """Return the tensors of a model of two layers."""
    planes = [torch.zeros((num_pages, PAGE_SIZE, 8, 64), dtype=torch.float16) for _ in range(4)]
    return DeviceKV.from_layers(planes[:2], planes[2:])


def tokens(number: int) -> list[int]:
    """Return a prompt; the first half of each second one is that of the one before."""
    half = PROMPT_PAGES * PAGE_SIZE // 2
    shared, own = half * (number // 2), 10**6 + half * number
    return [*range(shared, shared + half), *range(own, own + half)]


class Storm:
    """Requests on one cache, some of which are cancelled at a moment chosen at random.

    Attributes:
        quiet_s: for each cancel the seconds until nothing of its request ran any more.
    """

    def __init__(self, cache: HiCache, kv: DeviceKV, rng: random.Random) -> None:
        self.cache = cache
        self.kv = kv
        self.rng = rng
        self.quiet_s: list[float] = []
        self.request_s = 0.02
        self._numbers = count()

    async def request(self, number: int, loaded: list[Loading]) -> None:
        """Do what an engine does for one request of a prompt; ``loaded`` gets what it has loaded."""
        prompt = tokens(number)
        with self.cache.match_prefix(f"request {next(self._numbers)}", prompt) as lease:
            await lease.prefetch(PrefetchPolicy.wait_complete())
            loading = await lease.load()
            loaded.append(loading)
            await loading.finished()
            allocation = await lease.allocate(len(prompt))
            if allocation.after is not None:
                await self.cache._ctx.device.wait(allocation.after)
            lease.commit(len(prompt))

    async def store_all(self) -> None:
        """See every prompt stored."""
        for number in range(NUM_PROMPTS):
            await self.request(number, [])
            await self.cache.admin.flush()

    async def run(self, num_cancels: int) -> None:
        """Keep requests running until so many were cancelled."""
        await asyncio.gather(*(self._worker(num_cancels) for _ in range(NUM_REQUESTS)))

    async def _worker(self, num_cancels: int) -> None:
        loop = asyncio.get_running_loop()
        while len(self.quiet_s) < num_cancels:
            loaded: list[Loading] = []
            task = loop.create_task(self.request(self.rng.randrange(NUM_PROMPTS), loaded))
            cancelled_s: list[float] = []

            def cancel(task: asyncio.Task[None] = task, cancelled_s: list[float] = cancelled_s) -> None:
                if task.cancel():
                    cancelled_s.append(loop.time())

            start_s = loop.time()
            timer = loop.call_later(self.rng.uniform(0, 1.5 * self.request_s), cancel)
            with suppress(asyncio.CancelledError):
                await task
            timer.cancel()
            if not cancelled_s:
                self.request_s += (loop.time() - start_s - self.request_s) / 16
                continue
            await self._quiet(loaded)
            self.quiet_s.append(loop.time() - cancelled_s[0])

    async def _quiet(self, loaded: list[Loading]) -> None:
        # What it alone wanted was stopped; a copy that it had submitted goes on to its end.
        stopped = [hop.settled for hop in self.cache._ctx.hops.live if hop.stop.stopped]
        if stopped:
            await asyncio.wait(stopped)
        for loading in loaded:
            await loading.finished()

    async def pages_left(self) -> int:
        """Give up all that is cached, and return how many pages are not free: somebody holds them."""
        for tier in (Tier.DEVICE, Tier.HOST):
            await self.cache.admin.clear(tier)
        stats = self.cache.stats()
        return sum(tier.capacity - tier.free for tier in (stats.device, stats.host))


async def _num_left(tasks: Set[asyncio.Task[Any]], jobs: Set[threading.Thread]) -> int:
    """Return how many tasks and thread jobs there are beyond those given, when they had a second to end."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 1.0
    await asyncio.sleep(0)
    while (left := len(live_tasks() - tasks) + len(thread_jobs().keys() - jobs)) and loop.time() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return left


async def records(quick: bool) -> AsyncIterator[Record]:
    """Cancel requests at random while 32 of them run, then look for what is left of them."""
    num_cancels = 40 if quick else 1000
    tasks, jobs = live_tasks(), thread_jobs().keys()
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        store, device = FileStore(Path(name), existence_ttl_s=0), CpuDevice()
        kv = make_kv(NUM_REQUESTS * PROMPT_PAGES)
        config = CacheConfig(
            page_size=PAGE_SIZE,
            host_ratio=1.5,
            host_reserve_bytes=0,
            write_policy=WritePolicy.WRITE_THROUGH,
            prefetch_threshold_tokens=0,
        )
        async with HiCache.open(config, kv=kv, store=store, device=device) as cache:
            storm = Storm(cache, kv, random.Random(1))
            await storm.store_all()
            await storm.run(num_cancels)
            await cache.admin.flush()
            cache.audit()
            pages_left = await storm.pages_left()
        floor_s = await two_pages_s(store)
        await store.aclose()
        await device.aclose()
        files_left = len(temp_files(name))
        tasks_left = await _num_left(tasks, jobs)
    quiet_s = statistics.quantiles(storm.quiet_s, n=100, method="inclusive")
    yield counted(
        "cancel.storm",
        {"requests": NUM_REQUESTS, "pages": PROMPT_PAGES, "page_nbytes": PAGE_NBYTES},
        quiet_s[49] * 1e3,
        floor_s * 1e3,
        floor_name="store.read of two pages",
        unit="ms",
        fields={
            "cancels": len(storm.quiet_s),
            "pages_left": pages_left,
            "files_left": files_left,
            "tasks_left": tasks_left,
            "quiet_p50_s": quiet_s[49],
            "quiet_p99_s": quiet_s[98],
        },
    )


async def two_pages_s(store: FileStore) -> float:
    """Return how long the store takes for as much as a stopped read may still touch."""
    keys = ["storm-1", "storm-2"]
    buffers = [memoryview(bytearray(PAGE_NBYTES)) for _ in keys]
    await store.write(keys, buffers)
    seconds = []
    for _ in range(31):
        start = time.perf_counter()
        assert await store.read(keys, buffers, StopToken()) == len(keys)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


BENCHMARKS = [Benchmark("cancel.storm", records)]
